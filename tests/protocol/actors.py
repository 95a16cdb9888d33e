"""Everybody around kvplace: schedulers, users, foreign clients, and those who pull cables."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from random import Random

from kvplace.core.cpuset import cpus_of, union
from kvplace.core.errors import KvplaceError
from kvplace.core.ledger import Ledger, LedgerChange, claim_of
from kvplace.core.placement import Placement
from kvplace.core.request import EmulatorThreads, OnFailure, Policy, Request, Scope, Smt
from kvplace.core.request_json import PodRequest, read_pod_request, write_request
from kvplace.core.scalars import CpuId, CpuMask, NodeName, PodUid
from kvplace.kube.object_records import LedgerRecord, PodRecord
from kvplace.kube.watches import LEDGERS, NODES, PLACED_PODS, PODS, TOPOLOGIES
from tests.controller.replicas import Replica
from tests.core.requests import request_with
from tests.kube.faulty_cluster import FaultyCluster
from tests.protocol.cpu_claims import CpuClaims
from tests.protocol.evictions import KEPT, Evictions, again
from tests.protocol.faults import CLOCKS_S
from tests.protocol.network import Network, View
from tests.protocol.node import SimulatedNode, read_placement
from tests.protocol.promises import Promises
from tests.protocol.run_counts import Diary
from tests.protocol.run_kind import Kind

_NAMES = tuple("abcdefgh")
_OPTIONS: tuple[dict[str, str], ...] = (
    {"cpu-set": "any"},
    {"cpu-set": "one-numa"},
    {"cpu-set": "any", "kvplace.io/cpu-policy": "share"},
    {"cpu-set": "any", "kvplace.io/cpu-policy": "numa"},
    {"kvplace.io/cpu-policy": "none"},
)
_RETRIES_S = (0.5, 0.5, 3.0, 3.0, 12.0, 40.0)
"""When a kube-scheduler tries a pod again."""
_POLICIES = (*(Policy.EXCLUSIVE,) * 5, Policy.SHARE, Policy.NUMA, Policy.NONE)


class Server:
    """One replica as the others see it: the process that runs now, if one does."""

    def __init__(self, clock_s: float) -> None:
        self.view: View | None = None
        self.replica: Replica | None = None
        self.clock_s = clock_s
        """How far its wall clock is off."""


class Scheduler:
    """A kube-scheduler: what it knows of the pods is late, and it asks any replica at any time."""

    def __init__(
        self,
        cluster: FaultyCluster,
        servers: Mapping[str, Server],
        promises: Promises,
        network: Network,
        random: Random,
        diary: Diary,
        evictions: Evictions | None,
        cpu_claims: CpuClaims | None,
    ) -> None:
        """`evictions`: its own evictions; None if it evicts no pod. `cpu_claims`: those that it allocates."""
        self._cpu_claims = cpu_claims
        self._cluster = cluster
        self._evictions = evictions
        self._servers = servers
        self._promises = promises
        self._network = network
        self._random = random
        self._diary = diary
        self._known: list[PodRecord] = []
        self._not_before: dict[PodUid, float] = {}
        self._attempts: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Try to place whatever waits, until cancelled."""
        loop = asyncio.get_running_loop()
        random = self._random
        try:
            while True:
                await asyncio.sleep(2.0 if self._network.calm else random.choice((0.05, 0.3, 1.0, 2.0)))
                if self._network.calm or random.random() < 0.8:
                    self._known = [pod for pod in self._promises.pods() if not pod.node]
                now = loop.time()
                ready = [pod for pod in self._known if self._not_before.get(pod.uid, 0.0) <= now]
                chosen = random.sample(ready, min(len(ready), random.choice((1, 1, 3))))
                if self._evictions is not None:  # priorities matter
                    ready.sort(key=lambda pod: (-pod.priority, self._not_before.get(pod.uid, 0.0)))
                    chosen = ready[: len(chosen)]
                for pod in chosen:
                    self._not_before[pod.uid] = now + random.choice(self._pauses())
                    attempt = loop.create_task(self._attempt(pod))
                    self._attempts.add(attempt)
                    attempt.add_done_callback(self._attempts.discard)
        finally:
            for attempt in self._attempts:
                attempt.cancel()

    def _pauses(self) -> tuple[float, ...]:
        """Return after how long it may try a pod again; each end of a victim makes it try."""
        if self._network.calm:
            return (0.5, 3.0, 12.0)
        return (0.5, 3.0) if self._evictions is not None else _RETRIES_S

    def _any_replica(self) -> Replica | None:
        running = [server.replica for server in self._servers.values() if server.replica is not None]
        return self._random.choice(running) if running else None

    async def _attempt(self, pod: PodRecord) -> None:
        claims = self._cpu_claims
        if claims is None:
            await self._try(pod)
        elif claims.begin(pod):
            try:
                await self._try(pod)
            finally:
                claims.end(pod)

    async def _try(self, pod: PodRecord) -> None:
        one, random = self._any_replica(), self._random
        if one is None:
            return
        with contextlib.suppress(KvplaceError, TimeoutError):
            if read_pod_request(pod.request).request.options.policy is Policy.NONE:
                await self._cluster.bind(pod.namespace, pod.name, pod.uid, NodeName("n1"), {})
                return
            found = await one.filter(pod, *self._offered(pod))
            if not found.names and self._evictions is not None and pod.nominated:
                found = await one.filter(pod)  # all nodes, where the nominated one has failed
            if not found.names:
                self._refused(pod)
                if self._cpu_claims is not None:
                    self._cpu_claims.free(pod)
                if self._evictions is not None:
                    await self._evictions.preempt(one, pod)
                return
            node = random.choice(sorted(found.names))
            if (
                random.random() < 0.05 and not pod.migration and self._cpu_claims is None
            ):  # it may bind where filter was not asked, or stated no
                node = NodeName(random.choice(("n1", "n2")))
            if self._cpu_claims is not None:
                self._cpu_claims.allocate(pod, node)
            if random.random() < 0.3:
                await self._network.take_time()
            if random.random() < 0.3:
                one = self._any_replica() or one
            async with asyncio.timeout(10):
                error = await one.bind(pod, node)
            self._diary.note("bind refused" if error else "bound", f"{pod.name} to {node} {error}")
            if not error:
                self._promises.answered_yes(pod, node)

    def _offered(self, pod: PodRecord) -> tuple[str, ...]:
        """Return the nodes that other plugins let through, the nominated one alone; none stands for all."""
        if pod.migration:
            return (self._cluster.migrates_to[pod.migration].target,)
        if self._cpu_claims is not None and (node := self._cpu_claims.node(pod)) is not None:
            return (node,)
        if pod.nominated:
            return (pod.nominated,)
        return (self._random.choice(("n1", "n2")),) if self._random.random() < 0.1 else ()

    def _refused(self, pod: PodRecord) -> None:
        """Write on the pod that it fits nowhere, as kube-scheduler does, and forget its nomination.

        One for which others may have been evicted keeps it.
        """
        self._diary.note("refused", pod.name)
        nominated = "" if self._evictions is None else None
        live = self._cluster._pods.get((pod.namespace, pod.name))
        if live is not None and live.uid == pod.uid and not live.node:
            self._cluster.change_pod(pod.namespace, pod.name, was_tried=True, nominated=nominated)


class Users:
    """People who create, edit, migrate and delete VMs and pods."""

    def __init__(
        self,
        cluster: FaultyCluster,
        promises: Promises,
        random: Random,
        diary: Diary,
        kind: Kind,
        cpu_claims: CpuClaims | None,
    ) -> None:
        self._cpu_claims = cpu_claims
        self._cluster = cluster
        self._promises = promises
        self._random = random
        self._diary = diary
        self._edits = random.choice((0.0, 0.3, 0.6))
        self._makes_room = kind in (Kind.ROOM, Kind.NODES)
        self._moves = kind is Kind.NODES
        self._preempts = kind is Kind.PREEMPTION
        self._names = (*_NAMES, *map(again, _NAMES)) if self._preempts else _NAMES

    async def run(self, *, pause_s: float) -> None:
        """Act every so often, until cancelled."""
        random = self._random
        while True:
            if random.random() < 0.15:
                self._create_many(random.sample(_NAMES, random.randint(2, 6)))
            await asyncio.sleep(random.expovariate(1 / pause_s))
            if self._makes_room and random.random() < 0.3:
                self._crowd()
                continue
            name = random.choice(self._names)
            pod = self._cluster._pods.get(("default", name))
            if pod is None:
                self._create(name)
            elif random.random() < self._edits:
                self._edit(pod)
            else:
                match random.random():
                    case share if share < 0.45:
                        self._cluster.delete_pod("default", name)
                        self._diary.note("deleted", name)
                    case share if share < 0.60:
                        self._cluster.delete_pod("default", name, force=True)
                        self._diary.note("deleted by force", name)
                    case share if share < 0.70:
                        self._cluster.delete_pod("default", name, force=True)
                        self._create(name)
                        self._diary.note("created again", name)
                    case share if share < 0.8 and not pod.node and not self._preempts:
                        self._cluster.change_pod("default", name, gated=random.random() < 0.5)
                    case _ if pod.vmi:
                        self._migrate(pod)

    def _create_many(self, names: list[str]) -> None:
        """Roll out VMs of one template, which wait together."""
        request = self._any_request()
        for name in names:
            if self._cluster._pods.get(("default", name)) is None:
                self._create(name, request)

    def _crowd(self) -> None:
        """Leave one VM on each NUMA node, and create one that needs a whole one."""
        seen: set[tuple[str, object]] = set()
        for pod in sorted(self._promises.pods(), key=lambda pod: pod.name):
            placement = read_placement(pod.placement).placement if pod.placement else None
            if placement is not None and (where := (pod.node, placement.numa_nodes)) not in seen:
                seen.add(where)
            else:
                self._cluster.delete_pod("default", pod.name)
        name = self._random.choice(_NAMES)
        if self._cluster._pods.get(("default", name)) is None:
            self._create(name, request_with(4, scope=Scope.ONE_NUMA))
        self._diary.note("crowded")

    def _any_request(self) -> Request:
        random = self._random
        if self._makes_room:
            sizes = (1, 2, 2, 3, 3) if self._moves else (1, 2, 2, 2, 3)
            return request_with(random.choice(sizes), scope=Scope.ONE_NUMA)
        scope = random.choice((Scope.ANY, Scope.ONE_NUMA, Scope.ONE_SOCKET))
        vcpus = random.choice((1, 2, 3, 4, 4, 6))
        if self._cpu_claims is not None:
            return request_with(vcpus, scope=scope, emulator_threads=EmulatorThreads.WITH_VCPUS)
        policy = random.choice(_POLICIES)
        return request_with(
            vcpus,
            policy=policy,
            scope=scope,
            smt=random.choice((Smt.PREFER, Smt.PREFER, *Smt)) if policy is Policy.EXCLUSIVE else Smt.PREFER,
            on_failure=random.choice((*(OnFailure.WAIT,) * 5, OnFailure.FLOAT)),
        )

    def _create(self, name: str, request: Request | None = None) -> None:
        random = self._random
        request = request or self._any_request()
        policy = request.options.policy
        is_vm = random.random() < 0.8 and self._cpu_claims is None
        movable = self._makes_room and random.random() < 0.8
        asked = PodRequest(
            request,
            f"default/{name}",
            movable=movable,
            may_migrate=movable and self._moves and random.random() < 0.8,
        )
        pod = self._cluster.create_pod(
            name,
            request=write_request(asked),
            vmi=name if is_vm else "",
            vmi_uid=f"vmi-{name}-{random.random()}" if is_vm else "",
            shape=random.choice((b"vm", b"vm", b"vm", b"")),
            priority=random.choice((0, 0, 1, 2) if self._preempts else (0, 0, 1)),
            labels={**PLACED_PODS.labels, KEPT: "yes"} if self._preempts and random.random() < 0.3 else None,
            resources={"cpu": 1000 * request.vcpus} if self._preempts else None,
        )
        if self._moves and is_vm:
            self._cluster.put_running_vmi(pod.vmi, pod.vmi_uid)
        if self._cpu_claims is not None:
            self._cpu_claims.create(pod)
        self._diary.note("created", f"{name} {policy.value} {request.vcpus}")

    def _edit(self, pod: PodRecord) -> None:
        asking = self._random.choice(_OPTIONS)
        if self._makes_room:
            asking = {**asking, "kvplace.io/movable": "nodes" if self._moves else "true"}
        if pod.vmi:
            self._promises.edited.add(pod.vmi_uid)
            self._cluster.edit_vmi("default", pod.vmi, pod.vmi_uid, asking)
        else:
            self._promises.edited.add(pod.uid)
            self._cluster.edit_pod("default", pod.name, asking)
        self._diary.note("edited", f"{pod.name} {asking}")

    def _migrate(self, pod: PodRecord) -> None:
        target = f"{pod.name}-target"
        if self._cluster._pods.get(("default", target)) is None and pod.node:
            self._cluster.create_pod(
                target, request=pod.request, vmi=pod.vmi, vmi_uid=pod.vmi_uid, shape=b"vm"
            )
            self._diary.note("migrated", pod.name)
        else:
            with contextlib.suppress(KvplaceError):
                self._cluster.delete_pod("default", target)


class Disturber:
    """Breaks watches and connections, sets clocks, replaces machines, and writes into ledgers."""

    def __init__(
        self,
        cluster: FaultyCluster,
        servers: Mapping[str, Server],
        nodes: list[SimulatedNode],
        promises: Promises,
        random: Random,
        diary: Diary,
    ) -> None:
        self._cluster = cluster
        self._servers = servers
        self._nodes = nodes
        self._promises = promises
        self._random = random
        self._diary = diary
        actions = (
            self._break_watches,
            self._stall_watches,
            self._cut_off,
            self._set_clock,
            self._write_ledger,
            self._take_cpus,
            self._replace_node,
            self._nominate,
        )
        self._actions = random.sample(actions, random.randint(1, len(actions)))

    async def run(self, *, pause_s: float) -> None:
        """Act every so often, until cancelled."""
        while True:
            await asyncio.sleep(self._random.expovariate(1 / pause_s))
            action = self._random.choice(self._actions)
            self._diary.note(action.__name__.strip("_").replace("_", " "))
            await action()

    def _any_server(self) -> Server:
        return self._servers[self._random.choice(sorted(self._servers))]

    async def _break_watches(self) -> None:
        kind = self._random.choice((PODS, LEDGERS, NODES, TOPOLOGIES))
        if self._random.random() < 0.5:
            self._cluster.drop_watches(kind)
        else:
            self._cluster.compact(kind)

    async def _stall_watches(self) -> None:
        """Hold watches of one replica back, each kind for itself: kinds are seen out of order."""
        view = self._any_server().view
        if view is not None:
            view.stall(self._random.choice((PODS, LEDGERS, NODES, TOPOLOGIES)))
            await asyncio.sleep(self._random.uniform(0.1, 20))
            view.resume()

    async def _cut_off(self) -> None:
        view = self._any_server().view
        if view is not None:
            view.is_cut_off = True
            await asyncio.sleep(self._random.uniform(0.1, 10))
            view.is_cut_off = False

    async def _set_clock(self) -> None:
        self._any_server().clock_s += self._random.choice(CLOCKS_S)

    async def _take_cpus(self) -> None:
        """Let the kubelet pin a plain Guaranteed pod to CPUs that have no owner, or let that pod end."""
        node = self._random.choice(self._nodes)
        free = node.topology.allocatable & ~self._promises.ledger(node.name).owned
        node.kubelet_cpus = CpuMask(free & self._random.getrandbits(16) & self._random.getrandbits(16))
        node.wake()

    async def _nominate(self) -> None:
        """Nominate a node for a pod, as people and autoscalers may."""
        waiting = [pod for pod in self._promises.pods() if not pod.node]
        if waiting:
            pod = self._random.choice(waiting)
            node = self._random.choice(self._nodes)
            self._cluster.change_pod(pod.namespace, pod.name, nominated=node.name)

    async def _replace_node(self) -> None:
        """Delete a node and have it register again: the same machine, or another one of that name."""
        node, random = self._random.choice(self._nodes), self._random
        self._cluster.delete_node(node.name)
        if random.random() < 0.5:
            self._promises.replaced.add(node.name)
            self._promises.ended(node.containers)
            node.replace_machine(random.choice(node.machines))
        node.is_forgotten = random.random() < 0.5
        if node.is_forgotten:
            self._cluster.delete_topology(node.name)
        await asyncio.sleep(random.uniform(0.0, 10.0))
        for pod in self._promises.pods():  # pod garbage collection
            if pod.node == node.name:
                self._cluster.delete_pod(pod.namespace, pod.name, force=True)
        await asyncio.sleep(random.uniform(0.0, 10.0))
        node.register(pod.uid for pod in self._promises.pods())

    async def _write_ledger(self) -> None:
        """Write as a foreign client does that may: nothing new, a claim of no pod, a claim taken away.

        And delete a ledger, as any client may in which no CPU has an owner.
        """
        node, random = self._random.choice(self._nodes), self._random
        ledger = self._promises.ledger(node.name)
        match random.random():
            case share if share < 0.3 and not ledger.owners and self._cluster._ledgers.get(node.name):
                self._promises.robbed |= dict.fromkeys(ledger.claims, node.name)
                self._promises.disturbed.add(node.name)
                self._cluster._ledgers.remove(node.name)
                self._diary.note("ledger deleted", f"{node.name} {' '.join(ledger.claims)}")
            case share if share < 0.4:
                self._cluster.put_ledger(node.name, ledger)
            case share if share < 0.6:
                used = union(claim.cpus | claim.owned for claim in ledger.claims.values())
                free = list(cpus_of(CpuMask(node.topology.allocatable & ~used)))
                taken = random.sample(free, min(2, len(free)))
                mask = CpuMask(sum(1 << cpu for cpu in taken))
                stranger = claim_of(
                    PodUid(f"stranger-{random.random()}"),
                    Placement(Policy.EXCLUSIVE, tuple(map(CpuId, taken)), mask, owned=mask),
                    namespace="default",
                )
                self._cluster.put_ledger(node.name, ledger.after(LedgerChange(claims=(stranger,))))
            case share if share < 0.8 and ledger.claims:
                moving = [uid for uid, claim in ledger.claims.items() if claim.relocation is not None]
                victim = PodUid(random.choice(sorted(moving or ledger.claims)))
                self._promises.robbed[victim] = node.name
                self._promises.disturbed.add(node.name)
                self._cluster.put_ledger(node.name, ledger.after(LedgerChange(releases=(victim,))))
            case _:
                await self._spoil(node.name)

    async def _spoil(self, node: NodeName) -> None:
        """Make a ledger unreadable for a while."""
        stored = self._cluster._ledgers.get(node)
        if stored is None:
            return

        def put(ledger: Ledger, problem: str) -> None:
            version = self._cluster._next_version()
            self._cluster._ledgers.put(
                node, LedgerRecord(node, ledger, version, uid=stored.uid, problem=problem)
            )

        put(Ledger(), "nonsense")
        try:
            await asyncio.sleep(self._random.uniform(0.1, 10))
        finally:
            put(stored.ledger, "")
