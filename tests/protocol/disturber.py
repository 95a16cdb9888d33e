"""Foreign clients, and disturbances of watches, connections, clocks and machines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from random import Random

from kvplace.core.cpuset import cpus_of, union
from kvplace.core.ledger import Ledger, LedgerChange, claim_of
from kvplace.core.placement import Placement
from kvplace.core.request import Policy
from kvplace.core.scalars import CpuId, CpuMask, NodeName, PodUid
from kvplace.kube.object_records import LedgerRecord
from kvplace.kube.watches import LEDGERS, NODES, PODS, TOPOLOGIES
from tests.kube.faulty_cluster import FaultyCluster
from tests.protocol.actors import Server
from tests.protocol.devices import FOREIGN
from tests.protocol.faults import CLOCKS_S
from tests.protocol.node import SimulatedNode
from tests.protocol.promises import Promises
from tests.protocol.run_counts import Diary


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
        actions: tuple[Callable[[], Awaitable[None]], ...] = (
            self._break_watches,
            self._stall_watches,
            self._cut_off,
            self._set_clock,
            self._write_ledger,
            self._take_cpus,
            self._replace_node,
            self._nominate,
        )
        if nodes[0].devices is not None:
            actions += (self._take_device, self._take_device)
        self._actions = random.sample(actions, random.randint(1, len(actions)))

    async def run(self, *, pause_s: float) -> None:
        """Act every so often, until cancelled."""
        while True:
            await asyncio.sleep(self._random.expovariate(1 / pause_s))
            action = self._random.choice(self._actions)
            self._diary.note(getattr(action, "__name__", "").strip("_").replace("_", " "))
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

    async def _take_device(self) -> None:
        """Let a pod without options take a device, or leave it."""
        node = self._random.choice(self._nodes)
        if node.devices is not None and node.devices.take(FOREIGN):
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

        Or delete a ledger without owners, as any client may.
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
