"""A device is local where its NUMA node is one of the cores'; with `socket`, where its package is.

The NUMA nodes of devices that a pod has not got yet are predicted.
"""

from __future__ import annotations

import pytest

from kvplace.core.allocator.allocate import place
from kvplace.core.device_locality import (
    Certainty,
    device_phrases,
    located,
    predicted_devices,
    predicted_held,
    too_few_devices,
)
from kvplace.core.free_resources import free_of
from kvplace.core.ledger import Ledger
from kvplace.core.node_devices import NO_NUMA, DeviceCount, NodeDevices, PodDevice, TopologyPolicy
from kvplace.core.placement import Placement
from kvplace.core.request import DeviceNuma, PinningOptions, Request, Scope
from kvplace.core.scalars import NumaId, ResourceName
from kvplace.machines.server_types import read_machine

VF, GPU = ResourceName("intel.com/vf"), ResourceName("nvidia.com/gpu")
MACHINE = read_machine("2x-epyc-9354-nps2")
"""Two sockets with two NUMA nodes each."""


@pytest.fixture
def on_node_0() -> Placement:
    placement = place(MACHINE, free_of(MACHINE, Ledger()), Request(4, PinningOptions(scope=Scope.ONE_NUMA)))
    assert isinstance(placement, Placement)
    assert placement.numa_nodes == (0,)
    return placement


def device(node: int, resource: ResourceName = VF) -> PodDevice:
    return PodDevice(resource, NumaId(node))


@pytest.mark.parametrize(
    ("node", "mode", "local"),
    [
        (0, DeviceNuma.PREFERRED, True),
        (1, DeviceNuma.PREFERRED, False),
        (1, DeviceNuma.REQUIRED, False),
        (1, DeviceNuma.SOCKET, True),
        (2, DeviceNuma.SOCKET, False),
        (NO_NUMA, DeviceNuma.PREFERRED, None),
        (NO_NUMA, DeviceNuma.SOCKET, None),
    ],
)
def test_whether_a_device_is_local(
    on_node_0: Placement, node: int, mode: DeviceNuma, local: bool | None
) -> None:
    (found,) = located([device(node)], on_node_0, MACHINE, mode)
    assert found.is_local is local


def test_beside_a_vm_without_cores_no_device_is_called_local_or_not() -> None:
    (found,) = located([device(0)], None, MACHINE, DeviceNuma.PREFERRED)
    assert (found.is_local, found.place) == (None, "on NUMA 0")


@pytest.mark.parametrize("mode", DeviceNuma)
def test_cores_that_are_chosen_beside_a_device_are_reported_as_local_to_it(mode: DeviceNuma) -> None:
    free = free_of(MACHINE, Ledger())
    for node in MACHINE.numa_nodes:
        options = PinningOptions(scope=Scope.ONE_NUMA, device_numa=mode)
        placement = place(MACHINE, free, Request(4, options, device_nodes=frozenset({node.id})))
        assert isinstance(placement, Placement)
        (found,) = located([device(node.id)], placement, MACHINE, mode)
        assert found.is_local or mode is DeviceNuma.OFF


def test_equal_devices_are_counted(on_node_0: Placement) -> None:
    devices = [device(0), device(3, GPU), device(0), device(NO_NUMA)]
    assert device_phrases(located(devices, on_node_0, MACHINE, DeviceNuma.PREFERRED)) == (
        "2 intel.com/vf on NUMA 0 (local)",
        "1 intel.com/vf on no known NUMA node",
        "1 nvidia.com/gpu on NUMA 3 (not local)",
    )


ALIGNING = ("best-effort", "restricted", "single-numa-node")


def devices(policy: str = "none", **by_resource: dict[int, tuple[int, int]]) -> NodeDevices:
    """Make devices from `vf={node: (total, free)}` and `gpu=...`."""
    names = {"vf": VF, "gpu": GPU}
    counts = [
        DeviceCount(names[name], NumaId(node), *count)
        for name, by_node in by_resource.items()
        for node, count in by_node.items()
    ]
    return NodeDevices.of(counts, TopologyPolicy(policy))


def predicted(found: NodeDevices, **wanted: int) -> tuple[Certainty, set[int]]:
    """Predict for `vf=1` and `gpu=1`."""
    names = {"vf": VF, "gpu": GPU}
    result = predicted_devices(found, {names[name]: count for name, count in wanted.items()})
    return result.certainty, set(result.nodes)


def test_devices_that_are_all_on_one_numa_node_are_certain_under_every_policy() -> None:
    for policy in ("none", *ALIGNING):
        found = devices(policy, vf={1: (8, 8)})
        assert predicted(found, vf=2) == (Certainty.CERTAIN, {1})


def test_devices_without_a_numa_node_restrict_nothing() -> None:
    assert predicted(devices(vf={-1: (8, 8)}), vf=1) == (Certainty.CERTAIN, set())
    assert predicted(devices(vf={-1: (8, 8), 1: (4, 4)}), vf=1) == (Certainty.CERTAIN, {1})


def test_nothing_is_known_of_a_resource_that_the_agent_does_not_report() -> None:
    assert predicted(devices(vf={0: (8, 8)}), vf=1, gpu=1) == (Certainty.UNKNOWN, set())


@pytest.mark.parametrize("policy", ALIGNING)
def test_a_kubelet_that_aligns_takes_the_lowest_numa_node_with_enough_of_all(policy: str) -> None:
    found = devices(policy, vf={0: (8, 8), 1: (8, 8), 2: (8, 8)}, gpu={0: (2, 0), 1: (2, 1), 2: (2, 2)})
    assert predicted(found, vf=1) == (Certainty.PREDICTED, {0})
    assert predicted(found, vf=1, gpu=1) == (Certainty.PREDICTED, {1})
    assert predicted(found, vf=1, gpu=2) == (Certainty.PREDICTED, {2})


def test_more_devices_than_a_numa_node_has_come_from_the_fewest_lowest_nodes() -> None:
    gpu = {0: (2, 1), 1: (2, 2), 2: (2, 2), 3: (2, 2)}
    assert predicted(devices("best-effort", gpu=gpu), gpu=4) == (Certainty.PREDICTED, {1, 2})
    assert predicted(devices("restricted", gpu=gpu), gpu=4) == (Certainty.PREDICTED, {1, 2})
    assert predicted(devices("single-numa-node", gpu=gpu), gpu=4) == (Certainty.REJECTED, {0, 1, 2, 3})


def test_devices_that_cannot_be_aligned_are_anywhere_or_fail_the_pod() -> None:
    apart = {"vf": {0: (8, 1), 1: (8, 0)}, "gpu": {0: (2, 0), 1: (2, 2)}}
    assert predicted(devices("best-effort", **apart), vf=1, gpu=1) == (Certainty.PREDICTED, {0, 1})
    assert predicted(devices("restricted", **apart), vf=1, gpu=1) == (Certainty.REJECTED, {0, 1})
    wide = {0: (2, 1), 1: (2, 1), 2: (2, 1)}
    assert predicted(devices("best-effort", gpu=wide), gpu=2) == (Certainty.UNKNOWN, {0, 1, 2})
    on_one_node_each = {"vf": {0: (8, 8)}, "gpu": {1: (2, 2)}}
    assert predicted(devices("restricted", **on_one_node_each), vf=1, gpu=1) == (Certainty.REJECTED, {0, 1})
    assert predicted(devices("none", **on_one_node_each), vf=1, gpu=1) == (Certainty.CERTAIN, {0, 1})


def test_without_alignment_any_numa_node_with_a_free_device_is_possible() -> None:
    vf = {0: (8, 2), 1: (8, 0), 2: (8, 1)}
    assert predicted(devices(vf=vf), vf=1) == (Certainty.UNKNOWN, {0, 2})
    assert predicted(devices(vf=vf), vf=3) == (Certainty.PREDICTED, {0, 2})
    assert predicted(devices(vf={0: (8, 0), 1: (8, 3)}), vf=1) == (Certainty.PREDICTED, {1})
    assert predicted(devices(vf={0: (8, 0), 1: (8, 0)}), vf=1) == (Certainty.UNKNOWN, {0, 1})


def left(found: NodeDevices, *requests: dict[ResourceName, int]) -> list[tuple[int, int]]:
    """The free devices by NUMA node after pods with these requests."""
    for requested in requests:
        held = predicted_held(found, requested)
        after = found.without(held)
        assert after.returned(held) == found
        found = after
    return [(one.node, one.free) for one in found.counts]


def test_pods_take_the_devices_that_are_predicted_for_them() -> None:
    found = devices("best-effort", vf={0: (2, 2), 1: (4, 4)})
    assert left(found, {VF: 2}, {VF: 1}) == [(0, 0), (1, 3)]
    most_free = left(devices("none", vf={0: (2, 2), 1: (4, 4)}), {VF: 1})
    assert most_free == [(0, 2), (1, 3)], "of all that are possible, where most are free"
    assert left(found, {VF: 100}, {GPU: 1}) == [(0, 0), (1, 0)]
    assert predicted_held(None, {VF: 1}) == {}


def test_devices_without_a_node_are_taken_last() -> None:
    assert left(devices("best-effort", vf={NO_NUMA: (9, 9), 1: (1, 1)}), {VF: 2}) == [(-1, 8), (1, 0)]


def test_too_few_devices_are_refused_with_the_numbers() -> None:
    found = devices("best-effort", vf={0: (2, 1), 1: (4, 1)})
    assert too_few_devices(found, {VF: 2}) is None
    assert too_few_devices(None, {VF: 2}) is None
    refusal = too_few_devices(found, {VF: 3})
    assert refusal is not None
    assert (refusal.message, refusal.missing, refusal.never) == (
        f"no 3 free {VF} on the machine, best 2",
        1,
        False,
    )
    assert too_few_devices(found, {VF: 7}).never  # type: ignore[union-attr]
    assert too_few_devices(found, {GPU: 1}).never  # type: ignore[union-attr]
