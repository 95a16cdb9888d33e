"""The agent keeps the threads of a real VM on the CPUs of its placement, whatever moves them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest

from harness.libvirt_session.daemon import LibvirtSession, NoLibvirtHere, RunningDomain, session_daemon
from harness.libvirt_session.documents import minimal_domain
from kvplace.agent.back_off import MOST_REPAIRS, PERIOD_S
from kvplace.agent.libvirt_pins import LibvirtPins
from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.node_topology import Enforcement
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import OnFailure, Policy
from kvplace.core.scalars import CpuMask
from kvplace.kube.events import EventReason
from kvplace.kube.object_records import PodReport
from kvplace.kube.watches import Apply
from kvplace.libvirt.domain_pins import DomainPins
from tests.libvirt_session.guarded_vm import NODE, ONLINE, UID, GuardedVm, guarded, placed, until
from tests.libvirt_session.migrating import migrate

pytestmark = pytest.mark.libvirt_session

FIRST, SECOND = list(cpus_of(ONLINE))[:2]
ON_FIRST, ON_SECOND = mask_of([FIRST]), mask_of([SECOND])
THREADS = ["CPU 0/TCG", "IO iothread1", "IO mon_iothread", "call_rcu", "main"]
AS_PLACED = [
    ("vcpupin", str(SECOND)), ("emulatorpin", str(FIRST)), ("iothreadpin", str(FIRST)),
]  # fmt: skip


@asynccontextmanager
async def guarded_vm(
    session: LibvirtSession, placement: PodPlacement | None = None, *, pins: str = "", pluggable: int = 0
) -> AsyncIterator[GuardedVm]:
    """A VM with one vCPU and one I/O thread, by default unpinned."""
    xml = minimal_domain("guarded", vcpus=1, pluggable=pluggable, inside=f"<iothreads>1</iothreads>{pins}")
    with session.running(xml) as domain:
        async with guarded(session, domain, placement or placed(SECOND, FIRST)) as vm:
            yield vm


@asynccontextmanager
async def at_work(vm: GuardedVm) -> AsyncIterator[None]:
    """Lets the guard check by itself, and counts its checks."""
    look = vm.guard.look

    async def counted() -> None:
        await look()
        vm.checks += 1

    vm.guard.look = counted  # type: ignore[method-assign]
    task = asyncio.create_task(vm.guard.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def in_place() -> dict[str, int]:
    return {name: ON_SECOND if name.startswith("CPU") else ON_FIRST for name in THREADS}


async def until_in_place(vm: GuardedVm) -> int:
    """Waits until every thread is in its place; returns how many checks have ended meanwhile."""
    before = vm.checks
    await until(lambda: vm.cpus() == in_place())
    return vm.checks - before


async def test_threads_that_are_elsewhere_are_set_and_libvirt_and_users_are_informed(
    libvirt_session: LibvirtSession,
) -> None:
    async with guarded_vm(libvirt_session) as vm, at_work(vm):
        assert await until_in_place(vm) <= 2
        await vm.libvirt_keeps(AS_PLACED)
        apart = (
            f"vCPUs run on CPU {SECOND}, I/O threads run on CPU {FIRST}, emulator threads run on CPU {FIRST}"
        )
        message = f"revision 1: {apart} as placed"
        await vm.says(vm.condition(status=True, reason="AsPlaced", message=message))
        assert vm.report.pods[UID] == PodReport(
            UID, "vms", "virt-launcher-a", revision=1, pinned=True, running=True, cpus=ON_FIRST | ON_SECOND
        )
        assert vm.own.state.pods[UID].confirmed == 1
        assert vm.written.events == []


async def test_the_first_check_after_a_start_lists_every_pod_that_runs(
    libvirt_session: LibvirtSession,
) -> None:
    """A pod that is missing from a complete report is released."""
    pins = f"<cputune><vcpupin vcpu='0' cpuset='{SECOND}'/><emulatorpin cpuset='{FIRST}'/></cputune>"
    async with guarded_vm(libvirt_session, pins=pins) as vm:
        await vm.guard.look()
        complete_before_containers_are_known = vm.report.is_complete
        vm.report.drop_pod(UID)
        vm.report.enforce(Enforcement.CGROUP)
        await vm.guard.look()
        assert (complete_before_containers_are_known, vm.report.is_complete) == (False, True)
        assert vm.report.pods[UID].running


async def test_pins_that_are_right_already_are_confirmed_and_nothing_is_moved(
    libvirt_session: LibvirtSession,
) -> None:
    pins = (
        f"<cputune><vcpupin vcpu='0' cpuset='{SECOND}'/><emulatorpin cpuset='{FIRST}'/>"
        f"<iothreadpin iothread='1' cpuset='{FIRST}'/></cputune>"
    )
    async with guarded_vm(libvirt_session, pins=pins) as vm:
        before = vm.cpus()
        await vm.looks()
        assert vm.cpus() == before == in_place()
        assert vm.report.pods[UID].pinned


@pytest.mark.parametrize("name", THREADS)
async def test_a_thread_moved_by_taskset_is_back_after_two_checks_at_most(
    libvirt_session: LibvirtSession, name: str
) -> None:
    async with guarded_vm(libvirt_session) as vm, at_work(vm):
        await until_in_place(vm)
        await vm.libvirt_keeps(AS_PLACED)
        vm.move(name, ONLINE & ~in_place()[name])
        assert await until_in_place(vm) <= 2
        await until(lambda: len(vm.written.events) == 2)
        assert {event.reason for event in vm.written.events} == {EventReason.PINNING_DRIFT}
        assert {event.regarding.kind for event in vm.written.events} == {"Pod", "VirtualMachineInstance"}
        assert vm.written.events[0].note.endswith("; set back")


async def test_a_pin_set_with_virsh_is_undone_in_the_kernel_and_in_libvirt(
    libvirt_session: LibvirtSession,
) -> None:
    async with guarded_vm(libvirt_session) as vm, at_work(vm):
        await until_in_place(vm)
        await vm.libvirt_keeps(AS_PLACED)
        width = vm.domain.handle.connect().getCPUMap()[0]
        vm.domain.handle.pinVcpu(0, tuple(cpu == FIRST for cpu in range(width)))
        vm.domain.handle.pinEmulator(tuple(cpu == SECOND for cpu in range(width)))
        assert await until_in_place(vm) <= 2
        await vm.libvirt_keeps(AS_PLACED)


async def test_a_cpuset_that_was_narrow_for_a_while_leaves_the_threads_in_place(
    libvirt_session: LibvirtSession,
) -> None:
    async with guarded_vm(libvirt_session) as vm:
        await vm.looks()
        vm.containers.sets_cpusets = False
        libvirt_session.group.confine(ON_FIRST)
        await vm.looks()
        report = vm.report.pods[UID]
        assert not report.pinned
        assert f"vCPU 0 may run on CPU {FIRST} instead of {SECOND}" in report.drift
        libvirt_session.group.confine(ONLINE)
        await vm.looks()
        assert vm.cpus() == in_place()
        assert vm.report.pods[UID].pinned


async def test_a_cpuset_that_stays_wrong_is_reported_at_the_second_check(
    libvirt_session: LibvirtSession,
) -> None:
    async with guarded_vm(libvirt_session, placed(SECOND, SECOND)) as vm:
        await vm.looks()
        assert libvirt_session.group.effective() == ON_SECOND
        assert vm.report.pods[UID].pinned
        vm.containers.sets_cpusets = False
        libvirt_session.group.confine(ONLINE)
        await vm.looks(1)
        assert vm.report.pods[UID].pinned
        await vm.looks(1)
        assert not vm.report.pods[UID].pinned
        assert "the cpuset of container compute is" in vm.report.pods[UID].drift


async def test_repairs_that_are_undone_again_and_again_are_given_up(libvirt_session: LibvirtSession) -> None:
    async with guarded_vm(libvirt_session) as vm:
        await vm.looks()
        for _ in range(MOST_REPAIRS):
            vm.move("CPU 0/TCG", ON_FIRST)
            await vm.looks(1)
            assert vm.cpus() == in_place()
            vm.clock.now += 1
        vm.move("CPU 0/TCG", ON_FIRST)
        await vm.looks(3)
        assert vm.cpus()["CPU 0/TCG"] == ON_FIRST
        assert "something else undid 5 repairs within 60 s" in vm.report.pods[UID].drift
        vm.clock.now += PERIOD_S
        await vm.looks(1)
        assert vm.cpus() == in_place()
        vm.clock.now += PERIOD_S
        await vm.looks(1)
        vm.move("CPU 0/TCG", ON_FIRST)
        await vm.looks(1)
        assert vm.cpus() == in_place()


async def test_a_libvirt_that_hangs_delays_no_repair_and_is_informed_later(
    libvirt_session: LibvirtSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[DomainPins] = []
    pin = LibvirtPins.pin

    async def observed(self: LibvirtPins, qemu_pid: int, pins: DomainPins) -> int:
        try:
            return await pin(self, qemu_pid, pins)
        finally:
            ended.append(pins)

    monkeypatch.setattr(LibvirtPins, "pin", observed)
    async with guarded_vm(libvirt_session) as vm:
        with libvirt_session.hanging():
            await vm.looks()
            assert ended == []  # the call is under way
            assert vm.cpus() == in_place()
            assert vm.report.pods[UID].pinned
        async with at_work(vm):
            await vm.libvirt_keeps(AS_PLACED)


async def test_a_newer_revision_is_followed_at_once_where_repairs_of_the_one_before_were_given_up(
    libvirt_session: LibvirtSession,
) -> None:
    async with guarded_vm(libvirt_session) as vm:
        await vm.looks()
        for _ in range(MOST_REPAIRS + 1):
            vm.move("CPU 0/TCG", ON_FIRST)
            await vm.looks(1)
        assert vm.cpus()["CPU 0/TCG"] == ON_FIRST
        vm.place(placed(FIRST, SECOND, revision=2))
        await vm.looks(1)
        assert vm.cpus() == {name: ON_FIRST if name.startswith("CPU") else ON_SECOND for name in THREADS}


async def test_a_newer_revision_is_followed_and_is_pinned_when_the_cpuset_has_followed_too(
    libvirt_session: LibvirtSession,
) -> None:
    async with guarded_vm(libvirt_session, placed(SECOND, SECOND)) as vm:
        await vm.looks()
        assert set(vm.cpus().values()) == {ON_SECOND}
        following = placed(FIRST, FIRST, revision=2)
        vm.place(following)
        await vm.looks(1)
        assert set(vm.cpus().values()) == {ON_FIRST}
        vm.containers.kept = vm.containers.plan  # what sets cpusets is slower than the guard
        await vm.follows(2)
        await vm.looks()
        assert vm.report.pods[UID].revision == 1
        vm.containers.kept = None
        vm.release(following)
        await vm.looks(1)
        assert vm.report.pods[UID] == PodReport(
            UID, "vms", "virt-launcher-a", revision=2, pinned=True, running=True, cpus=ON_FIRST
        )
        assert libvirt_session.group.effective() == ON_FIRST
        assert vm.written.events == []


async def test_a_vcpu_that_is_plugged_in_after_a_relocation_starts_on_the_new_cores(
    libvirt_session: LibvirtSession,
) -> None:
    """The pin of such a vCPU must lie in the cpuset: outside of it the plug fails (error 38)."""
    before = "".join(f"<vcpupin vcpu='{vcpu}' cpuset='{SECOND}'/>" for vcpu in (0, 1, 2))
    async with guarded_vm(
        libvirt_session, placed(SECOND, SECOND), pins=f"<cputune>{before}</cputune>", pluggable=2
    ) as vm:
        async with at_work(vm):
            await vm.follows(1)
            following = placed(FIRST, FIRST, revision=2)
            vm.place(following)
            await vm.follows(2)
            vm.release(following)
            await vm.libvirt_keeps(
                [*[("vcpupin", str(FIRST))] * 3, ("emulatorpin", str(FIRST)), ("iothreadpin", str(FIRST))]
            )
            await until(lambda: libvirt_session.group.effective() == ON_FIRST)
        vm.domain.handle.setVcpusFlags(2, 1)  # VIR_DOMAIN_AFFECT_LIVE
        assert vm.cpus()["CPU 1/TCG"] == ON_FIRST


async def test_a_revision_that_the_threads_cannot_follow_is_undone(libvirt_session: LibvirtSession) -> None:
    async with guarded_vm(libvirt_session, placed(SECOND, SECOND)) as vm:
        await vm.looks()
        vm.containers.sets_cpusets = False  # its cpuset does not grow to the next CPUs
        vm.place(placed(FIRST, FIRST, revision=2))
        await vm.looks()
        assert vm.own.state.pods[UID].failure == ""
        vm.clock.now += 11
        await vm.looks()
        assert vm.own.state.pods[UID].failure
        vm.containers.sets_cpusets = True
        await vm.looks()
        assert set(vm.cpus().values()) == {ON_SECOND}
        report = vm.report.pods[UID]
        assert (report.failed_revision, report.revision, report.pinned) == (2, 1, True)
        assert PodPlacement.from_json(report.restored_placement) == placed(SECOND, SECOND)
        assert f"instead of {FIRST}" in report.drift


async def test_a_vm_that_floats_from_now_on_may_use_the_whole_pool(libvirt_session: LibvirtSession) -> None:
    async with guarded_vm(libvirt_session) as vm:
        await vm.looks()
        floating = PodPlacement(
            UID, NODE, "", OnFailure.FLOAT, Placement(Policy.NONE, (), CpuMask(0)), revision=2
        )
        vm.annotate(floating)
        await vm.looks(1)
        assert set(vm.cpus().values()) == {ON_FIRST}  # what it owned is not the pool's yet
        await vm.follows(2)
        vm.release()
        await vm.looks(1)
        assert set(vm.cpus().values()) == {ONLINE}
        assert (vm.report.pods[UID].revision, vm.report.pods[UID].pinned) == (2, True)


async def test_a_node_that_is_only_observed_is_reported_and_nothing_is_set(
    libvirt_session: LibvirtSession,
) -> None:
    async with guarded_vm(libvirt_session) as vm:
        vm.own.machine_changed(vm.own.state.topology, CpuMask(0), observes_only=True)
        before = vm.cpus()
        await vm.looks()
        assert vm.cpus() == before
        assert not vm.report.pods[UID].pinned
        assert "may run on CPU" in vm.report.pods[UID].drift
        assert vm.libvirt_pins() == []


async def test_a_claim_that_is_refused_is_reported_and_its_threads_are_not_set(
    libvirt_session: LibvirtSession,
) -> None:
    async with guarded_vm(libvirt_session, placed(SECOND, SECOND)) as vm:
        before = vm.cpus()
        vm.own.machine_changed(vm.own.state.topology, ON_SECOND, observes_only=False)
        await vm.looks()
        assert not vm.report.pods[UID].pinned
        assert "kubelet" in vm.report.pods[UID].drift
        assert vm.cpus() == {name: cpus & ON_FIRST for name, cpus in before.items()}  # the shared pool
        assert vm.own.state.pods[UID].confirmed == 0


async def test_a_vm_that_arrives_with_the_pins_of_its_source_gets_those_of_its_target_before_it_runs(
    libvirt_session: LibvirtSession,
) -> None:
    pins = (
        f"<cputune><vcpupin vcpu='0' cpuset='{FIRST}'/><emulatorpin cpuset='{SECOND}'/>"
        f"<iothreadpin iothread='1' cpuset='{SECOND}'/></cputune>"
    )
    xml = minimal_domain("arrives", vcpus=1, inside=f"<iothreads>1</iothreads>{pins}")
    try:
        with session_daemon() as source, source.running(xml) as leaving:
            migrate(leaving.handle, libvirt_session)
            pid_file = libvirt_session.folder / "run/libvirt/qemu/run/arrives.pid"
            arrived = RunningDomain(
                libvirt_session.connection.lookupByName("arrives"), int(pid_file.read_text())
            )
            try:
                async with guarded(libvirt_session, arrived, placed(SECOND, FIRST)) as vm, at_work(vm):
                    assert await until_in_place(vm) <= 2
                    await vm.libvirt_keeps(AS_PLACED)
                    assert not vm.domain.handle.isPersistent()
                    assert vm.domain.handle.state()[0] == 3  # VIR_DOMAIN_PAUSED
            finally:
                arrived.handle.destroy()
            leaving.handle.create()
    except NoLibvirtHere as reason:
        pytest.skip(f"no real libvirt: {reason}")


async def test_a_vm_that_has_ended_is_not_reported_to_be_pinned_any_more(
    libvirt_session: LibvirtSession,
) -> None:
    async with guarded_vm(libvirt_session) as vm:
        await vm.looks()
        record = vm.own.pods.records[UID]
        said = vm.condition(status=True, reason="AsPlaced", message="revision 1: all threads run as placed")
        vm.own.pods.apply(Apply(replace(record, conditions=(said,))))
        vm.domain.handle.destroy()
        async with at_work(vm):
            await vm.says(
                vm.condition(status=False, reason="NotRunning", message="revision 1: its threads have ended")
            )
            assert vm.report.pods[UID] == PodReport(UID, "vms", "virt-launcher-a", running=True)
            vm.containers.known = ()
            await until(lambda: not vm.report.pods)
        vm.domain.handle.create()


async def test_a_condition_that_could_not_be_written_in_time_is_not_written_when_it_holds_no_more(
    libvirt_session: LibvirtSession,
) -> None:
    async with guarded_vm(libvirt_session) as vm:
        await vm.looks()
        apart = (
            f"vCPUs run on CPU {SECOND}, I/O threads run on CPU {FIRST}, emulator threads run on CPU {FIRST}"
        )
        message = f"revision 1: {apart} as placed"
        said = vm.condition(status=True, reason="AsPlaced", message=message)
        record = vm.own.pods.records[UID]
        vm.own.pods.apply(Apply(replace(record, conditions=(said,))))
        plan = vm.containers.plan
        vm.containers.kept = replace(plan, pods={UID: replace(plan.pods[UID], cpuset=ON_FIRST)})
        await vm.looks()
        assert not vm.report.pods[UID].pinned
        vm.containers.kept = None
        await vm.looks()
        assert vm.report.pods[UID].pinned
        vm.domain.handle.destroy()
        over = vm.condition(status=False, reason="NotRunning", message="revision 1: its threads have ended")
        async with at_work(vm):
            await vm.says(over)
        assert vm.written.conditions == [over]
        vm.domain.handle.create()


async def test_a_pod_whose_containers_are_gone_is_not_reported(libvirt_session: LibvirtSession) -> None:
    async with guarded_vm(libvirt_session) as vm:
        await vm.looks()
        vm.containers.known = ()
        await vm.looks(1)
        assert dict(vm.report.pods) == {}


async def test_pins_of_a_qemu_that_has_ended_are_not_sent_to_whoever_has_its_process_id_now(
    libvirt_session: LibvirtSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with guarded_vm(libvirt_session) as vm:
        sent: list[int] = []

        async def pin(_self: object, pid: int, pins: object) -> None:
            sent.append(pid)

        monkeypatch.setattr(LibvirtPins, "pin", pin)
        await vm.looks()
        pid = os.getpid()
        await vm.guard._tell_libvirt(UID, (pid, DomainPins(emulator=CpuMask(1))))
        assert pid not in sent
