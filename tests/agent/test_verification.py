"""The measurements of a pod, compared with its placement."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.agent.conditions import PinnedReason
from kvplace.agent.verification import (
    MISPLACED_ALLOWED,
    Measurement,
    QemuThread,
    differences,
)
from kvplace.core.cpuset import bits_of, mask_of, parse_cpu_list
from kvplace.core.placement import Placement
from kvplace.core.request import NumaMemory, Policy
from kvplace.core.scalars import Bytes, CpuId, CpuMask, NumaId
from kvplace.linux.threads import Tid, classify
from tests.agent.nodes_in_use import placed_otherwise, planned

ONLINE = parse_cpu_list("0-15")
PLACEMENT = Placement(
    Policy.EXCLUSIVE,
    vcpus=(CpuId(2), CpuId(10)),
    cpus=parse_cpu_list("2,10"),
    owned=parse_cpu_list("2,10,3"),
    emulator_cpus=parse_cpu_list("3"),
    io_thread_cpus=(parse_cpu_list("3"), parse_cpu_list("0")),
    numa_nodes=(NumaId(0),),
)
WANTED = planned(PLACEMENT, cpuset=parse_cpu_list("0,2-3,10"), online=ONLINE)
NAMES = {
    "qemu-kvm": "3",
    "call_rcu": "3",
    "IO mon_iothread": "3",
    "vhost-100": "3",
    "mig/src/main": "3",
    "CPU 0/KVM": "2",
    "CPU 1/KVM": "10",
    "IO iothread4": "0",
    "IO iothread1": "3",
    "IO iothread9": "3",
}


def thread(name: str, cpus: str, tid: int = 100) -> QemuThread:
    return QemuThread(Tid(tid), classify(name), parse_cpu_list(cpus))


def threads(**changed: str) -> tuple[QemuThread, ...]:
    return tuple(thread(name, cpus, 100 + at) for at, (name, cpus) in enumerate((NAMES | changed).items()))


GOOD = Measurement(threads(), cpusets={"compute": WANTED.cpuset})


def test_nothing_differs_when_every_thread_is_where_the_placement_states() -> None:
    assert differences(WANTED, GOOD) == ()
    assert GOOD.cpus == parse_cpu_list("0,2-3,10")


@pytest.mark.parametrize("name", sorted(NAMES))
@pytest.mark.parametrize("has", ["0-15", "7", "2-3"])
def test_each_kind_of_thread_is_noticed_where_it_should_not_be(name: str, has: str) -> None:
    (found,) = differences(WANTED, replace(GOOD, threads=threads(**{name: has})))
    assert found.reason is PinnedReason.THREADS_ELSEWHERE
    assert found.should == parse_cpu_list(NAMES[name])
    assert f"may run on CPU {has} instead of {NAMES[name]}" in str(found)


def test_vcpus_are_named_by_number_and_other_threads_by_name() -> None:
    changed = {"CPU 1/KVM": "9", "IO iothread4": "9", "call_rcu": "9"}
    assert [str(found) for found in differences(WANTED, replace(GOOD, threads=threads(**changed)))] == [
        "emulator thread 'call_rcu' may run on CPU 9 instead of 3",
        "vCPU 1 may run on CPU 9 instead of 10",
        "I/O thread 4 may run on CPU 9 instead of 0",
    ]


def test_threads_whose_cpus_the_placement_does_not_name_may_run_anywhere() -> None:
    silent = placed_otherwise(WANTED, replace(PLACEMENT, emulator_cpus=CpuMask(0), io_thread_cpus=()))
    assert differences(silent, replace(GOOD, threads=threads(call_rcu="0-15", **{"IO iothread1": "5"}))) == ()


def test_a_vcpu_without_a_thread_is_noticed() -> None:
    one = tuple(one for one in GOOD.threads if str(one.name) != "vCPU 1")
    (found,) = differences(WANTED, replace(GOOD, threads=one))
    assert (found.reason, str(found)) == (PinnedReason.VCPU_MISSING, "vCPU 1 has no thread")


def test_a_vcpu_that_was_plugged_in_may_use_the_cpus_of_all() -> None:
    more = (*GOOD.threads, thread("CPU 2/KVM", "2,10"))
    assert differences(WANTED, replace(GOOD, threads=more)) == ()


def test_offline_cpus_of_several_are_left_out_and_all_offline_is_reported() -> None:
    placement = replace(PLACEMENT, emulator_cpus=parse_cpu_list("3,4"), io_thread_cpus=())
    offline = replace(placed_otherwise(WANTED, placement), online=CpuMask(ONLINE & ~mask_of([4, 10])))
    measured = Measurement(
        tuple(thread(name, "2" if name == "CPU 0/KVM" else "3") for name in NAMES),
        cpusets={"compute": parse_cpu_list("0,2-3")},
    )
    (found,) = differences(offline, measured)
    assert found.reason is PinnedReason.CPUS_OFFLINE
    assert str(found) == "vCPU 1 runs on CPU 3, because CPU 10 is offline"


def test_threads_of_policy_numa_may_use_the_whole_cpuset() -> None:
    pool = planned(
        Placement(Policy.NUMA, (), parse_cpu_list("0-7")), cpuset=parse_cpu_list("0-5"), online=ONLINE
    )
    everywhere = tuple(thread(name, "0-5") for name in NAMES)
    assert differences(pool, Measurement(everywhere)) == ()
    assert len(differences(pool, Measurement((*everywhere[1:], thread("qemu-kvm", "0-7"))))) == 1


@pytest.mark.parametrize(("has", "how"), [("0-15", "wider"), ("2", "narrower"), ("", "none, narrower")])
def test_a_cpuset_that_is_wider_or_narrower_is_noticed(has: str, how: str) -> None:
    (found,) = differences(WANTED, replace(GOOD, cpusets={"compute": parse_cpu_list(has)}))
    assert found.reason is PinnedReason.CPUSET_DIFFERS
    assert how in str(found)


def test_a_plain_pod_is_judged_by_its_cpusets_alone() -> None:
    plain = replace(WANTED, vm=False)
    assert differences(plain, Measurement(cpusets={"a": WANTED.cpuset, "b": WANTED.cpuset})) == ()
    assert len(differences(plain, Measurement(cpusets={"a": WANTED.cpuset, "b": ONLINE}))) == 1


def test_memory_counts_only_where_it_is_bound_strictly_and_is_more_than_others_use() -> None:
    more = {NumaId(0): Bytes(1 << 30), NumaId(1): Bytes(MISPLACED_ALLOWED + (1 << 20))}
    measured = replace(GOOD, memory=more)
    strict = placed_otherwise(WANTED, replace(PLACEMENT, numa_memory=NumaMemory.STRICT))
    assert differences(WANTED, measured) == ()
    (found,) = differences(strict, measured)
    assert found.reason is PinnedReason.MEMORY_ELSEWHERE
    assert str(found) == "257 MiB are on NUMA node 1 instead of 0"
    less = {NumaId(0): Bytes(1 << 30), NumaId(1): MISPLACED_ALLOWED}
    assert differences(strict, replace(GOOD, memory=less)) == ()


MASKS = st.integers(1, ONLINE).map(CpuMask)


@given(
    vcpus=st.permutations(range(16)).flatmap(lambda ids: st.integers(1, 8).map(lambda n: ids[:n])),
    emulator=st.integers(0, ONLINE).map(CpuMask),
    io_threads=st.lists(MASKS, max_size=3),
    offline=st.integers(0, ONLINE >> 1).map(CpuMask),
    count=st.integers(0, 4),
    wrong=st.dictionaries(st.integers(0, 20), MASKS, max_size=3),
)
def test_exactly_the_threads_that_were_moved_away_are_reported(
    vcpus: list[int],
    emulator: CpuMask,
    io_threads: list[CpuMask],
    offline: CpuMask,
    count: int,
    wrong: dict[int, CpuMask],
) -> None:
    placement = Placement(
        Policy.SHARE,
        tuple(map(CpuId, vcpus)),
        mask_of(vcpus),
        emulator_cpus=emulator,
        io_thread_cpus=tuple(io_threads),
    )
    online = CpuMask(ONLINE & ~offline)
    wanted = planned(placement, cpuset=ONLINE, online=online)
    names = [f"CPU {number}/KVM" for number in range(len(vcpus))]
    names += [f"IO iothread{number + 1}" for number in range(count)] + ["qemu-kvm", "vhost-1"]
    numbers = {number + 1: number for number in range(count)}
    measured, expected = [], set()
    for at, name in enumerate(names):
        should = wanted.cpus_of(classify(name), numbers)
        cpus = wrong.get(at, CpuMask(should & online) or online)
        measured.append(QemuThread(Tid(at), classify(name), cpus))
        if should and cpus not in (should, should & online):
            expected.add(at)
    found = differences(wanted, Measurement(tuple(measured)))
    reported = {one.thread.tid for one in found if one.thread}
    assert reported == expected
    assert len(reported) == len(found)
    for one in found:
        if one.reason is PinnedReason.THREADS_ELSEWHERE:
            assert set(bits_of(one.should)) <= set(bits_of(online))


def _calls_for(threads: int) -> int:
    """Count the calls of Python functions that comparing a VM of so many I/O threads takes."""
    many = tuple(thread(f"IO iothread{number}", "5", number) for number in range(threads))
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        assert len(differences(WANTED, Measurement(threads=many))) >= threads
    finally:
        sys.setprofile(None)
    return calls


def test_twice_as_many_threads_take_twice_the_work() -> None:
    assert _calls_for(800) < 2.2 * _calls_for(400)
