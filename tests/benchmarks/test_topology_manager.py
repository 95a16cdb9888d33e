"""The rebuilt Topology Manager merges hints as the kubelet's documentation and its own tests describe."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.peers.topology_manager import Hint, Wanted, admitted, amounts_of, hints, take_devices
from kvplace.core.device_locality import Certainty, predicted_devices
from kvplace.core.node_devices import DeviceCount, NodeDevices, TopologyPolicy
from kvplace.core.scalars import NumaId, ResourceName
from tests.profiles import examples

BOTH = 0b11
NODE_0, NODE_1 = NumaId(0), NumaId(1)
POLICIES = ("best-effort", "restricted", "single-numa-node")


def wanted(count: int, *nodes: tuple[int, int]) -> Wanted:
    """A resource with (all, free) on NUMA node 0, 1 and so on."""
    return Wanted(tuple((node, total, free) for node, (total, free) in enumerate(nodes)), count)


def test_sets_as_small_as_on_an_empty_machine_are_preferred() -> None:
    assert hints(wanted(4, (8, 4), (8, 2))) == (Hint(0b01, preferred=True), Hint(0b11, preferred=False))
    assert hints(wanted(4, (8, 3), (8, 2))) == (Hint(0b11, preferred=False),)
    assert hints(wanted(4, (8, 1), (8, 2))) == ()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_lowest_node_that_all_providers_prefer_is_taken(policy: str) -> None:
    cpus, devices = wanted(4, (8, 8), (8, 8)), wanted(1, (4, 0), (4, 1))
    assert admitted(policy, BOTH, (cpus, wanted(1, (4, 4), (4, 4)))) == Hint(0b01, preferred=True)
    assert admitted(policy, BOTH, (cpus, devices)) == Hint(0b10, preferred=True)


def test_only_best_effort_admits_cpus_and_devices_of_different_nodes() -> None:
    apart = (wanted(4, (8, 8), (8, 0)), wanted(1, (4, 0), (4, 1)))
    assert admitted("best-effort", BOTH, apart) == Hint(0b01, preferred=False)
    assert admitted("restricted", BOTH, apart) is None
    assert admitted("single-numa-node", BOTH, apart) is None


def test_a_container_larger_than_every_node_is_refused_by_single_numa_node_alone() -> None:
    large = (wanted(12, (8, 8), (8, 8)),)
    assert admitted("restricted", BOTH, large) == Hint(0b11, preferred=True)
    assert admitted("single-numa-node", BOTH, large) is None


def test_policy_none_asks_no_provider() -> None:
    assert admitted("none", BOTH, (wanted(9, (4, 0), (4, 0)),)) == Hint(None, preferred=True)


def test_devices_of_the_hint_are_taken_before_others() -> None:
    free = {NODE_0: 2, NODE_1: 3}
    assert take_devices(free, 2, [1], Random(1)) == {NODE_1: 2}
    assert take_devices(free, 4, [1], Random(1)) == {NODE_1: 3, NODE_0: 1}
    assert take_devices(free, 6, [1], Random(1)) is None
    assert {*(tuple(take_devices(free, 1, None, Random(n)) or ()) for n in range(20))} == {(0,), (1,)}


COUNTS = st.dictionaries(
    st.integers(0, 3).map(NumaId),
    st.tuples(st.integers(1, 4), st.integers(0, 4)).map(lambda pair: (pair[0], min(pair))),
    min_size=1,
)


@settings(max_examples=examples(500))
@given(
    st.sampled_from(POLICIES),
    st.lists(st.tuples(COUNTS, st.integers(1, 3)), min_size=1, max_size=3),
    st.integers(0, 5),
)
def test_kvplace_predicts_the_devices_that_the_rebuilt_kubelet_takes(
    policy: str, resources: list[tuple[dict[NumaId, tuple[int, int]], int]], seed: int
) -> None:
    names = [ResourceName(f"a.b/{number}") for number in range(len(resources))]
    free = {
        name: {n: free for n, (_, free) in by.items()} for name, (by, _) in zip(names, resources, strict=True)
    }
    requested = {name: count for name, (_, count) in zip(names, resources, strict=True)}
    if any(sum(free[name].values()) < count for name, count in requested.items()):
        return  # kube-scheduler sends no pod there
    counts = [
        DeviceCount(name, node, total, has)
        for name, (by, _) in zip(names, resources, strict=True)
        for node, (total, has) in by.items()
    ]
    every = tuple(
        Wanted(amounts_of({n: total for n, (total, _) in by.items()}, free[name]), requested[name])
        for name, (by, _) in zip(names, resources, strict=True)
    )
    predicted = predicted_devices(NodeDevices.of(counts, TopologyPolicy(policy)), requested)
    hint = admitted(policy, 0b1111, every)
    assert (hint is None) == (predicted.certainty is Certainty.REJECTED)
    if hint is None or hint.nodes is None:
        return
    inside = [node for node in range(4) if hint.nodes >> node & 1]
    taken = {
        node
        for name, count in requested.items()
        for node in take_devices(free[name], count, inside, Random(seed)) or ()
    }
    assert taken <= predicted.nodes
