"""The load under which allocators are compared."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplace.simulate.arrivals import (
    EVEN,
    GIB,
    MIXES,
    SMALL_AND_LARGE,
    Arrival,
    Arrivals,
    Departure,
    Mix,
    Vm,
    vms,
)


def test_equal_seeds_make_equal_events_and_other_seeds_other_ones() -> None:
    first, again, other = (list(Arrivals(EVEN, seed, cpus=256, count=300)) for seed in (7, 7, 8))
    assert first == again != other


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    mix=st.sampled_from(MIXES),
    cpus=st.integers(64, 400),
    memory=st.none() | st.integers(512, 2048).map(lambda gib: gib * GIB),
)
def test_the_machine_is_never_asked_for_more_than_it_has(
    seed: int, mix: Mix, cpus: int, memory: int | None
) -> None:
    running: dict[int, Vm] = {}
    before = 0.0
    for event in Arrivals(mix, seed, cpus=cpus, memory=memory, count=150):
        assert event.at >= before
        before = event.at
        if isinstance(event, Arrival):
            running[event.vm.number] = event.vm
        else:
            assert running.pop(event.vm.number) == event.vm
        assert sum(vm.cpus for vm in running.values()) <= cpus
        assert memory is None or sum(vm.memory for vm in running.values()) <= memory


def test_a_vm_leaves_after_its_own_lifetime() -> None:
    arrived = {}
    for event in Arrivals(EVEN, 1, cpus=256, count=400):
        if isinstance(event, Arrival):
            arrived[event.vm.number] = event.at
        else:
            assert event.at == arrived[event.vm.number] + event.vm.lifetime


def test_the_machine_hovers_around_its_fill() -> None:
    used, total, before = 0, 0.0, 0.0
    for event in Arrivals(EVEN, 3, cpus=256, count=3000):
        total += used * (event.at - before)
        before = event.at
        used += event.vm.cpus if isinstance(event, Arrival) else -event.vm.cpus
    assert 0.83 < total / before / 256 < 0.87


def test_a_refused_vm_never_leaves_and_the_next_one_comes_in_its_place() -> None:
    load = Arrivals(EVEN, 5, cpus=256, count=400)
    refused, last = set(), []
    for event in load:
        if isinstance(event, Departure):
            assert event.vm.number not in refused
        elif event.vm.cpus > 8:
            load.refused(event.vm)
            refused.add(event.vm.number)
        last.append(load.used_cpus)
    assert refused
    assert min(last[200:]) > 0.75 * 256


def test_the_mixes_are_as_often_as_they_say() -> None:
    counts = Counter(vm.cpus for vm in islice(vms(EVEN, 0), 8000))
    assert all(abs(counts[size] / 1000 - EVEN.cpus.count(size)) < 0.15 for size in counts)
    assert set(counts) == {2, 4, 8, 16, 32}
    large = sum(size for size in SMALL_AND_LARGE.cpus if size >= 32) / sum(SMALL_AND_LARGE.cpus)
    assert 0.6 < large < 0.7


def test_a_vm_larger_than_the_capacity_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="VMs of 32 CPUs, the capacity is 16"):
        Arrivals(EVEN, 0, cpus=16, count=1)
    with pytest.raises(ValueError, match="more memory than the capacity"):
        Arrivals(EVEN, 0, cpus=64, memory=64 * GIB, count=1)
    assert max(EVEN.up_to(16).cpus) == 16
