"""The guard's answers to the findings of a check; the checks and the programs that it calls are played here.

How it keeps the threads of a real VM is tested in tests/libvirt_session/test_pinning_guard.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from harness.waiting import PATIENCE_S
from kvplace.agent import pinning_guard
from kvplace.agent.conditions import PinnedReason
from kvplace.agent.memory import MemoryMoves
from kvplace.agent.node_objects import NodeObjects
from kvplace.agent.node_plan import NodeContainer, NodePlan, PodPlan
from kvplace.agent.node_report import NodeReport
from kvplace.agent.pinning_guard import MEMORY_AGAIN_S, PinningGuard
from kvplace.agent.planner import plan_node
from kvplace.agent.verification import Difference, Measurement, PodFinding, QemuThread
from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.node_devices import DeviceReport, NodeDevices, PodDevice
from kvplace.core.node_topology import Enforcement
from kvplace.core.placement import PodPlacement
from kvplace.core.request import DeviceNuma
from kvplace.core.scalars import NO_CPUS, NumaId, PodUid, ResourceName
from kvplace.kube.events import EventReason, EventRecord, EventRecorder
from kvplace.kube.object_records import Condition, PodRecord
from kvplace.kube.watches import Apply, Delete
from kvplace.linux.threads import Tid, classify
from kvplace.service.process import in_background
from tests.agent.nodes_in_use import NODE, VM, container, machine_of, placed, planned, read_node

THREAD = QemuThread(Tid(7), classify("CPU 0/KVM"), parse_cpu_list("2"))
NOT_CHECKED = planned(placed(VM, "2").placement, cpuset=NO_CPUS, online=NO_CPUS)
FOUND = PodFinding(NOT_CHECKED, Measurement((THREAD,)), pid=7)
"""A VM with all threads on their CPUs. Each check replaces the plan."""


class Sweep:
    """Finds what a test states."""

    found = FOUND

    def __init__(self, *_: object, **_others: object) -> None:
        pass

    def look(self, plans: Iterable[PodPlan]) -> dict[PodUid, PodFinding]:
        return {plan.uid: replace(self.found, plan=plan) for plan in plans}

    def close(self) -> None:
        pass


def not_pinned() -> dict[str, str]:
    """Read the reason by VM from what Prometheus scrapes."""
    (family,) = (one for one in REGISTRY.collect() if one.name == "kvplace_agent_not_pinned")
    return {
        f"{sample.labels['vm_namespace']}/{sample.labels['vm']}": sample.labels["reason"]
        for sample in family.samples
    }


class Planned:
    """Plans as the keeper of cpusets would."""

    def __init__(self, own: NodeObjects) -> None:
        self._own = own
        self.known = [replace(container(VM, cpus="2"), folder=Path("/cgroups/compute"))]
        self.current: Callable[[], NodePlan] = lambda: plan_node(own.state, self.containers())

    def containers(self) -> Iterable[NodeContainer]:
        return self.known

    @property
    def plan(self) -> NodePlan:
        return self.current()

    def subscribe(self, listener: Callable[[], None]) -> None:
        self._own.subscribe(listener)


class StuckMemory(MemoryMoves):
    """Memory that cannot be moved."""

    def __init__(self, own: NodeObjects) -> None:
        super().__init__(own)
        self.tried: list[int] = []

    async def move(self, pid: int, placement: PodPlacement) -> str:
        await asyncio.sleep(0)
        self.tried.append(placement.revision)
        return "512 MiB could not be moved to NUMA node 0"


class WrittenStatus:
    """Takes what is written to the cluster."""

    def __init__(self) -> None:
        self.events: list[EventRecord] = []
        self.conditions: asyncio.Queue[tuple[str, bool | None, str]] = asyncio.Queue()

    async def set_pod_condition(self, pod: PodRecord, condition: Condition) -> None:
        self.conditions.put_nowait((pod.name, condition.status, condition.reason))

    async def record_event(self, event: EventRecord) -> None:
        self.events.append(event)


class Guarded:
    """A node with one VM, which its guard checks."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.own = read_node(machine_of(range(4)))
        self.memory = StuckMemory(self.own)
        self.node = Planned(self.own)
        self.report = NodeReport()
        self.report.enforce(Enforcement.CGROUP)
        self.written = WrittenStatus()
        self.guard = PinningGuard(
            *(self.own, self.node, self.memory, self.report, EventRecorder(self.written), self.written),
            mounted=Path("/cgroups"),
            clock=lambda: self.now,
        )

    def place(self, revision: int, node: int) -> None:
        """Write another revision of the placement, with the VM's memory on a NUMA node."""
        bound = placed(VM, "2", strict=(NumaId(node),), revision=revision)
        pod = PodRecord("vms", "a", VM, node=NODE, phase="Running", vmi="a", placement=bound.to_json())
        self.own.pods.apply(Apply(pod))

    def delete(self) -> None:
        """Delete the pod by force, which leaves its containers alone."""
        self.own.pods.apply(Delete(self.own.pods.records[VM]))

    async def looks(self, count: int = 5) -> None:
        """Check so often, and let what begins at a check end before the next one."""
        for _ in range(count):
            await self.guard.look()
            for _ in range(5):
                await asyncio.sleep(0)


@pytest.fixture
async def vm(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Guarded]:
    monkeypatch.setattr(pinning_guard, "PinningSweep", Sweep)
    guarded = Guarded()
    yield guarded
    await guarded.guard.close()


async def test_memory_that_cannot_go_back_either_is_moved_again_after_a_pause(vm: Guarded) -> None:
    """Each try makes the kernel walk all page tables of the VM."""
    vm.place(revision=2, node=0)
    await vm.looks()
    assert vm.memory.tried == [2]
    vm.now += MEMORY_AGAIN_S
    await vm.looks()
    assert vm.memory.tried == [2, 2]
    assert vm.own.state.pods[VM].confirmed == 0


async def test_the_memory_of_the_next_revision_is_moved_at_once(vm: Guarded) -> None:
    vm.place(revision=2, node=0)
    await vm.looks()
    vm.place(revision=3, node=1)
    await vm.looks()
    assert vm.memory.tried == [2, 3]


async def test_a_vm_whose_pod_was_deleted_by_force_is_reported_until_its_container_has_ended(
    vm: Guarded,
) -> None:
    """Only this report shows `serve` that its CPUs are still in use."""
    vm.place(revision=1, node=0)
    await vm.looks()
    assert vm.report.pods[VM].pinned
    vm.delete()
    await vm.looks()
    assert vm.report.pods[VM].pinned
    vm.node.known.clear()
    await vm.looks()
    assert (dict(vm.report.pods), vm.own.state.pods) == ({}, {})


async def test_a_vm_that_is_not_pinned_is_named_with_the_reason_until_it_is_or_has_ended(
    vm: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = Difference(PinnedReason.THREADS_ELSEWHERE, thread=THREAD, should=parse_cpu_list("3"))
    drifted = replace(FOUND, differences=(elsewhere,))
    given_up = replace(drifted, given_up=True)
    vm.place(revision=1, node=0)
    for found, named in (
        (FOUND, {}),
        (drifted, {"vms/a": "ThreadsElsewhere"}),
        (given_up, {"vms/a": "RepairsUndone"}),
        (FOUND, {}),
        (drifted, {"vms/a": "ThreadsElsewhere"}),
    ):
        monkeypatch.setattr(Sweep, "found", found)
        await vm.looks(1)
        assert not_pinned() == named
    vm.node.known.clear()
    await vm.looks(1)
    assert not_pinned() == {}


async def test_the_pod_states_whether_its_vm_is_pinned(vm: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    async with in_background(vm.guard.run()), asyncio.timeout(PATIENCE_S):
        vm.place(revision=1, node=0)
        assert await vm.written.conditions.get() == ("a", True, "AsPlaced")
        elsewhere = Difference(PinnedReason.THREADS_ELSEWHERE, thread=THREAD, should=parse_cpu_list("3"))
        monkeypatch.setattr(Sweep, "found", replace(FOUND, differences=(elsewhere,), given_up=True))
        assert await vm.written.conditions.get() == ("a", False, "RepairsUndone")


async def test_a_plan_from_before_the_objects_of_the_node_were_read_ends_no_pod(vm: Guarded) -> None:
    """The keeper of cpusets may be a moment behind; `serve` releases the cores of a pod that is missing."""
    vm.place(revision=1, node=0)
    current = vm.node.current
    vm.node.current = lambda: plan_node(replace(vm.own.state, is_known=False), vm.node.containers())
    await vm.looks()
    assert not vm.report.is_complete
    vm.node.current = current
    await vm.looks()
    assert (vm.report.is_complete, vm.report.pods[VM].running) == (True, True)


VF = ResourceName("intel.com/vf")


def place_with_device(vm: Guarded, device: int, mode: DeviceNuma = DeviceNuma.PREFERRED) -> None:
    """Let the VM have cores on NUMA node 0 and a device on another one, -1 for none."""
    bound = placed(VM, "2", strict=(NumaId(0),))
    bound = replace(bound, placement=replace(bound.placement, numa_nodes=(NumaId(0),)), device_numa=mode)
    pod = PodRecord("vms", "a", VM, node=NODE, phase="Running", vmi="a", placement=bound.to_json())
    vm.own.pods.apply(Apply(pod))
    given = (PodDevice(VF, NumaId(device), "0000:c1:00.2"),)
    vm.report.use_devices(DeviceReport(NodeDevices(), {VM: given}))


async def test_a_vm_that_has_started_with_a_device_that_is_not_local_gets_one_event(
    vm: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sweep, "found", PodFinding(NOT_CHECKED))
    place_with_device(vm, 1)
    await vm.looks()
    assert vm.written.events == [], "its cores may follow the device until its QEMU starts"
    monkeypatch.setattr(Sweep, "found", FOUND)
    await vm.looks()
    assert [(one.regarding.kind, one.reason) for one in vm.written.events] == [
        ("Pod", EventReason.DEVICE_NOT_LOCAL),
        ("VirtualMachineInstance", EventReason.DEVICE_NOT_LOCAL),
    ]
    assert vm.written.events[0].note == (
        "intel.com/vf 0000:c1:00.2 is on NUMA node 1; the cores of the VM are on NUMA node 0"
    )


@pytest.mark.parametrize(
    ("device", "mode"), [(0, DeviceNuma.PREFERRED), (-1, DeviceNuma.PREFERRED), (1, DeviceNuma.OFF)]
)
async def test_a_device_that_is_local_or_does_not_matter_gets_no_event(
    vm: Guarded, device: int, mode: DeviceNuma
) -> None:
    place_with_device(vm, device, mode)
    await vm.looks()
    assert vm.written.events == []
