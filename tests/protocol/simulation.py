"""One story: some minutes of a small cluster in which everything fails, then calm, then the end of all pods.

python -m tests.protocol SEED...     replays stories and prints what happened
python -m tests.protocol --count N   tells N stories and prints the seeds of those that break a promise
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from random import Random
from random import seed as seed_everything

from kvplace.core.enforcement import Enforcement
from kvplace.core.errors import KvplaceError
from kvplace.core.ledger import Ledger
from kvplace.core.request import Policy, Scope
from kvplace.core.request_document import PodRequest, read_pod_request, write_request
from kvplace.core.scalars import NO_CPUS, CpuMask, NodeName
from kvplace.kube.records import PodRecord
from kvplace.kube.watches import LEDGERS, PODS
from tests.controller.replicas import Replica, replica
from tests.core.requests import request_with
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import EIGHT, TWO
from tests.protocol.chaos import Chaos, View
from tests.protocol.node import SimulatedNode, read_placement
from tests.virtual_time import JumpingLoop

_TURMOIL_S = 90.0
_CALM_S = 120.0
_NAMES = ("a", "b", "c", "d", "e")
_OPTIONS: tuple[dict[str, str], ...] = (
    {"cpu-set": "any"},
    {"cpu-set": "one-numa"},
    {"cpu-set": "any", "kvplace.io/cpu-policy": "share"},
    {"cpu-set": "any", "kvplace.io/cpu-policy": "numa"},
    {"kvplace.io/cpu-policy": "none"},
)


class BrokenPromise(AssertionError):
    """A promise of the design does not hold."""


class Story:
    """What a seed makes happen."""

    def __init__(self, seed: int) -> None:
        seed_everything(seed)  # tenacity draws its jitter from the module's own generator
        self._random = Random(seed)
        self.happened: Counter[str] = Counter()
        self._cluster = FaultyCluster()
        self._chaos = Chaos(Random(self._random.random()), self._check)
        self._cluster.faults = self._chaos
        self._replicas: dict[str, Replica] = {}
        self._nodes = []
        for name, topology in (("n1", EIGHT), ("n2", TWO)):
            self._cluster.create_node(name)
            self._cluster.put_topology(name, topology, enforcement=Enforcement.NRI)
            node = SimulatedNode(
                NodeName(name), topology, self._view(), Random(self._random.random()), self._chaos
            )
            self._nodes.append(node)

    def run(self) -> None:
        """Tell the story; raises BrokenPromise."""
        with asyncio.Runner(loop_factory=JumpingLoop) as runner:
            runner.run(self._run())

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            played = [group.create_task(node.run()) for node in self._nodes]
            served = [group.create_task(self._serve(name)) for name in ("r1", "r2")]
            played += served
            played += [group.create_task(self._schedule()) for _ in range(2)]
            users = group.create_task(self._use())
            disturber = group.create_task(self._disturb())
            await asyncio.sleep(_TURMOIL_S)
            for task in (users, disturber):
                task.cancel()
            self._chaos.calm = True
            for kind in (PODS, LEDGERS):
                self._cluster.resume_watches(kind)
            await asyncio.sleep(_CALM_S)
            self._check_agreement()
            for pod in self._pods():
                self._cluster.delete_pod(pod.namespace, pod.name)
            await asyncio.sleep(_CALM_S)
            self._check_the_end()
            for task in played:
                task.cancel()

    # The actors.

    def _view(self) -> View:
        return View(self._cluster, Random(self._random.random()), self._chaos)

    async def _serve(self, name: str) -> None:
        """Run a replica that is killed now and then, and starts again."""
        random = Random(self._random.random())
        while True:
            async with replica(self._view()) as one:
                self._replicas[name] = one
                if self._chaos.calm:
                    await asyncio.Event().wait()
                await asyncio.sleep(random.expovariate(1 / 40))
                del self._replicas[name]
                self.happened["replica killed"] += 1
            await asyncio.sleep(random.choice((0.1, 1.0, 10.0)))

    async def _schedule(self) -> None:
        """Play a kube-scheduler that asks any replica about each waiting pod."""
        random = Random(self._random.random())
        while True:
            await asyncio.sleep(random.uniform(0.2, 2.0))
            waiting = [pod for pod in self._pods() if not pod.node and not pod.deleting]
            if not waiting or not self._replicas:
                continue
            one = self._replicas[random.choice(sorted(self._replicas))]
            with contextlib.suppress(KvplaceError, TimeoutError):
                async with asyncio.timeout(20):
                    await self._place(one, random.choice(waiting), random)

    async def _place(self, one: Replica, pod: PodRecord, random: Random) -> None:
        if read_pod_request(pod.request).request.options.policy is Policy.NONE:
            await self._cluster.bind(pod.namespace, pod.name, pod.uid, NodeName("n1"), {})
            return
        found = await one.filter(pod)
        if not found.names:
            self.happened["refused"] += 1
            return
        error = await one.bind(pod, random.choice(sorted(found.names)))
        self.happened["bind refused" if error else "bound"] += 1

    async def _use(self) -> None:
        """Create, edit, migrate and delete VMs."""
        random = Random(self._random.random())
        while True:
            await asyncio.sleep(random.expovariate(1 / 1.5))
            name = random.choice(_NAMES)
            pod = self._cluster._pods.get(("default", name))
            if pod is None:
                self._create(name, random)
            else:
                match random.random():
                    case share if share < 0.25:
                        self._cluster.delete_pod("default", name)
                        self.happened["deleted"] += 1
                    case share if share < 0.32:
                        self._cluster.delete_pod("default", name, force=True)
                        self.happened["deleted by force"] += 1
                    case share if share < 0.40:
                        self._migrate(pod)
                    case _:
                        self._cluster.edit_vmi("default", pod.vmi, pod.vmi_uid, random.choice(_OPTIONS))
                        self.happened["edited"] += 1

    def _create(self, name: str, random: Random) -> None:
        policy = random.choice((Policy.EXCLUSIVE, Policy.EXCLUSIVE, Policy.SHARE, Policy.NUMA, Policy.NONE))
        scope = random.choice((Scope.ANY, Scope.ONE_NUMA, Scope.ONE_SOCKET))
        request = request_with(random.choice((1, 2, 3, 4)), policy=policy, scope=scope)
        self._cluster.create_pod(
            name,
            request=write_request(PodRequest(request, f"default/{name}")),
            vmi=name,
            vmi_uid=f"vmi-{name}-{random.random()}",
        )
        self.happened["created"] += 1

    def _migrate(self, pod: PodRecord) -> None:
        target = f"{pod.name}-target"
        if self._cluster._pods.get(("default", target)) is None and pod.node:
            self._cluster.create_pod(target, request=pod.request, vmi=pod.vmi, vmi_uid=pod.vmi_uid)
            self.happened["migrated"] += 1
        else:
            with contextlib.suppress(KvplaceError):
                self._cluster.delete_pod("default", target)

    async def _disturb(self) -> None:
        """Break watches and hold them back."""
        random = Random(self._random.random())
        while True:
            await asyncio.sleep(random.expovariate(1 / 15))
            kind = random.choice((PODS, LEDGERS))
            match random.choice(("drop", "compact", "pause")):
                case "drop":
                    self._cluster.drop_watches(kind)
                case "compact":
                    self._cluster.compact(kind)
                case _:
                    self._cluster.pause_watches(kind)
                    await asyncio.sleep(random.uniform(0.1, 8))
                    self._cluster.resume_watches(kind)
            self.happened["watch disturbed"] += 1

    # The promises.

    def _pods(self) -> list[PodRecord]:
        return list(self._cluster._pods.records.values())

    def _ledger(self, node: NodeName) -> Ledger:
        record = self._cluster._ledgers.get(node)
        return record.ledger if record is not None else Ledger()

    def _check(self, call: str) -> None:
        """Promises 1, 2 and 6: whoever runs alone on a CPU owns it, and nobody else runs there."""
        for node in self._nodes:
            ledger = self._ledger(node.name)
            ledger.check()
            taken = NO_CPUS
            for uid, running in node.containers.items():
                alone = running.alone_on
                if alone & taken:
                    raise BrokenPromise(
                        f"after {call}: two pods run on CPUs {alone & taken:#b} of {node.name}"
                    )
                taken |= alone
                owned = CpuMask(0)
                for cpu, owner in ledger.owners.items():
                    if owner == uid:
                        owned |= CpuMask(1 << cpu)
                if alone & ~owned:
                    raise BrokenPromise(f"after {call}: {uid} runs on {alone & ~owned:#b} without owning it")
            for pod in self._pods():
                if pod.node == node.name and pod.placement and pod.phase == "Pending":
                    self._check_bound(node, pod, ledger, call)

    def _check_bound(self, node: SimulatedNode, pod: PodRecord, ledger: Ledger, call: str) -> None:
        placement = read_placement(pod.placement).placement
        claim = ledger.claims.get(pod.uid)
        if not placement.floats and (claim is None or placement.owned & ~claim.owned):
            raise BrokenPromise(f"after {call}: {pod.name} is bound to {node.name} without its claim")

    def _check_agreement(self) -> None:
        """Promise 7, in calm: ledger, annotation and node say the same about every pod that runs."""
        for node in self._nodes:
            ledger = self._ledger(node.name)
            for uid, running in node.containers.items():
                pod = next((pod for pod in self._pods() if pod.uid == uid), None)
                if pod is None or not pod.placement:
                    continue
                bound = read_placement(pod.placement)
                claim = ledger.claims.get(uid)
                if running.in_force != bound:
                    raise BrokenPromise(f"{pod.name} runs by revision {running.in_force}, not {bound}")
                held = None if claim is None else (claim.cpus, claim.owned, claim.relocation)
                wanted = (
                    None if bound.placement.floats else (bound.placement.cpus, bound.placement.owned, None)
                )
                if held != wanted:
                    raise BrokenPromise(f"{pod.name} should hold {wanted} and holds {held}")
                self.happened["agrees"] += 1
                self.happened[f"revision {min(bound.revision, 4)}"] += 1

    def _check_the_end(self) -> None:
        """Promise 6: all cores come free."""
        for node in self._nodes:
            ledger = self._ledger(node.name)
            if ledger.claims or ledger.owners:
                raise BrokenPromise(f"after all pods are gone {node.name} still has {ledger}")
