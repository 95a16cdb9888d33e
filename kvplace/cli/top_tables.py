"""Rows and sentences of `kvplace top`: what is used, what is free, and how scattered that is."""

from __future__ import annotations

from collections.abc import Iterable

from kvplace.cli.view_tables import NOTHING, cpu_list, free_huge_pages, free_memory
from kvplace.core.free_blocks import Domain
from kvplace.core.node_topology import API_VERSION
from kvplace.core.quantity import counted, format_bytes
from kvplace.core.strict_json import Json
from kvplace.nodes.cluster_view import ClusterView, NodeView, VmView
from kvplace.nodes.view_documents import free_blocks_document

NODE_HEADS = ("NODE", "VMS", "CPUS", "USED", "FREE", "SOCKET", "NUMA", "L3", "FRAGMENTED", "MEMORY-FREE")
WIDE_NODE_HEADS = (*NODE_HEADS, "HUGEPAGES-FREE", "FREE-CPUS", "PROBLEM")
VM_HEADS = ("NAME", "NODE", "CPUS", "OWNED", "MEMORY", "HUGEPAGES", "SOCKETS", "NUMA", "L3", "STATE")
_UNITS = {Domain.SOCKET: "socket", Domain.NUMA: "NUMA node", Domain.L3: "L3 cache"}
_WORDS = {Domain.SOCKET: "a socket", Domain.NUMA: "a NUMA node", Domain.L3: "an L3 cache"}


def node_row(node: NodeView, *, wide: bool) -> tuple[str, ...]:
    """Give the cells of a node; SOCKET, NUMA and L3 are the free CPUs of the largest block in one of them."""
    free_blocks = node.free_blocks
    if free_blocks is None:
        cells = (node.name, str(len(node.ledger.claims)), *[NOTHING] * (len(NODE_HEADS) - 2))
    else:
        used = free_blocks.allocatable - free_blocks.free
        cells = (
            node.name,
            str(len(node.ledger.claims)),
            str(free_blocks.allocatable),
            percent(used, free_blocks.allocatable),
            str(free_blocks.free),
            *(str(free_blocks.largest[domain].cpus) for domain in Domain),
            f"{free_blocks.largest[Domain.NUMA].fragmentation:.0%}",
            free_memory(node.snapshot),
        )
    if not wide:
        return cells
    return (*cells, free_huge_pages(node.snapshot), cpu_list(node.free), node.problem or NOTHING)


def vm_row(vm: VmView, *, with_namespace: bool) -> tuple[str, ...]:
    """Give the cells of a VM; SOCKETS, NUMA and L3 state over how many of them it is spread."""
    request = None if vm.request is None else vm.request.request
    placed = None if vm.placement is None else vm.placement.placement
    pages = request.huge_pages.items() if request else ()
    return (
        *((vm.namespace,) if with_namespace else ()),
        vm.name,
        vm.node or NOTHING,
        str(placed.cpus.bit_count()) if placed else NOTHING,
        str(placed.owned.bit_count()) if placed else NOTHING,
        format_bytes(request.memory) if request and request.memory else NOTHING,
        ",".join(f"{count}x{format_bytes(size)}" for size, count in pages) or NOTHING,
        *(
            (str(len(placed.packages)), str(len(placed.numa_nodes)), str(len(placed.l3_groups)))
            if placed
            else (NOTHING, NOTHING, NOTHING)
        ),
        vm.state.value,
    )


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
                f"{counted(totals.largest_cpus(domain), 'CPU')} in {_WORDS[domain]}" for domain in Domain
            ),
        ),
        (
            "fragmented",
            ", ".join(f"{totals.fragmentation(domain):.0%} by {_UNITS[domain]}" for domain in Domain),
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
                for domain in Domain
            },
        },
        "nodes": [_node_document(node) for node in nodes],
    }


def percent(part: int, whole: int) -> str:
    """Write a share; `-` of nothing."""
    return f"{part / whole:.0%}" if whole else NOTHING


def _in_use(view: ClusterView) -> tuple[int, int]:
    """CPUs that have an owner, and that are shared, on the nodes that can be used."""
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
