"""Nodes on which a test makes anything happen in any order, one for each source of containers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from harness.pod_cgroups import PodCgroups, container_id, pod_cgroups, pod_uid
from kvplace.agent.cgroup_source import CgroupSource
from kvplace.agent.cpuset_keeper import CpusetKeeper
from kvplace.agent.node_plan import NodeContainer, ThisNode
from kvplace.agent.node_report import NodeReport
from kvplace.agent.nri_source import NriSource
from kvplace.agent.planner import plan_node
from kvplace.core.ledger import Ledger, LedgerChange, claim_of
from kvplace.core.placement import PodPlacement
from kvplace.core.request import Policy
from kvplace.core.scalars import NO_CPUS, ContainerId, CpuMask, PodUid
from kvplace.kube.object_records import LedgerRecord, PodRecord
from kvplace.kube.objects import COMPUTE
from kvplace.kube.watches import Apply, Delete
from kvplace.nri.values import Cpuset
from tests.agent.nodes_in_use import NODE, OTHER_VM, PLAIN, VM, machine_of, node_with, placed, read_node
from tests.agent.played_runtime import Phase, PlayedContainer, PlayedObjects, PlayedRuntime, now

SIDECAR = "hook-sidecar-0"


@dataclass(frozen=True)
class Running:
    """A container with a running program."""

    id: ContainerId
    uid: PodUid
    name: str
    cpus: CpuMask
    """The CPUs in its cgroup."""


class AnyNode(Protocol):
    """One node and its agent, which may be dead."""

    claims: Mapping[PodUid, PodPlacement]
    """The CPUs that each VM owns when it is bound."""
    plain: PodUid
    online: CpuMask
    keeper: CpusetKeeper | None
    """The living agent's."""

    def start_agent(self) -> None: ...

    def kill_agent(self) -> None: ...

    def bind(self, bound: frozenset[PodUid]) -> None:
        """Let these be the VMs that are bound."""
        ...

    def create(self, uid: PodUid, name: str) -> None: ...

    def next_step(self, number: int) -> None:
        """Let a container that is being started take its next step, where there are several."""
        ...

    def name_containers(self) -> None:
        """Let the kubelet report the containers with QEMU."""
        ...

    def pods(self) -> set[PodUid]:
        """Return the pods that have containers, running or not."""
        ...

    def running(self) -> list[Running]: ...

    def write(self, container: ContainerId, cpus: CpuMask) -> None:
        """Write a cgroup as another program."""
        ...

    def update(self, container: ContainerId, cpus: CpuMask) -> None:
        """Set a container as the kubelet does through its runtime."""
        ...

    def stop(self, container: ContainerId) -> None: ...

    def settle(self) -> None:
        """Let the agent act on what has happened."""
        ...

    def planned(self) -> tuple[ThisNode, list[NodeContainer]]:
        """Return what a plan is made of."""
        ...

    def specs(self) -> Mapping[ContainerId, CpuMask]:
        """Return the CPUs in the specs of running containers that have some."""
        ...

    def close(self) -> None: ...


class NriNode:
    """A runtime with cgroups in memory; containers start in steps, as containerd starts them."""

    def __init__(self) -> None:
        self.claims: Mapping[PodUid, PodPlacement] = {
            VM: placed(VM, "2-3"),
            OTHER_VM: placed(OTHER_VM, "4-6"),
        }
        self.plain = PLAIN
        self.online = CpuMask(0xFF)
        self.keeper: CpusetKeeper | None = None
        self._source: NriSource | None = None
        self._runtime = PlayedRuntime(self.online)
        self._objects = PlayedObjects(node_with())

    def start_agent(self) -> None:
        self.keeper = CpusetKeeper(self._objects, NodeReport(), self._runtime.cgroups, starting_s=0.0)
        self._source = NriSource(self.keeper, self._runtime, self._runtime.cgroups.root)
        self._runtime.connect(self._source)

    def kill_agent(self) -> None:
        self.keeper = self._source = None
        self._runtime.disconnect()

    def bind(self, bound: frozenset[PodUid]) -> None:
        self._objects.become(node_with(*(self.claims[uid] for uid in sorted(bound))))

    def create(self, uid: PodUid, name: str) -> None:
        pod = next((pod for pod in self._runtime.pods.values() if pod.uid == uid), None)
        self._runtime.create(pod or self._runtime.run_pod(uid, vm=uid != self.plain), name)

    def next_step(self, number: int) -> None:
        starting = [one for one in self._runtime.containers.values() if one.phase is not Phase.RUNNING]
        if not starting:
            return
        container = starting[number % len(starting)]
        match container.phase:
            case Phase.CREATED:
                self._runtime.read_spec(container)
            case Phase.READ:
                self._runtime.make_task(container)
            case Phase.STARTING:
                self._runtime.start(container)
                if self.keeper is not None:  # its first instruction is right, too
                    assert container.first_cpus == self._runtime.cpus_of(container)

    def name_containers(self) -> None:
        pass  # the runtime states names

    def pods(self) -> set[PodUid]:
        return {container.pod.uid for container in self._runtime.containers.values()}

    def running(self) -> list[Running]:
        return [
            Running(found.id, found.pod.uid, found.name, self._runtime.cpus_of(found))
            for found in self._played()
        ]

    def write(self, container: ContainerId, cpus: CpuMask) -> None:
        self._runtime.write_cgroup(self._runtime.containers[container], cpus)
        if self.keeper is not None:
            self.keeper.check([container])

    def update(self, container: ContainerId, cpus: CpuMask) -> None:
        self._runtime.update(self._runtime.containers[container], Cpuset(cpus))

    def stop(self, container: ContainerId) -> None:
        self._runtime.stop(self._runtime.containers[container])

    def settle(self) -> None:
        if self.keeper is not None and self._source is not None:
            self.keeper.carry_out()
            now(self._source.carry_specs())

    def planned(self) -> tuple[ThisNode, list[NodeContainer]]:
        assert self.keeper is not None
        return self._objects.state, self.keeper.containers()

    def specs(self) -> Mapping[ContainerId, CpuMask]:
        return {found.id: found.spec.cpus for found in self._played() if found.spec.cpus != NO_CPUS}

    def close(self) -> None:
        pass

    def _played(self) -> Iterator[PlayedContainer]:
        return (found for found in self._runtime.containers.values() if found.phase is Phase.RUNNING)


class CgroupNode:
    """Real cgroups of this machine and the kernel's own events; one VM owns CPU 1, the other shares CPU 0."""

    def __init__(self) -> None:
        self.plain = pod_uid(3)
        first, second = pod_uid(1), pod_uid(2)
        shares = placed(second, "0", policy=Policy.SHARE)
        self.claims: Mapping[PodUid, PodPlacement] = {first: placed(first, "1"), second: shares}
        self.online = CpuMask(0b11)
        self.keeper: CpusetKeeper | None = None
        self._tree = contextlib.ExitStack()
        self._pods: PodCgroups = self._tree.enter_context(pod_cgroups())
        self._loop = asyncio.new_event_loop()
        self._own = read_node(machine_of([0, 1]))
        self._ledger = Ledger()
        self._version = 0
        self._made: dict[ContainerId, tuple[PodUid, str, Path]] = {}
        self._named: dict[PodUid, ContainerId] = {}
        self._task: asyncio.Task[None] | None = None

    def start_agent(self) -> None:
        keeper = CpusetKeeper(self._own, NodeReport(), self._pods.own, sweep_s=600, starting_s=600)
        self.keeper = keeper
        source = CgroupSource(keeper, self._own, self._pods.own.root)
        self._task = self._loop.create_task(keeper.run(source))

    def kill_agent(self) -> None:
        self.keeper = None
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)

    def bind(self, bound: frozenset[PodUid]) -> None:
        for uid in self.claims:
            is_bound = uid in self._ledger.claims
            if uid in bound and not is_bound:
                self._write(LedgerChange((claim_of(uid, self.claims[uid].placement),)))
                self._own.pods.apply(Apply(self._record(uid)))
            elif is_bound and uid not in bound:
                self._named.pop(uid, None)
                self._own.pods.apply(Delete(self._record(uid)))
                self._write(LedgerChange(releases=(uid,)))

    def create(self, uid: PodUid, name: str) -> None:
        self._version += 1
        made = container_id(self._version)
        self._made[made] = (uid, name, self._pods.container(uid, made))

    def next_step(self, number: int) -> None:
        pass  # a cgroup is there or not

    def name_containers(self) -> None:
        for made, (uid, name, _) in self._made.items():
            if name == COMPUTE and uid in self._ledger.claims:
                self._named[uid] = made
                self._own.pods.apply(Apply(self._record(uid)))

    def pods(self) -> set[PodUid]:
        return {uid for uid, _, _ in self._made.values()}

    def running(self) -> list[Running]:
        """Return them; the kubelet has not named every container of QEMU."""
        return [
            Running(
                made,
                uid,
                name if name != COMPUTE or self._named.get(uid) == made else "",
                self._pods.hierarchy.configured(folder),
            )
            for made, (uid, name, folder) in self._made.items()
        ]

    def write(self, container: ContainerId, cpus: CpuMask) -> None:
        self._pods.hierarchy.set(self._made[container][2], CpuMask(cpus & self.online) or self.online)

    def update(self, container: ContainerId, cpus: CpuMask) -> None:
        self.write(container, cpus)

    def stop(self, container: ContainerId) -> None:
        uid, _, folder = self._made.pop(container)
        if self._named.get(uid) == container:
            del self._named[uid]
            self._own.pods.apply(Apply(self._record(uid)))
        self._pods.remove(folder)

    def settle(self) -> None:
        if self.keeper is not None:
            self._loop.run_until_complete(self._acts(self.keeper))

    async def _acts(self, keeper: CpusetKeeper) -> None:
        for _ in range(3000):
            known = {container.id: container for container in keeper.containers()}
            plan = plan_node(self._own.state, known.values())
            is_planned = (keeper.plan.pool, keeper.plan.containers) == (plan.pool, plan.containers)
            if is_planned and known.keys() == self._made.keys() == plan.containers.keys():
                folders = ((made, folder) for made, (_, _, folder) in self._made.items())
                found = {made: self._pods.hierarchy.configured(folder) for made, folder in folders}
                if found == {made: wanted.cpus for made, wanted in plan.containers.items()}:
                    break
            await asyncio.sleep(0.001)
        assert self._task is not None
        assert not self._task.done()

    def planned(self) -> tuple[ThisNode, list[NodeContainer]]:
        assert self.keeper is not None
        return self._own.state, self.keeper.containers()

    def specs(self) -> Mapping[ContainerId, CpuMask]:
        return {}  # no runtime keeps any

    def close(self) -> None:
        if self.keeper is not None:
            self.kill_agent()
        self._loop.close()
        self._tree.close()

    def _record(self, uid: PodUid) -> PodRecord:
        record = PodRecord("vms", f"vm-{uid}", uid, node=NODE, phase="Running", vmi="vm")
        named = self._named.get(uid, ContainerId(""))
        return replace(record, placement=self.claims[uid].to_json(), compute_container=named)

    def _write(self, change: LedgerChange) -> None:
        self._ledger = self._ledger.after(change)
        self._version += 1
        self._own.ledgers.apply(Apply(LedgerRecord(NODE, self._ledger, str(self._version))))
