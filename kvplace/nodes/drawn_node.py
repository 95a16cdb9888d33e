"""The core map of a node of the cluster: its ledger, and where agents have found threads that strayed."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from kvplace.core.drawing.core_map import CoreMap, draw
from kvplace.core.placement import Placement
from kvplace.core.scalars import NO_CPUS, CpuMask, PodUid
from kvplace.kube.object_records import PodReport
from kvplace.nodes.cluster_view import NodeView, VmView, with_devices
from kvplace.nodes.node_machine import Unusable


def draw_node(node: NodeView, vms: Iterable[VmView]) -> CoreMap | None:
    """Draw a node with these of its VMs; None where no machine is known."""
    if isinstance(node.machine, Unusable):
        return None
    found: dict[PodUid, CpuMask] = {}
    placements: dict[PodUid, Placement] = {}
    vms = tuple(vms)
    for vm in vms:
        if vm.placement is not None:
            placements[vm.pod.uid] = vm.placement.placement
        strays = _found(vm, node.reports.get(vm.pod.uid))
        if strays is not None:
            found[vm.pod.uid] = strays
    foreign = NO_CPUS if node.described is None else node.described.kubelet_cpus
    return draw(
        node.name,
        node.machine.topology,
        node.ledger,
        foreign=foreign,
        found=found,
        placements=placements,
        counts=() if node.devices is None else node.devices.counts,
        devices={vm.pod.uid: vm.devices for vm in map(partial(with_devices, node=node), vms) if vm.devices},
    )


def _found(vm: VmView, report: PodReport | None) -> CpuMask | None:
    """Where the threads of a VM may really run, as far as that is not where they were placed.

    Its agent reports the CPUs of all threads together. QEMU's own may run outside of the claim, in the shared
    pool; and while a VM gets other cores it has old and new ones.
    """
    if report is None or report.pinned or not report.running or not report.cpus:
        return None
    if vm.claim is None or vm.claim.relocation is not None:
        return None
    elsewhere = NO_CPUS
    if vm.placement is not None:
        elsewhere = vm.placement.placement.emulator_cpus
        for cpus in vm.placement.placement.io_thread_cpus:
            elsewhere |= cpus
    return CpuMask(report.cpus & ~(elsewhere & ~vm.claim.cpus))
