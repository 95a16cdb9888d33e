"""Nodes and VMs of a live cluster in columns: of `get`, of `top` with its summary, and of the map.

The map has a line for each node, and in it a mark for each core or for a few of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import TextIO

from kvplace.cli.output import Column, Output, console, document_text, number_list, table_of
from kvplace.core.cpuset import format_cpu_list, union
from kvplace.core.device_locality import device_phrases
from kvplace.core.drawing.core_map_json import KIND, core_map_document
from kvplace.core.free_resources import BLOCK_LEVELS, FreeBlocks
from kvplace.core.node_topology import API_VERSION
from kvplace.core.placement import Placement
from kvplace.core.quantity import counted, format_bytes
from kvplace.core.request import Level
from kvplace.core.scalars import CpuMask
from kvplace.core.strict_json import Json
from kvplace.core.topology import Topology
from kvplace.kube.object_records import Condition
from kvplace.nodes.cluster_view import ClusterView, NodeView, VmView
from kvplace.nodes.node_machine import NodeSnapshot, Unusable
from kvplace.nodes.view_output import draw_node, free_blocks_document, list_document

NOTHING = "-"


def _placed(cell: Callable[[Placement], str]) -> Callable[[VmView], str]:
    """Write a part of the placement; `-` for a VM without one."""
    return lambda vm: cell(vm.placement.placement) if vm.placement is not None else NOTHING


def _of_blocks(cell: Callable[[FreeBlocks], str]) -> Callable[[NodeView], str]:
    """Write a part of the free CPUs; `-` of a node that cannot hold VMs."""
    return lambda node: NOTHING if node.free_blocks is None else cell(node.free_blocks)


def _free_in(domain: Level) -> Callable[[NodeView], str]:
    return _of_blocks(lambda blocks: str(blocks.largest[domain].cpus))


def _count(cpus_of: Callable[[NodeView], CpuMask]) -> Callable[[NodeView], str]:
    """Count CPUs; `-` where the machine is not known."""
    return lambda node: str(cpus_of(node).bit_count()) if node.cpus else NOTHING


NODE_COLUMNS: tuple[Column[NodeView], ...] = (
    Column("NAME", lambda node: node.name),
    Column("STATUS", lambda node: node.status or NOTHING),
    Column("CPUS", _count(lambda node: node.cpus)),
    Column("RESERVED", _count(lambda node: node.reserved)),
    Column("OWNED", _count(lambda node: node.owned)),
    Column("SHARED", _count(lambda node: node.shared)),
    Column("FREE", _count(lambda node: node.free)),
    Column("LARGEST-NUMA", _free_in(Level.NUMA)),
    Column("VMS", lambda node: str(len(node.ledger.claims))),
    Column("PROBLEM", lambda node: node.problem or NOTHING),
    Column("LARGEST-SOCKET", _free_in(Level.SOCKET), wide=True),
    Column("LARGEST-L3", _free_in(Level.L3), wide=True),
    Column("MEMORY-FREE", lambda node: free_memory(node.snapshot), wide=True),
    Column("HUGEPAGES-FREE", lambda node: free_huge_pages(node.snapshot), wide=True),
    Column(
        "AGENT",
        lambda node: NOTHING if node.described is None else node.described.enforcement.value,
        wide=True,
    ),
    Column(
        "DEVICES-FREE",
        lambda node: NOTHING if node.devices is None else node.devices.phrase or NOTHING,
        wide=True,
    ),
    Column("FREE-CPUS", lambda node: cpu_list(node.free), wide=True),
)
"""Columns of `get nodes`; an unusable node has `-` for unknown values."""


NAMESPACE: Column[VmView] = Column("NAMESPACE", lambda vm: vm.namespace)


def vm_columns(now: Callable[[], datetime], *, with_namespace: bool) -> tuple[Column[VmView], ...]:
    """Give the columns of `get vms`; `now` is the time of the cluster."""
    return (
        *((NAMESPACE,) if with_namespace else ()),
        Column("NAME", lambda vm: vm.name),
        Column("STATE", lambda vm: vm.state.value),
        Column("PHASE", lambda vm: vm.phase or NOTHING),
        Column("NODE", lambda vm: vm.node or NOTHING),
        Column("POLICY", _policy),
        Column("CPUS", _placed(lambda placement: cpu_list(placement.cpus))),
        Column("NUMA", _placed(lambda placement: number_list(placement.numa_nodes))),
        Column("AGE", lambda vm: age(vm.pod.created, now())),
        Column("SCOPE", lambda vm: vm.options.scope.value if vm.options else NOTHING, wide=True),
        Column("SOCKET", _placed(lambda placement: number_list(placement.packages)), wide=True),
        Column("EMULATOR", _placed(lambda placement: cpu_list(placement.emulator_cpus)), wide=True),
        Column("MEMORY", requested_memory, wide=True),
        Column("REVISION", lambda vm: str(vm.placement.revision) if vm.placement else NOTHING, wide=True),
        Column("DEVICES", _devices, wide=True),
        Column("POD", lambda vm: vm.pod.name or NOTHING, wide=True),
        Column("RESERVED", _reserved, wide=True),
        Column("PINNED", lambda vm: measured(vm.pinned) if vm.pinned else NOTHING, wide=True),
    )


def _devices(vm: VmView) -> str:
    """Write the devices of a VM and whether they are local; the requested devices before the report."""
    if vm.devices is not None:
        return ", ".join(device_phrases(vm.devices)) or NOTHING
    wanted = {} if vm.request is None else vm.request.request.devices
    parts = (f"{count} {resource} (not reported)" for resource, count in sorted(wanted.items()))
    return ", ".join(parts) or NOTHING


def _policy(vm: VmView) -> str:
    if vm.placement is not None:
        return vm.placement.placement.policy.value
    return vm.options.policy.value if vm.options else NOTHING


def requested_memory(vm: VmView) -> str:
    """Write the memory that a VM requests; `-` where that is not known."""
    request = None if vm.request is None else vm.request.request
    return format_bytes(request.memory) if request and request.memory else NOTHING


def measured(condition: Condition) -> str:
    """Write the agent's measurement; if the VM is not pinned, after the reason: docs list its action."""
    if condition.status or not condition.message:
        return condition.message or condition.reason
    return f"{condition.reason}: {condition.message}"


def _reserved(vm: VmView) -> str:
    """Write the CPUs that running VMs release for a waiting one, and the part that is still in use."""
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


_DOMAINS = {Level.SOCKET: "socket", Level.NUMA: "NUMA node", Level.L3: "L3 cache"}
_WORDS = {Level.SOCKET: "a socket", Level.NUMA: "a NUMA node", Level.L3: "an L3 cache"}


TOP_NODE_COLUMNS: tuple[Column[NodeView], ...] = (
    Column("NODE", lambda node: node.name),
    Column("VMS", lambda node: str(len(node.ledger.claims))),
    Column("CPUS", _of_blocks(lambda blocks: str(blocks.allocatable))),
    Column("USED", _of_blocks(lambda blocks: percent(blocks.allocatable - blocks.free, blocks.allocatable))),
    Column("FREE", _of_blocks(lambda blocks: str(blocks.free))),
    Column("SOCKET", _free_in(Level.SOCKET)),
    Column("NUMA", _free_in(Level.NUMA)),
    Column("L3", _free_in(Level.L3)),
    Column("FRAGMENTED", _of_blocks(lambda blocks: f"{blocks.largest[Level.NUMA].fragmentation:.0%}")),
    Column("MEMORY-FREE", lambda node: free_memory(node.snapshot)),
    Column("HUGEPAGES-FREE", lambda node: free_huge_pages(node.snapshot), wide=True),
    Column("FREE-CPUS", lambda node: cpu_list(node.free), wide=True),
    Column("PROBLEM", lambda node: node.problem or NOTHING, wide=True),
)


def _pages(vm: VmView) -> str:
    pages = () if vm.request is None else vm.request.request.huge_pages.items()
    return ",".join(f"{count}x{format_bytes(size)}" for size, count in pages) or NOTHING


TOP_VM_COLUMNS: tuple[Column[VmView], ...] = (
    Column("NAME", lambda vm: vm.name),
    Column("NODE", lambda vm: vm.node or NOTHING),
    Column("CPUS", _placed(lambda placement: str(placement.cpus.bit_count()))),
    Column("OWNED", _placed(lambda placement: str(placement.owned.bit_count()))),
    Column("MEMORY", requested_memory),
    Column("HUGEPAGES", _pages),
    Column("SOCKETS", _placed(lambda placement: str(len(placement.packages)))),
    Column("NUMA", _placed(lambda placement: str(len(placement.numa_nodes)))),
    Column("L3", _placed(lambda placement: str(len(placement.l3_groups)))),
    Column("STATE", lambda vm: vm.state.value),
)
"""SOCKETS, NUMA and L3 state over how many of them a VM is spread."""


def cluster_summary(view: ClusterView) -> list[tuple[str, str]]:
    """Give titled sentences about all nodes together."""
    totals = view.totals
    unusable = len(view.nodes) - totals.nodes
    owned, shared = _in_use(view)
    owned_part, shared_part = percent(owned, totals.allocatable), percent(shared, totals.allocatable)
    free_part = percent(totals.free, totals.allocatable)
    lines = [
        (
            "nodes",
            counted(len(view.nodes), "node") + (f", {unusable} of them cannot hold VMs" if unusable else ""),
        ),
        (
            "CPUs",
            f"{totals.allocatable:,} for VMs: {owned_part} owned, {shared_part} shared, {free_part} free",
        ),
        (
            "largest free",
            ", ".join(
                f"{counted(totals.largest_cpus(domain), 'CPU')} in {_WORDS[domain]}"
                for domain in BLOCK_LEVELS
            ),
        ),
        (
            "fragmented",
            ", ".join(f"{totals.fragmentation(domain):.0%} by {_DOMAINS[domain]}" for domain in BLOCK_LEVELS),
        ),
    ]
    problem = next((f"{name}: {node.problem}" for name, node in view.nodes.items() if node.problem), "")
    return [*lines, ("problem", problem)] if problem else lines


def top_document(view: ClusterView, nodes: Iterable[NodeView]) -> Json:
    """Write the rows, and the sums over all nodes."""
    totals = view.totals
    owned, shared = _in_use(view)
    return {
        "apiVersion": API_VERSION,
        "kind": "ClusterUsage",
        "cluster": {
            "nodes": len(view.nodes),
            "usable": totals.nodes,
            "cpus": totals.allocatable,
            "owned": owned,
            "shared": shared,
            "free": totals.free,
            "largestFree": {
                domain.value: {
                    "cpus": totals.largest_cpus(domain),
                    "cores": totals.largest_cores(domain),
                    "fragmentation": round(totals.fragmentation(domain), 4),
                }
                for domain in BLOCK_LEVELS
            },
        },
        "nodes": [_node_document(node) for node in nodes],
    }


def percent(part: int, whole: int) -> str:
    """Write a share; `-` of nothing."""
    return f"{part / whole:.0%}" if whole else NOTHING


def _in_use(view: ClusterView) -> tuple[int, int]:
    """Count the owned and the shared CPUs of the usable nodes."""
    usable = [node for node in view.nodes.values() if node.free_blocks is not None]
    return sum(node.owned.bit_count() for node in usable), sum(node.shared.bit_count() for node in usable)


def _node_document(node: NodeView) -> Json:
    document: Json = {"name": node.name, "vms": len(node.ledger.claims), "problem": node.problem}
    if node.free_blocks is not None:
        document |= {
            "cpus": node.free_blocks.allocatable,
            "owned": node.owned.bit_count(),
            "shared": node.shared.bit_count(),
            "free": node.free_blocks.free,
            "largestFree": free_blocks_document(node.free_blocks),
        }
    return document


MAP_KEY = "# nothing free   : partly free   . all free   | between sockets, blanks between NUMA nodes"
_MOST_MARKS = 48
_FREE, _PARTLY, _FULL = ".:#"


def draw_cluster(view: ClusterView, form: Output, file: TextIO) -> None:
    """Draw all nodes: in `table` a line for each, the other forms a core map for each."""
    if form is Output.TABLE:
        lines = table_of(MAP_COLUMNS, view.nodes.values())
        file.write("\n".join(lines) + f"\n\n{MAP_KEY}\n")
        return
    drawings = [drawing for node in view.nodes.values() if (drawing := draw_node(node, ())) is not None]
    if form.is_document:
        document = list_document(KIND, map(core_map_document, drawings))
        file.write(document_text(document, form))
        return
    from kvplace.cli.terminal_map import print_map

    for drawing in drawings:
        print_map(console(file), drawing)
        file.write("\n")


def strip(topology: Topology, free: CpuMask) -> str:
    """Draw the cores of a machine in one line, in the order of sockets, NUMA nodes and L3 caches.

    On large machines a mark stands for several cores of one L3 cache.
    """
    each = -(-len(topology.cores) // _MOST_MARKS)
    return "|".join(
        " ".join(filter(None, _numa_strips(topology, package.cpus, free, each)))
        for package in topology.packages
    )


def _numa_strips(topology: Topology, cpus: CpuMask, free: CpuMask, each: int) -> Iterator[str]:
    for node in topology.numa_nodes:
        marks = ""
        for l3 in topology.l3_groups:
            cores = [CpuMask(core & cpus) for core in topology.cores_in(CpuMask(l3 & node.cpus & cpus))]
            for start in range(0, len(cores), each):
                marks += _mark(union(cores[start : start + each]), free)
        yield marks


def _mark(cpus: CpuMask, free: CpuMask) -> str:
    if not cpus & free:
        return _FULL
    return _FREE if cpus & free == cpus else _PARTLY


def _cores(node: NodeView) -> str:
    """Draw the cores of a node, or state why nothing can be placed there."""
    if isinstance(node.snapshot, Unusable):
        return node.problem
    return strip(node.snapshot.machine.topology, node.free)


MAP_COLUMNS: tuple[Column[NodeView], ...] = (
    Column("NODE", lambda node: node.name),
    Column("VMS", lambda node: str(len(node.ledger.claims))),
    Column("FREE", lambda node: NOTHING if node.problem else str(node.free.bit_count())),
    Column("LARGEST-NUMA", _free_in(Level.NUMA)),
    Column("CORES", _cores),
)
