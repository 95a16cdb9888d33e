"""Warnings about devices, for each setting that calls for one and for none that does not."""

from __future__ import annotations

from dataclasses import replace

from kvplace.core.node_devices import (
    NO_NUMA,
    DeviceCount,
    DeviceReport,
    NodeDevices,
    PodDevice,
    TopologyPolicy,
)
from kvplace.core.scalars import NumaId, PodUid, ResourceName
from kvplace.doctor.node_checks import check_devices
from tests.doctor.examples import problems, view
from tests.nodes.machines import EIGHT

VF = ResourceName("intel.com/vf")
PCI = {"0000:01": NumaId(0), "0000:c1": NumaId(1)}


def report(*nodes: int, policy: str = "best-effort") -> DeviceReport:
    counts = [DeviceCount(VF, NumaId(node), 4, 4) for node in nodes]
    return DeviceReport(NodeDevices.of(counts, TopologyPolicy(policy)), {}, PCI)


def found(devices: DeviceReport) -> list[str]:
    return problems(check_devices, **view(devices=devices))


def test_a_kubelet_that_aligns_devices_is_fine() -> None:
    assert found(report(0, 1)) == []
    assert found(report(1, policy="none")) == []
    assert found(report(1, policy="restricted")) == []
    assert problems(check_devices, **view()) == []


def test_a_kubelet_that_takes_any_device_makes_required_impossible() -> None:
    (one,) = found(report(0, 1, policy="none"))
    assert "intel.com/vf has devices on several NUMA nodes" in one
    assert "topologyManagerPolicy none" in one


def test_a_kubelet_that_fails_pods_is_named() -> None:
    for policy in ("restricted", "single-numa-node"):
        (one,) = found(report(0, 1, policy=policy))
        assert "fails the pod of a VM" in one


def test_devices_without_a_numa_node_are_named_on_machines_with_several() -> None:
    (one,) = found(report(NO_NUMA))
    assert "intel.com/vf has devices without a NUMA node" in one
    assert problems(check_devices, **view(devices=report(NO_NUMA), topology=EIGHT)) == []


def test_a_plugin_that_sends_0_for_a_device_elsewhere_is_named() -> None:
    given = {PodUid("u1"): (PodDevice(VF, NumaId(0), "0000:c1:00.1"),)}
    (one,) = found(replace(report(0), pods=given))
    assert "sends NUMA node 0, which sysfs does not confirm" in one
    assert found(replace(report(0), pods={PodUid("u1"): (PodDevice(VF, NumaId(0), "0000:01:00.1"),)})) == []


def test_a_plugin_that_sends_0_where_the_firmware_states_nothing_is_named() -> None:
    (one,) = found(replace(report(0), pci={}))
    assert "sends NUMA node 0" in one
