"""Nodes and VMs of a live cluster as rows of cells; the columns of `wide` follow those of `table`."""

from __future__ import annotations

from datetime import datetime

from kvplace.core.cpuset import format_cpu_list
from kvplace.core.free_blocks import Domain
from kvplace.core.quantity import format_bytes
from kvplace.core.scalars import CpuMask
from kvplace.kube.conditions import Condition
from kvplace.nodes.cluster_view import NodeView, VmView
from kvplace.nodes.node_machine import NodeSnapshot, Unusable

NODE_HEADS = (
    "NAME",
    "STATUS",
    "CPUS",
    "RESERVED",
    "OWNED",
    "SHARED",
    "FREE",
    "LARGEST-NUMA",
    "VMS",
    "PROBLEM",
)
WIDE_NODE_HEADS = (
    *NODE_HEADS,
    "LARGEST-SOCKET",
    "LARGEST-L3",
    "MEMORY-FREE",
    "HUGEPAGES-FREE",
    "AGENT",
    "FREE-CPUS",
)
VM_HEADS = ("NAME", "STATE", "PHASE", "NODE", "POLICY", "CPUS", "NUMA", "AGE")
WIDE_VM_HEADS = (*VM_HEADS, "SCOPE", "SOCKET", "EMULATOR", "MEMORY", "REVISION", "POD", "RESERVED", "PINNED")
NOTHING = "-"


def node_row(node: NodeView, *, wide: bool) -> tuple[str, ...]:
    """Give the cells of a node; what cannot be known of one that cannot be used is `-`."""
    free_blocks = {} if node.free_blocks is None else node.free_blocks.largest
    cells = (
        node.name,
        node.status or NOTHING,
        *(
            str(cpus.bit_count()) if node.cpus else NOTHING
            for cpus in (node.cpus, node.reserved, node.owned, node.shared, node.free)
        ),
        str(free_blocks[Domain.NUMA].cpus) if free_blocks else NOTHING,
        str(len(node.ledger.claims)),
        node.problem or NOTHING,
    )
    if not wide:
        return cells
    return (
        *cells,
        str(free_blocks[Domain.SOCKET].cpus) if free_blocks else NOTHING,
        str(free_blocks[Domain.L3].cpus) if free_blocks else NOTHING,
        free_memory(node.snapshot),
        free_huge_pages(node.snapshot),
        NOTHING if node.described is None else node.described.enforcement.value,
        cpu_list(node.free),
    )


def vm_row(vm: VmView, now: datetime, *, wide: bool, with_namespace: bool) -> tuple[str, ...]:
    """Give the cells of a VM; one without a node has no CPUs yet."""
    request = None if vm.request is None else vm.request.request
    placed = None if vm.placement is None else vm.placement.placement
    cells = (
        *((vm.namespace,) if with_namespace else ()),
        vm.name,
        vm.state.value,
        vm.phase or NOTHING,
        vm.node or NOTHING,
        placed.policy.value if placed else vm.options.policy.value if vm.options else NOTHING,
        cpu_list(placed.cpus) if placed else NOTHING,
        _numbers(placed.numa_nodes) if placed else NOTHING,
        age(vm.pod.created, now),
    )
    if not wide:
        return cells
    return (
        *cells,
        vm.options.scope.value if vm.options else NOTHING,
        _numbers(placed.packages) if placed else NOTHING,
        cpu_list(placed.emulator_cpus) if placed else NOTHING,
        format_bytes(request.memory) if request and request.memory else NOTHING,
        str(vm.placement.revision) if vm.placement else NOTHING,
        vm.pod.name or NOTHING,
        _reserved(vm),
        measured(vm.pinned) if vm.pinned else NOTHING,
    )


def measured(condition: Condition) -> str:
    """Write what the agent has measured; where a VM is not pinned, its reason first: docs list its action."""
    if condition.status or not condition.message:
        return condition.message or condition.reason
    return f"{condition.reason}: {condition.message}"


def _reserved(vm: VmView) -> str:
    """Write the CPUs that running VMs make free for one that waits, and those of them that are still used."""
    if not vm.reserved_on or vm.claim is None or vm.claim.reserved is None:
        return NOTHING
    still = f", {format_cpu_list(vm.claim.still_in_use)} still used" if vm.claim.still_in_use else ""
    return f"{vm.reserved_on}: {cpu_list(vm.claim.reserved.owned)}{still}"


def vm_reference(vm: VmView) -> str:
    """Name a VM as `kubectl` takes it: resource/name."""
    if vm.kubevirt is not None and not vm.kubevirt.is_instance:
        return f"virtualmachine.kubevirt.io/{vm.name}"
    return f"virtualmachineinstance.kubevirt.io/{vm.name}" if vm.is_vmi else f"pod/{vm.name}"


def cpu_list(cpus: CpuMask) -> str:
    """Write a CPU list; `-` for none."""
    return format_cpu_list(cpus) or NOTHING


def free_memory(snapshot: NodeSnapshot | Unusable) -> str:
    """Write the memory outside huge pages that no VM claims, of all NUMA nodes together."""
    if isinstance(snapshot, Unusable) or not snapshot.free.memory:
        return NOTHING
    return f"{sum(max(0, count) for _, count in snapshot.free.memory) / 2**30:.0f}Gi"


def free_huge_pages(snapshot: NodeSnapshot | Unusable) -> str:
    """Write the free huge pages of each size, of all NUMA nodes together."""
    if isinstance(snapshot, Unusable):
        return NOTHING
    sizes: dict[int, int] = {}
    for _, size, count in snapshot.free.huge_pages:
        sizes[size] = sizes.get(size, 0) + count
    return ",".join(f"{count}x{format_bytes(size)}" for size, count in sorted(sizes.items())) or NOTHING


def age(created: str, now: datetime) -> str:
    """Write how long ago something was, as kubectl does: in one unit, and the next one while it is small."""
    try:
        seconds = int((now - datetime.fromisoformat(created)).total_seconds())
    except (ValueError, TypeError):
        return NOTHING
    seconds = max(0, seconds)
    for unit, size, small, (next_unit, next_size) in _UNITS:
        if seconds >= 2 * size:
            count, rest = divmod(seconds, size)
            rest //= next_size
            return f"{count}{unit}{rest}{next_unit}" if count < small and rest else f"{count}{unit}"
    return f"{seconds}s"


_UNITS = (
    ("y", 365 * 86400, 8, ("d", 86400)),
    ("d", 86400, 8, ("h", 3600)),
    ("h", 3600, 8, ("m", 60)),
    ("m", 60, 10, ("s", 1)),
)


def _numbers(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers)) or NOTHING
