"""`kvplace top`: how full and how fragmented the nodes of a live cluster are, and its largest VMs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import click

from kvplace.cli.cluster_flags import cluster_flags
from kvplace.cli.output import Output, print_document, print_line, print_table, say
from kvplace.cli.parameters import Answer, ClusterFlags, Words, output_option
from kvplace.core.errors import ExitCode

if TYPE_CHECKING:
    from kvplace.cli.live_cluster import LiveCluster
    from kvplace.nodes.cluster_view import NodeView, VmView

_WORDS = ("nodes", "node", "vms", "vm")
_NODE_ORDERS = ("name", "used", "free", "fragmentation", "vms")
_VM_ORDERS = ("cpus", "memory", "name")


@click.command("top", short_help="Show how full and fragmented a cluster is, or its largest VMs.")
@click.argument("what", type=Words(_WORDS), metavar="nodes|vms", default="nodes")
@click.option(
    "--sort-by",
    type=Words(dict.fromkeys((*_NODE_ORDERS, *_VM_ORDERS))),
    help=f"For nodes: {', '.join(_NODE_ORDERS)} (default: name); for vms: {', '.join(_VM_ORDERS)} "
    "(default: cpus).",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="NUMBER", help="Number of rows.")
@output_option(Answer.LIST)
@cluster_flags()
def command(*, what: str, sort_by: str | None, limit: int | None, output: Output, flags: ClusterFlags) -> int:
    """Show how full the nodes are, or the largest VMs.

    FRAGMENTED compares the largest free block inside a NUMA node with the block that the free CPUs of the
    node could form: 0 % if they are equal. For nodes, a summary of the cluster follows.
    """
    from kvplace.cli.live_cluster import run_with_cluster

    nodes = what.startswith("node")
    orders = _NODE_ORDERS if nodes else _VM_ORDERS
    if sort_by is not None and sort_by not in orders:
        raise click.UsageError(f"{what} cannot be sorted by {sort_by}, only by {', '.join(orders)}")
    body = _top_nodes if nodes else _top_vms
    return run_with_cluster(flags, lambda live: body(live, sort_by or orders[0], limit, output))


async def _top_nodes(live: LiveCluster, order: str, limit: int | None, output: Output) -> int:
    from kvplace.cli.output import chosen_columns, rows_of
    from kvplace.cli.view_tables import TOP_NODE_COLUMNS, cluster_summary, top_document
    from kvplace.core.quantity import counted
    from kvplace.kube.watches import Selector
    from kvplace.nodes.cluster_reading import read_cluster

    view = await read_cluster(live.api, nodes=Selector(label_terms=live.flags.selector), pods=None)
    nodes = sorted(view.nodes.values(), key=_node_keys()[order])
    shown = nodes[:limit]
    if output.is_document:
        print_document(top_document(view, shown), output)
        return ExitCode.DONE
    if output is Output.NAME:
        for node in shown:
            click.echo(f"node/{node.name}")
        return ExitCode.DONE
    if not nodes:
        say("there is no node")
        return ExitCode.DONE
    print_table(rows_of(chosen_columns(TOP_NODE_COLUMNS, wide=output is Output.WIDE), shown))
    if len(shown) < len(nodes):
        say(f"{counted(len(nodes) - len(shown), 'more node')} not shown")
    print_line()
    for title, sentence in cluster_summary(view):
        print_line(f"{title:<14}{sentence}")
    return ExitCode.DONE


async def _top_vms(live: LiveCluster, order: str, limit: int | None, output: Output) -> int:
    from kvplace.cli.output import rows_of
    from kvplace.cli.view_tables import NAMESPACE, TOP_VM_COLUMNS, vm_reference
    from kvplace.core.quantity import counted
    from kvplace.nodes.view_documents import VM_KIND, list_document, vm_document
    from kvplace.nodes.vm_listing import read_listed_vms

    listed = await read_listed_vms(live.api, live.vms)
    for note in listed.notes:
        say(note)
    # A VM without a pod holds nothing, nor does a pod that has ended: a migration leaves one for long.
    vms = sorted((vm for vm in listed.vms if vm.has_pod and not vm.is_over), key=_vm_keys()[order])
    shown = vms[:limit]
    if output.is_document:
        print_document(list_document(VM_KIND, map(vm_document, shown)), output)
        return ExitCode.DONE
    if output is Output.NAME:
        for vm in shown:
            click.echo(vm_reference(vm))
        return ExitCode.DONE
    if not vms:
        say(f"there is no VM that requests cores in {live.namespace or 'the cluster'}")
        return ExitCode.DONE
    print_table(rows_of((*((NAMESPACE,) if live.flags.all_namespaces else ()), *TOP_VM_COLUMNS), shown))
    if len(shown) < len(vms):
        say(f"{counted(len(vms) - len(shown), 'more VM')} not shown")
    return ExitCode.DONE


def _node_keys() -> Mapping[str, Callable[[NodeView], tuple[object, ...]]]:
    from kvplace.core.free_resources import Domain

    def free_blocks(node: NodeView) -> tuple[int, int, float]:
        if node.free_blocks is None:
            return 0, 0, 0.0
        numa = node.free_blocks.largest[Domain.NUMA]
        return node.free_blocks.allocatable, node.free_blocks.free, numa.fragmentation

    return {
        "name": lambda node: (node.name,),
        "used": lambda node: (free_blocks(node)[1] - free_blocks(node)[0], node.name),
        "free": lambda node: (-free_blocks(node)[1], node.name),
        "fragmentation": lambda node: (-free_blocks(node)[2], node.name),
        "vms": lambda node: (-len(node.ledger.claims), node.name),
    }


def _vm_keys() -> Mapping[str, Callable[[VmView], tuple[object, ...]]]:
    def cpus(vm: VmView) -> int:
        return vm.placement.placement.cpus.bit_count() if vm.placement else 0

    def memory(vm: VmView) -> int:
        return vm.request.request.memory if vm.request else 0

    return {
        "cpus": lambda vm: (-cpus(vm), vm.namespace, vm.name),
        "memory": lambda vm: (-memory(vm), vm.namespace, vm.name),
        "name": lambda vm: (vm.namespace, vm.name),
    }
