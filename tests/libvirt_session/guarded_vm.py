"""A real VM and the real guard of its threads. A few lines play the program that sets cpusets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree as ET

from harness.libvirt_session.daemon import LibvirtSession, RunningDomain
from harness.libvirt_session.threads import ThreadAffinity
from harness.waiting import PATIENCE_S
from kvplace.agent.libvirt_pins import LibvirtPins
from kvplace.agent.memory import MemoryMoves
from kvplace.agent.node_objects import NodeObjects
from kvplace.agent.node_plan import NodeContainer, NodePlan
from kvplace.agent.node_report import NodeReport
from kvplace.agent.pinning_guard import PinningGuard
from kvplace.agent.planner import plan_node
from kvplace.core.cpuset import cpus_of, mask_of, parse_cpu_list
from kvplace.core.ledger import Ledger, LedgerChange, claim_of
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import OnFailure, Policy
from kvplace.core.scalars import ContainerId, CpuId, CpuMask, NodeName, PodUid
from kvplace.core.well_known_names import PINNED
from kvplace.kube.events import EventRecord, EventRecorder
from kvplace.kube.object_records import Condition, LedgerRecord, PodRecord
from kvplace.kube.watches import Apply, Init, InitDone
from kvplace.linux.threads import Tid, set_affinity
from tests.core.machines import make_numa_node, make_package, make_topology

NODE = NodeName("worker-1")
UID = PodUid("0b7a5f5e-0000-4000-8000-000000000001")
POD = PodRecord("vms", "virt-launcher-a", UID, node=NODE, phase="Running", vmi="a", vmi_uid="vmi-a")
MOUNTED = Path("/sys/fs/cgroup")
ONLINE = parse_cpu_list(Path("/sys/devices/system/cpu/online").read_text())
MACHINE = make_topology(
    packages=(make_package(0, ONLINE),),
    numa_nodes=(make_numa_node(0, ONLINE, 1 << 30),),
    l3_groups=(ONLINE,),
    cores=tuple(1 << cpu for cpu in cpus_of(ONLINE)),
)


def placed(
    vcpu: CpuId, emulator: CpuId, *, revision: int = 1, policy: Policy = Policy.EXCLUSIVE
) -> PodPlacement:
    """One vCPU on a CPU, everything else of QEMU on another."""
    cpus = mask_of([vcpu])
    placement = Placement(
        policy,
        (vcpu,),
        cpus,
        owned=cpus if policy is Policy.EXCLUSIVE else CpuMask(0),
        emulator_cpus=mask_of([emulator]),
    )
    return PodPlacement(UID, NODE, "", OnFailure.WAIT, placement, revision=revision)


async def until(holds: Callable[[], bool]) -> None:
    """Waits for a state that no event reports."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class WrittenObjects:
    """The writes to the cluster."""

    def __init__(self) -> None:
        self.conditions: list[Condition] = []
        self.events: list[EventRecord] = []
        self.reached = asyncio.Event()

    async def set_pod_condition(self, pod: PodRecord, condition: Condition) -> None:
        await asyncio.sleep(0)
        assert pod.uid == UID
        self.conditions.append(condition)
        self.reached.set()

    async def record_event(self, event: EventRecord) -> None:
        await asyncio.sleep(0)
        self.events.append(event)


@dataclass
class SessionContainers:
    """Sets the decided cpuset of the session at each call."""

    session: LibvirtSession
    own: NodeObjects
    known: tuple[NodeContainer, ...] = (
        NodeContainer(ContainerId("c1"), "compute", UID, POD.namespace, POD.name, in_vm_pod=True),
    )
    sets_cpusets: bool = True
    kept: NodePlan | None = None
    """A plan that is kept although the state has changed."""

    def containers(self) -> Iterable[NodeContainer]:
        group = self.session.group
        return tuple(
            replace(container, cpus=CpuMask(group.effective()), folder=group.path) for container in self.known
        )

    @property
    def plan(self) -> NodePlan:
        if self.kept is not None:
            return self.kept
        found = plan_node(self.own.state, self.containers())
        setting = found.containers.get(ContainerId("c1"))
        if self.sets_cpusets and setting is not None and self.session.group.effective() != setting.cpus:
            self.session.group.confine(setting.cpus)
        return found

    def subscribe(self, listener: Callable[[], None]) -> None:
        self.own.subscribe(listener)


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class GuardedVm:
    """The VM, its guard, and what the guard has reported."""

    domain: RunningDomain
    own: NodeObjects
    containers: SessionContainers
    report: NodeReport
    written: WrittenObjects
    guard: PinningGuard
    clock: Clock
    checks: int = 0

    def place(self, placement: PodPlacement) -> None:
        """Writes the pod's annotation, and the claim as `serve` does before that."""
        before = self.own.ledger
        record = self.own.revisions.of(UID)
        previous = None if record is None else record.newest
        release = LedgerChange(releases=(UID,) if previous else ())
        claim = claim_of(UID, placement.placement)
        if previous is not None:
            both = claim_of(UID, previous.placement)
            claim = replace(claim, cpus=claim.cpus | both.cpus, owned=claim.owned | both.owned)
        ledger = before.after(release).after(LedgerChange(claims=(claim,)))
        self.own.ledgers.apply(Apply(LedgerRecord(NODE, ledger, resource_version="1")))
        self.annotate(placement)

    def annotate(self, placement: PodPlacement) -> None:
        """Writes the pod's annotation."""
        self.own.pods.apply(Apply(replace(POD, placement=placement.to_json())))

    def release(self, kept: PodPlacement | None = None) -> None:
        """Writes the ledger as `serve` does after a revision was confirmed."""
        claims = (claim_of(UID, kept.placement),) if kept is not None else ()
        ledger = Ledger().after(LedgerChange(claims=claims))
        self.own.ledgers.apply(Apply(LedgerRecord(NODE, ledger, resource_version="2")))

    async def looks(self, count: int = 2) -> None:
        """Checks so often: the first one sets and confirms, the second one finds it in order."""
        for _ in range(count):
            await self.guard.look()

    def move(self, name: str, cpus: int) -> None:
        """Moves a thread by its name, as taskset does."""
        (tid,) = [thread.tid for thread in self.domain.affinities().threads if self._name(thread) == name]
        set_affinity(Tid(tid), CpuMask(cpus))

    def cpus(self) -> dict[str, int]:
        """Where each thread may run, by its name."""
        return {self._name(thread): thread.cpus for thread in self.domain.affinities().threads}

    def _name(self, thread: ThreadAffinity) -> str:
        """QEMU's first thread and its RCU thread have the name of the program, or the latter its own."""
        if thread.tid == self.domain.pid:
            return "main"
        return "call_rcu" if thread.name.startswith("qemu-") else thread.name

    def libvirt_pins(self) -> list[tuple[str, str]]:
        """The pins that virsh would state."""
        tune = ET.fromstring(self.domain.handle.XMLDesc()).find("cputune")
        return [] if tune is None else [(pin.tag, pin.get("cpuset", "")) for pin in tune]

    async def libvirt_keeps(self, expected: list[tuple[str, str]]) -> None:
        """Waits until libvirt has been informed."""
        await until(lambda: sorted(self.libvirt_pins()) == sorted(expected))

    async def follows(self, revision: int) -> None:
        """Waits until a revision is confirmed."""
        await until(lambda: self.own.state.pods[UID].confirmed == revision)

    async def says(self, condition: Condition) -> None:
        """Waits until a condition was written last."""
        async with asyncio.timeout(PATIENCE_S):
            while not self.written.conditions or self.written.conditions[-1] != condition:
                self.written.reached.clear()
                await self.written.reached.wait()

    def condition(self, *, status: bool, reason: str, message: str) -> Condition:
        """The condition of the pod."""
        return Condition(PINNED, status, reason, message)


@asynccontextmanager
async def guarded(
    session: LibvirtSession, domain: RunningDomain, placement: PodPlacement | None
) -> AsyncIterator[GuardedVm]:
    """Puts a guard over a running VM; it does nothing until it is asked to check, or runs."""
    own = NodeObjects(NODE, MACHINE)
    containers = SessionContainers(session, own)
    report, written, clock = NodeReport(), WrittenObjects(), Clock()
    events = EventRecorder(written)
    guard = PinningGuard(
        own,
        containers,
        MemoryMoves(own),
        report,
        events,
        written,
        mounted=MOUNTED,
        libvirt=LibvirtPins(socket=session.uri.partition("socket=/")[2], answer_within_s=PATIENCE_S),
        clock=clock,
    )
    for store in own.stores:
        store.apply(Init())
        store.apply(InitDone())
    vm = GuardedVm(domain, own, containers, report, written, guard, clock)
    before = session.group.effective()
    if placement is not None:
        vm.place(placement)
    try:
        yield vm
    finally:
        await guard.close()
        await events.finish()
        session.group.confine(before)
