"""Columns and sentences of `kvplace top`: what is used, what is free, and how scattered that is."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvplace.cli.listing import Column
from kvplace.cli.view_tables import NOTHING, cpu_list, free_huge_pages, free_memory, requested_memory
from kvplace.core.free_blocks import Domain, FreeBlocks
from kvplace.core.node_topology import API_VERSION
from kvplace.core.placement import Placement
from kvplace.core.quantity import counted, format_bytes
from kvplace.core.strict_json import Json
from kvplace.nodes.cluster_view import ClusterView, NodeView, VmView
from kvplace.nodes.view_documents import free_blocks_document

_UNITS = {Domain.SOCKET: "socket", Domain.NUMA: "NUMA node", Domain.L3: "L3 cache"}
_WORDS = {Domain.SOCKET: "a socket", Domain.NUMA: "a NUMA node", Domain.L3: "an L3 cache"}


def _of_blocks(cell: Callable[[FreeBlocks], str]) -> Callable[[NodeView], str]:
    """Write a part of the free CPUs; `-` of a node that cannot hold VMs."""
    return lambda node: NOTHING if node.free_blocks is None else cell(node.free_blocks)


def _free_in(domain: Domain) -> Callable[[NodeView], str]:
    """Write the free CPUs of the largest block in a domain."""
    return _of_blocks(lambda blocks: str(blocks.largest[domain].cpus))


NODE_COLUMNS: tuple[Column[NodeView], ...] = (
    Column("NODE", lambda node: node.name),
    Column("VMS", lambda node: str(len(node.ledger.claims))),
    Column("CPUS", _of_blocks(lambda blocks: str(blocks.allocatable))),
    Column("USED", _of_blocks(lambda blocks: percent(blocks.allocatable - blocks.free, blocks.allocatable))),
    Column("FREE", _of_blocks(lambda blocks: str(blocks.free))),
    Column("SOCKET", _free_in(Domain.SOCKET)),
    Column("NUMA", _free_in(Domain.NUMA)),
    Column("L3", _free_in(Domain.L3)),
    Column("FRAGMENTED", _of_blocks(lambda blocks: f"{blocks.largest[Domain.NUMA].fragmentation:.0%}")),
    Column("MEMORY-FREE", lambda node: free_memory(node.snapshot)),
    Column("HUGEPAGES-FREE", lambda node: free_huge_pages(node.snapshot), wide=True),
    Column("FREE-CPUS", lambda node: cpu_list(node.free), wide=True),
    Column("PROBLEM", lambda node: node.problem or NOTHING, wide=True),
)


def _placed(cell: Callable[[Placement], str]) -> Callable[[VmView], str]:
    return lambda vm: cell(vm.placement.placement) if vm.placement is not None else NOTHING


def _pages(vm: VmView) -> str:
    pages = () if vm.request is None else vm.request.request.huge_pages.items()
    return ",".join(f"{count}x{format_bytes(size)}" for size, count in pages) or NOTHING


VM_COLUMNS: tuple[Column[VmView], ...] = (
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
