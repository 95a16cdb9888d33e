"""The load under which allocators are compared."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks._load import EVEN, GIB, MIXES, SMALL_AND_LARGE, ConstantLoad, Sizes, vms
from kvplace.simulate.scenario import Arrival, Departure, LoadEvent, SimulatedVm
from tests.profiles import examples


def at(event: LoadEvent) -> float:
    """The time of an event."""
    lifetime = event.vm.lifetime if isinstance(event, Departure) else 0.0
    return event.vm.arrives + (lifetime or 0.0)


def test_equal_seeds_make_equal_events_and_other_seeds_other_ones() -> None:
    first, again, other = (list(ConstantLoad(EVEN, seed, cpus=256, count=300)) for seed in (7, 7, 8))
    assert first == again != other


@settings(max_examples=examples(40), deadline=None)
@given(
    seed=st.integers(0, 1000),
    mix=st.sampled_from(MIXES),
    cpus=st.integers(64, 400),
    memory=st.none() | st.integers(512, 2048).map(lambda gib: gib * GIB),
)
def test_the_machine_is_never_asked_for_more_than_it_has(
    seed: int, mix: Sizes, cpus: int, memory: int | None
) -> None:
    running: dict[str, SimulatedVm] = {}
    before = 0.0
    for event in ConstantLoad(mix, seed, cpus=cpus, memory=memory, count=150):
        assert at(event) >= before
        before = at(event)
        if isinstance(event, Arrival):
            running[event.vm.id] = event.vm
        else:
            assert running.pop(event.vm.id) == event.vm
        assert sum(vm.request.vcpus for vm in running.values()) <= cpus
        assert memory is None or sum(vm.request.memory for vm in running.values()) <= memory


def test_the_use_stays_around_the_fill() -> None:
    used, total, before = 0, 0.0, 0.0
    for event in ConstantLoad(EVEN, 3, cpus=256, count=3000):
        total += used * (at(event) - before)
        before = at(event)
        used += event.vm.request.vcpus if isinstance(event, Arrival) else -event.vm.request.vcpus
    assert 0.83 < total / before / 256 < 0.87


def test_a_refused_vm_has_no_departure_and_the_next_one_replaces_it() -> None:
    load = ConstantLoad(EVEN, 5, cpus=256, count=400)
    refused, last = set(), []
    for event in load:
        if isinstance(event, Departure):
            assert event.vm.id not in refused
        elif event.vm.request.vcpus > 8:
            load.refused(event.vm)
            refused.add(event.vm.id)
        last.append(load.used_cpus)
    assert refused
    assert min(last[200:]) > 0.75 * 256


def test_sizes_are_drawn_as_often_as_they_are_listed() -> None:
    counts = Counter(vm.request.vcpus for vm in islice(vms(EVEN, 0), 8000))
    assert all(abs(counts[size] / 1000 - EVEN.cpus.count(size)) < 0.15 for size in counts)
    assert set(counts) == {2, 4, 8, 16, 32}
    large = sum(size for size in SMALL_AND_LARGE.cpus if size >= 32) / sum(SMALL_AND_LARGE.cpus)
    assert 0.6 < large < 0.7


def test_a_vm_larger_than_the_capacity_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="VMs of 32 CPUs, the capacity is 16"):
        ConstantLoad(EVEN, 0, cpus=16, count=1)
    with pytest.raises(ValueError, match="more memory than the capacity"):
        ConstantLoad(EVEN, 0, cpus=64, memory=64 * GIB, count=1)
    assert max(EVEN.up_to(16).cpus) == 16
