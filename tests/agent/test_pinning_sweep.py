"""Checks processes that play QEMU, in real cgroups: threads come, go and move, and so do whole VMs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.played_qemu import PlayedQemus, played_qemus
from harness.pod_cgroups import PodCgroups, container_id, pod_cgroups, pod_uid
from kvplace.agent.conditions import PinnedReason
from kvplace.agent.node_plan import ClaimContainer, PodPlan
from kvplace.agent.pinning_sweep import READ_ANEW_S, PinningSweep, WatchedPod
from kvplace.agent.verification import PodFinding
from kvplace.core.cpuset import cpus_of, format_cpu_list, mask_of, parse_cpu_list
from kvplace.core.errors import Misconfigured
from kvplace.core.placement import Placement
from kvplace.core.request import NumaMemory, Policy
from kvplace.core.scalars import NO_CPUS, Bytes, CpuMask, NumaId, PodUid
from kvplace.linux.threads import Tid, affinity_of, set_affinity
from tests.agent.nodes_in_use import VM, placed, placed_otherwise, planned

ONLINE = parse_cpu_list(Path("/sys/devices/system/cpu/online").read_text())
FIRST, SECOND = (list(cpus_of(ONLINE)) * 2)[:2]
ON_FIRST, ON_SECOND = mask_of([FIRST]), mask_of([SECOND])
PLACEMENT = Placement(Policy.SHARE, (SECOND,), ON_SECOND, emulator_cpus=ON_FIRST)
UID = pod_uid(1)
DELAY_S = 0.2
"""The longest delay of the checks of others by one VM, as docs/reference/bounds.md states it."""

pytestmark = pytest.mark.skipif(FIRST == SECOND, reason="one CPU cannot be distinguished from another here")


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def pods() -> Iterator[PodCgroups]:
    """A tree of real cgroups."""
    try:
        with pod_cgroups() as made:
            yield made
    except (Misconfigured, PermissionError) as error:
        pytest.skip(f"no cpuset cgroup can be made here, which needs root: {error}")


@pytest.fixture
def cgroup(pods: PodCgroups) -> Path:
    """The cgroup of the compute container."""
    return pods.container(UID, container_id(1))


@pytest.fixture
def qemus(cgroup: Path) -> Iterator[PlayedQemus]:
    """Two processes that play QEMU; the first is in the container."""
    with played_qemus(2, vcpus=1, threads=("call_rcu", "IO iothread1")) as made:
        enter(cgroup, made.pids[0])
        yield made


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sweep(clock: Clock) -> Iterator[PinningSweep]:
    found = PinningSweep(Path("/sys/fs/cgroup"), clock=clock)
    yield found
    found.close()


@pytest.fixture
def target(cgroup: Path) -> PodPlan:
    """The VM with its vCPU on one CPU and the rest on another."""
    return swept(ClaimContainer("compute", cgroup))


def swept(
    *containers: ClaimContainer, cpuset: CpuMask = ONLINE, uid: PodUid = UID, vm: bool = True
) -> PodPlan:
    return planned(PLACEMENT, *containers, cpuset=cpuset, online=ONLINE, uid=uid, vm=vm)


def enter(cgroup: Path, pid: int) -> None:
    (cgroup / "cgroup.procs").write_text(str(pid))


def look(sweep: PinningSweep, target: PodPlan) -> PodFinding:
    return sweep.look([target])[UID]


def thread(finding: PodFinding, name: str) -> Tid:
    (tid,) = [one.tid for one in finding.measured.threads if one.name.name == name]
    return tid


def test_the_same_is_found_as_long_as_nothing_happens(
    sweep: PinningSweep, target: PodPlan, qemus: PlayedQemus
) -> None:
    first = look(sweep, target)
    assert first.differences == ()
    assert first.pid == qemus.pids[0]
    assert first.pins is not None
    look(sweep, target)
    settled = look(sweep, target)
    assert settled.pins is None
    assert look(sweep, target) is settled


@pytest.mark.parametrize(("name", "cpus"), [("CPU 1/KVM", ON_SECOND), ("IO iothread3", ON_FIRST)])
def test_a_thread_that_starts_in_the_wrong_place_is_set_and_is_not_a_drift(
    name: str, cpus: CpuMask, sweep: PinningSweep, target: PodPlan, qemus: PlayedQemus
) -> None:
    look(sweep, target)
    tid = Tid(qemus.start_thread(qemus.pids[0], name))
    found = look(sweep, target)
    assert affinity_of(tid) == cpus
    assert (found.differences, found.drift) == ((), ())


def test_libvirt_is_informed_of_an_io_thread_that_starts_later(
    sweep: PinningSweep, target: PodPlan, qemus: PlayedQemus
) -> None:
    look(sweep, target)
    qemus.start_thread(qemus.pids[0], "IO iothread3")
    found = look(sweep, target)
    assert found.pins is not None
    assert set(found.pins.io_threads) == {1, 3}


def test_memory_on_another_numa_node_is_reported_until_it_is_read_again_and_has_followed(
    sweep: PinningSweep, target: PodPlan, qemus: PlayedQemus, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = replace(
        PLACEMENT, numa_memory=NumaMemory.STRICT, numa_nodes=(NumaId(0),), memory={NumaId(0): Bytes(1 << 30)}
    )
    target = placed_otherwise(target, strict)
    memory = {NumaId(1): Bytes(1 << 30)}
    monkeypatch.setattr("kvplace.agent.pinning_sweep.memory_of_cgroup", lambda _folders: memory)

    def sentences() -> list[str]:
        return [str(one) for one in look(sweep, target).differences]

    assert qemus.pids
    look(sweep, target)
    clock.now += READ_ANEW_S
    assert sentences() == ["1024 MiB are on NUMA node 1 instead of 0"]
    memory = {NumaId(0): Bytes(1 << 30)}
    assert sentences() == ["1024 MiB are on NUMA node 1 instead of 0"]
    clock.now += READ_ANEW_S
    assert sentences() == []


def test_a_vm_with_more_threads_than_are_checked_is_reported_and_not_called_pinned(
    sweep: PinningSweep, target: PodPlan, qemus: PlayedQemus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvplace.agent.node_plan.THREADS_BESIDE_VCPUS", 2)
    look(sweep, target)
    qemus.start_thread(qemus.pids[0], "worker")
    found = look(sweep, target)
    assert found.problem == f"process {qemus.pids[0]} has 5 threads, more than the 4 that are checked"
    assert not found.in_order
    assert not found.follows


@pytest.mark.parametrize("threads", [1_000, 3_000, 8_000])
def test_a_vm_with_many_threads_that_move_all_the_time_delays_the_checks_of_others_for_a_moment_only(
    sweep: PinningSweep, target: PodPlan, cgroup: Path, pods: PodCgroups, qemus: PlayedQemus, threads: int
) -> None:
    """By CPU time, so that other programs of the machine do not count."""
    another = swept(ClaimContainer("compute", pods.container(pod_uid(2), container_id(2))), uid=pod_uid(2))
    enter(pods.container(pod_uid(2), container_id(2)), qemus.pids[1])
    enter(pods.base, qemus.pids[0])
    with played_qemus(1, vcpus=1, threads=("worker",) * (threads - 2)) as many:
        enter(cgroup, many.pids[0])
        for attempt in range(3):
            for thread in Path(f"/proc/{many.pids[0]}/task").iterdir():
                set_affinity(Tid(int(thread.name)), ON_FIRST if attempt % 2 else ON_SECOND)
            began = time.thread_time()
            found = sweep.look([target, another])
            assert time.thread_time() - began < DELAY_S
            assert found[pod_uid(2)].measured.threads


def test_a_container_with_too_many_processes_is_reported(
    sweep: PinningSweep, target: PodPlan, qemus: PlayedQemus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvplace.agent.pinning_sweep.MOST_PROCESSES", 0)
    assert qemus.pids
    assert look(sweep, target).problem == (
        "its containers have 1 processes, more than the 0 that are searched for QEMU"
    )


def test_libvirt_is_not_informed_of_each_worker_that_qemu_starts(
    sweep: PinningSweep, target: PodPlan, qemus: PlayedQemus
) -> None:
    """Under load they come and go every second, and begin on the CPUs of the I/O thread that started them."""
    assert look(sweep, target).pins is not None
    worker = Tid(qemus.start_thread(qemus.pids[0], "worker"))
    set_affinity(worker, ON_SECOND)
    found = look(sweep, target)
    assert affinity_of(worker) == ON_FIRST
    assert (found.differences, found.pins) == ((), None)


def test_libvirt_is_informed_again_when_a_thread_was_moved(
    sweep: PinningSweep, target: PodPlan, qemus: PlayedQemus
) -> None:
    """`virsh emulatorpin` changes both."""
    first = look(sweep, target)
    set_affinity(thread(first, "call_rcu"), ON_SECOND)
    assert look(sweep, target).pins == first.pins


def test_a_thread_that_is_moved_is_set_back_and_reported_as_drift_each_time(
    sweep: PinningSweep, target: PodPlan, qemus: PlayedQemus
) -> None:
    tid = thread(look(sweep, target), "IO iothread1")
    for _ in range(2):
        set_affinity(tid, ON_SECOND)
        found = look(sweep, target)
        assert affinity_of(tid) == ON_FIRST
        (drift,) = found.drift
        assert str(drift) == f"I/O thread 1 may run on CPU {SECOND} instead of {FIRST}"
        assert found.differences == ()
        assert look(sweep, target).drift == ()


def test_a_worker_of_the_kernel_is_found_at_the_next_reading_and_set(
    sweep: PinningSweep, target: PodPlan, qemus: PlayedQemus, clock: Clock, pods: PodCgroups, cgroup: Path
) -> None:
    look(sweep, target)
    rename = f"open('/proc/self/comm', 'w').write('vhost-{qemus.pids[0]}'); __import__('signal').pause()"
    vhost = pods.process(cgroup, sys.executable, "-c", rename)
    while Path(f"/proc/{vhost.pid}/comm").read_text().strip() != f"vhost-{qemus.pids[0]}":
        pass
    assert affinity_of(Tid(vhost.pid)) == ONLINE
    clock.now += READ_ANEW_S
    found = look(sweep, target)
    assert affinity_of(Tid(vhost.pid)) == ON_FIRST
    assert f"vhost-{qemus.pids[0]}" in {one.name.name for one in found.measured.threads}


def test_a_vm_that_ends_has_no_threads_and_the_next_one_is_found(
    sweep: PinningSweep, target: PodPlan, qemus: PlayedQemus, cgroup: Path
) -> None:
    assert look(sweep, target).measured.threads
    qemus.end(qemus.pids[0])
    ended = look(sweep, target)
    assert (ended.measured.threads, ended.pid) == ((), 0)
    enter(cgroup, qemus.pids[1])
    again = look(sweep, target)
    assert (again.pid, again.differences) == (qemus.pids[1], ())
    assert again.pins is not None


def test_a_cpuset_without_its_cpu_is_reported_and_the_thread_returns_with_it(
    sweep: PinningSweep, target: PodPlan, qemus: PlayedQemus, cgroup: Path
) -> None:
    look(sweep, target)
    (cgroup / "cpuset.cpus").write_text(str(FIRST))
    found = look(sweep, target)
    reasons = {one.reason for one in found.differences}
    assert reasons == {PinnedReason.THREADS_ELSEWHERE, PinnedReason.CPUSET_DIFFERS}
    assert len(found.drift) == 1
    assert look(sweep, target).drift == ()  # reported once
    assert not found.given_up
    (cgroup / "cpuset.cpus").write_text(format_cpu_list(ONLINE))
    assert look(sweep, target).differences == ()


def test_a_cpu_that_is_known_to_be_offline_is_named(
    sweep: PinningSweep, target: PodPlan, qemus: PlayedQemus, cgroup: Path
) -> None:
    look(sweep, target)
    (cgroup / "cpuset.cpus").write_text(str(FIRST))
    offline = replace(target, online=ON_FIRST)
    (found,) = look(sweep, offline).differences
    assert found.reason is PinnedReason.CPUS_OFFLINE
    assert str(found) == f"vCPU 0 runs on CPU {FIRST}, because CPU {SECOND} is offline"


def test_another_wanted_state_is_followed_and_is_not_a_drift(
    sweep: PinningSweep, target: PodPlan, qemus: PlayedQemus
) -> None:
    look(sweep, target)
    turned = Placement(Policy.SHARE, (FIRST,), ON_FIRST, emulator_cpus=ON_SECOND)
    found = look(sweep, placed_otherwise(target, turned))
    assert affinity_of(thread(found, "CPU 0/KVM")) == ON_FIRST
    assert affinity_of(thread(found, "call_rcu")) == ON_SECOND
    assert found.drift == ()
    assert found.pins is not None


def test_nothing_is_set_where_it_is_only_observed(
    sweep: PinningSweep, target: PodPlan, qemus: PlayedQemus
) -> None:
    found = look(sweep, replace(target, sets_threads=False))
    assert {one.cpus for one in found.measured.threads} == {ONLINE}
    assert len(found.differences) == len(found.measured.threads)
    assert found.pins is None


def test_a_plain_pod_is_its_cpusets(sweep: PinningSweep, cgroup: Path, pods: PodCgroups) -> None:
    pods.process(cgroup)
    plain = swept(ClaimContainer("app", cgroup), cpuset=ON_SECOND, vm=False)
    (found,) = look(sweep, plain).differences
    assert str(found) == f"the cpuset of container app is CPU {format_cpu_list(ONLINE)}, wider than {SECOND}"
    (cgroup / "cpuset.cpus").write_text(str(SECOND))
    assert look(sweep, plain).differences == ()
    settled = look(sweep, plain)
    assert settled.measured.cpus == ON_SECOND
    assert look(sweep, plain) is settled
    (cgroup / "cpuset.cpus").write_text(str(FIRST))
    assert len(look(sweep, plain).differences) == 1


def test_a_container_that_has_ended_is_left_out_and_the_others_are_not(
    sweep: PinningSweep, target: PodPlan, qemus: PlayedQemus, pods: PodCgroups
) -> None:
    other = pods.container(pod_uid(2), container_id(2))
    plain = swept(ClaimContainer("app", other), cpuset=CpuMask(0), uid=pod_uid(2), vm=False)
    not_started = swept(cpuset=CpuMask(0), uid=pod_uid(3), vm=False)
    assert set(sweep.look([target, plain, not_started])) == {UID, pod_uid(2)}
    other.rmdir()
    assert set(sweep.look([target, plain])) == {UID}
    open_files = len(list(Path("/proc/self/fd").iterdir()))
    assert sweep.look([]) == {}
    assert len(list(Path("/proc/self/fd").iterdir())) < open_files


def test_a_container_that_has_not_started_or_has_ended_does_not_hide_the_other_one(
    sweep: PinningSweep, pods: PodCgroups, cgroup: Path
) -> None:
    late = cgroup.parent / container_id(2)
    plain = swept(ClaimContainer("app", cgroup), ClaimContainer("late", late), vm=False)
    assert set(look(sweep, plain).measured.cpusets) == {"app"}
    pods.make(late)
    assert set(look(sweep, plain).measured.cpusets) == {"app", "late"}
    cgroup.rmdir()
    assert set(look(sweep, plain).measured.cpusets) == {"late"}
    pods.make(cgroup)


def test_a_qemu_in_a_cgroup_inside_that_of_its_container_is_found(
    sweep: PinningSweep, target: PodPlan, pods: PodCgroups, cgroup: Path
) -> None:
    """So crun makes them with version 2 and systemd."""
    with played_qemus(1, vcpus=1) as made:
        enter(pods.make(cgroup / "container"), made.pids[0])
        assert look(sweep, target).pid == made.pids[0]


def test_threads_that_may_not_be_set_are_a_problem_that_names_the_right(
    qemus: PlayedQemus, cgroup: Path
) -> None:
    program = f"""
import os
from pathlib import Path
from tests.agent.test_pinning_sweep import *
target = swept(ClaimContainer("compute", Path({str(cgroup)!r})))
os.setuid(65534)
print(look(PinningSweep(Path("/sys/fs/cgroup")), target).problem)
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "Operation not permitted; the agent needs CAP_SYS_NICE" in told.stdout


def test_memory_is_read_although_the_agent_has_a_cgroup_namespace_of_its_own(tmp_path: Path) -> None:
    """With version 2 runtimes give it one. Then /proc shows cgroups as seen from that of the agent."""
    cgroup = tmp_path / "cgroup/kubepods/pod2/compute"
    cgroup.mkdir(parents=True)
    with played_qemus(1, vcpus=1) as made:
        (pid,) = made.pids
        process = tmp_path / f"proc/{pid}"
        process.mkdir(parents=True)
        for name in ("task", "comm"):
            (process / name).symlink_to(f"/proc/{pid}/{name}")
        (process / "cgroup").write_text("0::/../../pod2/compute\n")
        (cgroup / "cgroup.procs").write_text(f"{pid}\n")
        (cgroup / "cgroup.controllers").write_text("cpuset memory\n")
        (cgroup / "cpuset.cpus.effective").write_text("0-1\n")
        (cgroup / "memory.numa_stat").write_text("anon N0=8192 N1=4096\n")
        compute = ClaimContainer("compute", cgroup)
        plan = planned(placed(VM, "0").placement, compute, cpuset=NO_CPUS, online=NO_CPUS)
        watched = WatchedPod(plan, tmp_path / "cgroup", tmp_path / "proc")
        measured = watched.measure(1000, memory=True)
        watched.close()
    assert measured.memory == {0: 8192, 1: 4096}
