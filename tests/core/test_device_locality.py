"""A device is local where its NUMA node is one of the cores'; with `socket`, where its package is."""

from __future__ import annotations

import pytest

from kvplace.core.allocator.allocate import place
from kvplace.core.device_locality import device_phrases, located
from kvplace.core.free import free_of
from kvplace.core.ledger import Ledger
from kvplace.core.node_devices import NO_NUMA, PodDevice
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


def test_equal_devices_are_counted(on_node_0: Placement) -> None:
    devices = [device(0), device(3, GPU), device(0), device(NO_NUMA)]
    assert device_phrases(located(devices, on_node_0, MACHINE, DeviceNuma.PREFERRED)) == (
        "2 intel.com/vf on NUMA 0 (local)",
        "1 intel.com/vf on no known NUMA node",
        "1 nvidia.com/gpu on NUMA 3 (not local)",
    )
