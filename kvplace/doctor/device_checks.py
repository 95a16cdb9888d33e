"""Checks of the devices that agents report: settings that keep `kvplace.io/device-numa` from working well."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from kvplace.core.node_devices import NO_NUMA, DeviceCount, DeviceReport, TopologyPolicy
from kvplace.core.scalars import NodeName, NumaId, ResourceName
from kvplace.doctor.installation import Finding, Installation, name_nodes, warning

_LOWEST = NumaId(0)


def check_devices(found: Installation) -> Iterator[Finding]:
    """Check the nodes with several NUMA nodes: on others every device is local."""
    reports = {
        view.name: view.described.devices
        for view in found.view.nodes.values()
        if view.exists and view.described is not None and view.described.devices is not None
        if (topology := view.described.topology) is not None and len(topology.numa_nodes) > 1
    }
    checks = (_any_device, _pods_that_fail, _without_node, _wrong_node)
    for check in checks:
        yield from check(reports)


def _with_policy(
    reports: Mapping[NodeName, DeviceReport], is_meant: Callable[[TopologyPolicy], bool]
) -> dict[NodeName, set[ResourceName]]:
    """Find the nodes with such a policy that have devices of one resource on several NUMA nodes."""
    return {
        name: resources
        for name, report in reports.items()
        if is_meant(report.devices.policy) and (resources := _on_several(report))
    }


def _any_device(reports: Mapping[NodeName, DeviceReport]) -> Iterator[Finding]:
    nodes = _with_policy(reports, lambda policy: not policy.aligns)
    if nodes:
        yield warning(
            name_nodes(nodes),
            f"{_named(nodes)} has devices on several NUMA nodes, and the kubelet takes any free one "
            "(topologyManagerPolicy none): VMs with kvplace.io/device-numa: required are refused",
            "set topologyManagerPolicy: best-effort; leave cpuManagerPolicy and memoryManagerPolicy at none",
        )


def _pods_that_fail(reports: Mapping[NodeName, DeviceReport]) -> Iterator[Finding]:
    nodes = _with_policy(reports, lambda policy: policy.rejects)
    if nodes:
        yield warning(
            name_nodes(nodes),
            f"{_named(nodes)} has devices on several NUMA nodes, and the kubelet fails the pod of a VM if it "
            "cannot align them (topologyManagerPolicy restricted or single-numa-node)",
            "set topologyManagerPolicy: best-effort",
        )


def _without_node(reports: Mapping[NodeName, DeviceReport]) -> Iterator[Finding]:
    nodes = {
        name: resources
        for name, report in reports.items()
        if (resources := {one.resource for one in report.devices.counts if one.node == NO_NUMA})
    }
    if nodes:
        yield warning(
            name_nodes(nodes),
            f"{_named(nodes)} has devices without a NUMA node: they do not count when cores are chosen",
            "let the firmware state the NUMA node of each PCI root, and the device plugin send it "
            "(sriov-network-device-plugin: excludeTopology: false)",
        )


def _wrong_node(reports: Mapping[NodeName, DeviceReport]) -> Iterator[Finding]:
    """Find plugins that send NUMA node 0 although they do not know it, or it is another."""
    nodes = {name: resources for name, report in reports.items() if (resources := _sent_as_node_0(report))}
    if nodes:
        yield warning(
            name_nodes(nodes),
            f"the device plugin of {_named(nodes)} sends NUMA node 0, which sysfs does not confirm",
            "some plugins send 0 where the firmware states no NUMA node: correct the firmware or the plugin, "
            "or set kvplace.io/device-numa: off",
        )


def _sent_as_node_0(report: DeviceReport) -> set[ResourceName]:
    elsewhere = {
        device.resource
        for devices in report.pods.values()
        for device in devices
        if device.node == _LOWEST and report.node_of_address(device.address) not in (_LOWEST, NO_NUMA)
    }
    if report.pci:
        return elsewhere
    # sysfs has no NUMA node for any PCI device, so no plugin can know that all of its devices are on node 0.
    return {one.resource for one in report.devices.counts if one.node == _LOWEST}


def _on_several(report: DeviceReport) -> set[ResourceName]:
    counts: dict[ResourceName, list[DeviceCount]] = {}
    for one in report.devices.counts:
        if one.node != NO_NUMA and one.total:
            counts.setdefault(one.resource, []).append(one)
    return {resource for resource, by_node in counts.items() if len(by_node) > 1}


def _named(nodes: Mapping[NodeName, set[ResourceName]]) -> str:
    return ", ".join(sorted({resource for resources in nodes.values() for resource in resources}))
