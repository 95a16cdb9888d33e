"""The NUMA node of an allocated device, from the surest source that has one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from kvplace.core.node_devices import DeviceReport, NodeDevices
from kvplace.core.scalars import NodeName, NumaId
from kvplace.kube.object_records import DeviceRequest, ResourceClaimRecord, SliceRecord
from kvplace.kube.resource_claims import DRA_READERS, RESOURCE_CLAIM, driver_of, resource_claim_record
from kvplace.kube.watches import RESOURCE_CLAIMS, SLICES, Apply, Delete
from kvplace.nodes.dra_devices import DraDevices, numa_node_of
from tests.nodes.machines import TWO

N1 = NodeName("n1")
STANDARD = "resource.kubernetes.io/"
REPORT = DeviceReport(NodeDevices(), pci={"0000:c1": NumaId(1), "pci0000:00": NumaId(0)})


def slice_of(
    *devices: Mapping[str, Any],
    name: str = "s",
    driver: str = "gpu.example.com",
    generation: int = 1,
    node: str = "n1",
) -> SliceRecord:
    document = {
        "metadata": {"name": name},
        "spec": {
            "driver": driver,
            "nodeName": node,
            "pool": {"name": "n1", "generation": generation, "resourceSliceCount": 1},
            "devices": devices,
        },
    }
    record = DRA_READERS[SLICES].record(msgspec.Raw(json.dumps(document).encode()))
    assert isinstance(record, SliceRecord)
    return record


def device(name: str, **attributes: Any) -> dict[str, Any]:
    return {"name": name, "attributes": attributes}


def with_attributes(attributes: Mapping[str, Any], driver: str = "gpu.example.com") -> NumaId | None:
    (found,) = slice_of({"name": "d", "attributes": attributes}, driver=driver).devices
    return numa_node_of(found, TWO, REPORT)


@pytest.mark.parametrize(
    "attributes",
    [
        {f"{STANDARD}numaNode": {"int": 1}},
        {f"{STANDARD}numaNode": {"ints": [1, 0]}},
        {"numa": {"int": 1}},
        {"numaNode": {"int": 1}},
        {"numaNodeID": {"int": 1}},
        {"gpu.example.com/numa": {"int": 1}},
        {"dra.net/numaNode": {"int": 1}},
        {f"{STANDARD}pciBusID": {"string": "0000:C1:00.1"}},
        {f"{STANDARD}pciBusID": {"string": "0000:c1:00.1"}, f"{STANDARD}numaNode": {"int": 0}},
        {f"{STANDARD}pcieRoot": {"string": "pci0000:99"}, "numa": {"int": 1}},
    ],
)
def test_names_of_all_known_drivers_are_read_and_the_nodes_own_map_is_surer(
    attributes: Mapping[str, Any],
) -> None:
    assert with_attributes(attributes) == 1


def test_the_pcie_root_counts_more_than_the_attribute_of_the_driver() -> None:
    attributes = {f"{STANDARD}pcieRoot": {"string": "pci0000:00"}, f"{STANDARD}numaNode": {"int": 1}}
    assert with_attributes(attributes) == 0


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {f"{STANDARD}numaNode": {"int": -1}},
        {"dra.net/numaNode": {"int": -1}},
        {f"{STANDARD}numaNode": {"int": 64}},
        {f"{STANDARD}numaNode": {"string": "1"}},
        {f"{STANDARD}numaNode": {"ints": []}},
        {f"{STANDARD}pciBusID": {"string": ""}},
        {"model": {"string": "x"}, "other.example.com/numa": {"int": 1}},
    ],
)
def test_a_device_whose_attributes_are_missing_or_senseless_has_no_known_node(
    attributes: Mapping[str, Any],
) -> None:
    assert with_attributes(attributes) is None


def test_of_contradicting_attributes_the_standard_one_counts() -> None:
    assert with_attributes({"numa": {"int": 0}, f"{STANDARD}numaNode": {"int": 1}}) == 1


def allocated_to(name: str, *devices: str) -> ResourceClaimRecord:
    return ResourceClaimRecord("default", name, (), tuple(("gpu.example.com", "n1", one) for one in devices))


def known(*slices: SliceRecord) -> DraDevices:
    devices = DraDevices()
    for one in slices:
        devices.slices.apply(Apply(one))
    return devices


GPUS = [device(f"gpu{number}", numaNode={"int": number % 2}) for number in range(4)]


def test_free_devices_are_those_of_no_resource_claim() -> None:
    devices = known(slice_of(*GPUS))

    def free() -> frozenset[NumaId | None]:
        return devices.free_numa_nodes(N1, TWO, "gpu.example.com", None)

    assert free() == {0, 1}
    first, second = allocated_to("a", "gpu1", "gpu3"), allocated_to("b", "gpu0")
    devices.claims.apply(Apply(first))
    assert free() == {0}
    devices.claims.apply(Apply(second))
    assert free() == {0}
    devices.claims.apply(Delete(first))
    assert free() == {0, 1}


def test_the_first_free_devices_are_predicted() -> None:
    nics = [device(f"nic{number}", numaNode={"int": 1}) for number in range(2)]
    devices = known(slice_of(*GPUS), slice_of(*nics, name="nics", driver="nic.example.com"))

    def first(**wanted: int) -> frozenset[NumaId]:
        return devices.first_free(N1, TWO, {f"{name}.example.com": one for name, one in wanted.items()}, None)

    assert first(gpu=1) == {0}
    assert first(gpu=2) == {0}
    assert first(gpu=1, nic=1) == {1}, "as with matchAttribute"
    assert first(gpu=3, nic=1) == {0, 1}, "no NUMA node has all of them"
    assert first(disk=1) == frozenset()
    devices.claims.apply(Apply(allocated_to("a", "gpu0", "gpu2")))
    assert first(gpu=1) == {1}
    unknown = slice_of(device("gpu9"), name="0-first")
    devices.slices.apply(Apply(unknown))
    assert first(gpu=1) == {1}


def test_a_device_for_several_resource_claims_stays_free() -> None:
    devices = known(slice_of({**GPUS[0], "allowMultipleAllocations": True}))
    devices.claims.apply(Apply(allocated_to("a", "gpu0")))
    assert devices.free_numa_nodes(N1, TWO, "gpu.example.com", None) == {0}
    assert devices.first_free(N1, TWO, {"gpu.example.com": 1}, None) == {0}


def test_slices_of_an_older_generation_of_their_pool_do_not_count() -> None:
    old, new = slice_of(GPUS[0], name="old"), slice_of(GPUS[1], name="new", generation=2)
    devices = known(old, new)
    assert devices.free_numa_nodes(N1, TWO, "gpu.example.com", None) == {1}
    devices.slices.apply(Delete(new))
    assert devices.free_numa_nodes(N1, TWO, "gpu.example.com", None) == {0}


def test_the_nodes_of_hundreds_of_allocated_devices_are_found_and_vanished_ones_constrain_nothing() -> None:
    parts = [[device(f"gpu{part}-{number}", numa={"int": 1}) for number in range(100)] for part in range(4)]
    devices = known(*(slice_of(*part, name=str(number)) for number, part in enumerate(parts)))
    keys = [("gpu.example.com", "n1", f"gpu{part}-{number}") for part in range(4) for number in range(100)]
    assert devices.numa_nodes(N1, TWO, [*keys, ("gpu.example.com", "n1", "gone")], None) == {1}
    assert devices.numa_nodes(NodeName("n2"), TWO, keys, None) == frozenset()


def test_slices_that_are_gone_are_forgotten() -> None:
    devices = known(one := slice_of(*GPUS))
    devices.claims.apply(Apply(allocated := allocated_to("a", "gpu1")))
    devices.slices.apply(Delete(one))
    devices.claims.apply(Delete(allocated))
    assert not devices._slices_on
    assert not devices._generations
    assert not devices._in_use


@pytest.mark.parametrize(
    ("expression", "driver"),
    [
        ('device.driver == "gpu.example.com"', "gpu.example.com"),
        ("device.driver=='dra.cpu' && device.attributes['dra.cpu'].numCPUs >= 4", "dra.cpu"),
        ('device.driver == "a" || device.driver == "b"', ""),
        ('device.driver == "a" || true', ""),
        ('!(device.driver == "a")', ""),
        ('device.attributes["x"].y == "z"', ""),
        ("", ""),
    ],
)
def test_the_driver_of_a_class_is_known_only_where_the_selector_demands_one(
    expression: str, driver: str
) -> None:
    assert driver_of(expression) == driver


def test_a_resource_claim_is_read_with_its_devices() -> None:
    document = {
        "metadata": {"namespace": "shop", "name": "io"},
        "spec": {
            "devices": {
                "requests": [
                    {"name": "gpu", "exactly": {"deviceClassName": "gpu", "count": 2}},
                    {"name": "all", "exactly": {"deviceClassName": "nic", "allocationMode": "All"}},
                    {"name": "either", "firstAvailable": [{"name": "x", "deviceClassName": "gpu"}]},
                ]
            }
        },
        "status": {
            "allocation": {
                "devices": {"results": [{"request": "gpu", "driver": "d", "pool": "p", "device": "gpu0"}]}
            }
        },
    }
    claim = resource_claim_record(RESOURCE_CLAIM.decode(json.dumps(document)))
    assert RESOURCE_CLAIMS.key(claim) == ("shop", "io")
    assert claim.requests == (DeviceRequest("gpu", 2),)
    assert claim.allocated == (("d", "p", "gpu0"),)


@pytest.mark.parametrize(
    ("capacity", "cpus"),
    [
        ({"requests": {"dra.cpu/cpu": "6"}}, 6),
        ({"requests": {"dra.cpu/cpu": "1500m"}}, None),
        ({"requests": {"dra.cpu/cpu": "many"}}, None),
        ({"requests": {"other.example.com/cpu": "6"}}, None),
        ({"requests": None}, None),
        (None, None),
    ],
)
def test_a_resource_claim_is_read_with_the_number_of_its_cpus(
    capacity: dict[str, Any] | None, cpus: int | None
) -> None:
    exactly = {"deviceClassName": "dra.cpu", "capacity": capacity}
    document = {
        "metadata": {"namespace": "shop", "name": "cpus"},
        "spec": {"devices": {"requests": [{"name": "cpus", "exactly": exactly}]}},
    }
    claim = resource_claim_record(RESOURCE_CLAIM.decode(json.dumps(document)))
    assert claim.requests == (DeviceRequest("dra.cpu", 1, cpus),)
