"""`kvplace get`: VMs and nodes of a live cluster, with their cores; `kvplace top`: how full it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import click
from click.shell_completion import CompletionItem

from kvplace.cli.cluster_flags import ClusterFlags, cluster_flags, complete_node, complete_vm
from kvplace.cli.output import Listing, Output, print_answer, say, table_of
from kvplace.cli.parameters import Answer, Words, output_option
from kvplace.core.errors import ExitCode
from kvplace.core.quantity import counted
from kvplace.core.request import Level
from kvplace.core.scalars import NodeName
from kvplace.core.strict_json import did_you_mean

if TYPE_CHECKING:
    from kvplace.cli.live_cluster import LiveCluster
    from kvplace.nodes.cluster_view import NodeView, VmState, VmView

T = TypeVar("T")
GATHER_S = 0.2
"""Changes that follow each other so quickly are printed together."""
_VM_WORDS, _NODE_WORDS = ("vms", "vm", "vmis", "vmi"), ("nodes", "node")
_VM_ORDERS = ("name", "state", "node", "age", "cpus")
_TOP_VM_ORDERS = ("cpus", "memory", "name")
_TOP_NODE_ORDERS = ("name", "used", "free", "fragmentation", "vms")


def _complete_name(context: click.Context, argument: click.Parameter, begun: str) -> list[CompletionItem]:
    complete = complete_node if context.params.get("what") in _NODE_WORDS else complete_vm
    return complete(context, argument, begun)


def _complete_state(_context: click.Context, _option: click.Parameter, begun: str) -> list[CompletionItem]:
    from kvplace.nodes.cluster_view import VmState

    return [CompletionItem(state.value) for state in VmState if state.value.lower().startswith(begun.lower())]


def _read_state(text: str) -> VmState:
    from kvplace.nodes.cluster_view import VmState

    states = {state.value.lower(): state for state in VmState}
    if text.lower() not in states:
        names = [state.value for state in VmState]
        raise click.BadParameter(f"{text!r} is not one of {', '.join(names)}{did_you_mean(text, names)}")
    return states[text.lower()]


@click.command("get", short_help="List the VMs or nodes of a cluster with their cores.")
@click.argument("what", type=Words([*_VM_WORDS, *_NODE_WORDS]), metavar="vms|nodes")
@click.argument("names", metavar="[NAME]...", nargs=-1, shell_complete=_complete_name)
@click.option(
    "--state",
    "states",
    metavar="STATE",
    multiple=True,
    callback=lambda _context, _option, values: tuple(map(_read_state, values)),
    shell_complete=_complete_state,
    help="Only VMs in this state, for example NotPinned. May be repeated.",
)
@click.option("--sort-by", "order", type=Words(_VM_ORDERS), help="Order of the VMs (default: name).")
@click.option("-w", "--watch", is_flag=True, help="Print changes until Ctrl-C.")
@click.option("--no-headers", is_flag=True, help="Print the table without its header.")
@output_option(Answer.LIST)
@cluster_flags()
def command(
    *,
    what: str,
    names: tuple[str, ...],
    states: tuple[VmState, ...],
    order: str | None,
    watch: bool,
    no_headers: bool,
    output: Output,
    flags: ClusterFlags,
) -> int:
    """List VMs or nodes as they are now.

    VMs are the opted-in virtual machines, with or without a pod, and pods, in one namespace, or in all with
    -A. The state is Pinned when every thread has been read back on its cores; the phase is KubeVirt's.
    Without the right to list virtual machines only pods are shown.

    For nodes: the status as kubectl prints it, the CPUs that are reserved, owned by one VM, shared by several
    and free, and the largest number of free CPUs inside one NUMA node.
    """
    headers = not no_headers
    if what in _VM_WORDS:
        wanted = _WantedRows(names, states, order or "name")
        return flags.run(lambda live: _get_vms(live, wanted, output, headers=headers, watch=watch))
    if states or order:
        raise click.UsageError("--state and --sort-by are for VMs; `top nodes --sort-by` sorts nodes")
    return flags.run(lambda live: _get_nodes(live, names, output, headers=headers, watch=watch))


@dataclass(frozen=True, slots=True)
class _WantedRows:
    """The VMs that a user wants to see, and their order."""

    names: tuple[str, ...]
    states: tuple[VmState, ...]
    order: str

    def of(self, vms: Iterable[VmView]) -> list[VmView]:
        """Choose among VMs that are ordered by name, and order them."""
        chosen = (
            vm
            for vm in vms
            if (not self.names or vm.name in self.names or vm.pod.name in self.names)
            and (not self.states or vm.state in self.states)
        )
        return sorted(chosen, key=_VM_KEYS[self.order])


def _cpus(vm: VmView) -> int:
    return vm.placement.placement.cpus.bit_count() if vm.placement else 0


_VM_KEYS: Mapping[str, Callable[[VmView], str | int]] = {
    "name": lambda vm: 0,
    "state": lambda vm: vm.state.value,
    "node": lambda vm: vm.node,
    # Creation times of one form, so the text has the order of the time.
    "age": lambda vm: vm.pod.created,
    "cpus": lambda vm: -_cpus(vm),
    "memory": lambda vm: -vm.request.request.memory if vm.request else 0,
}
"""Keys that sort VMs: the oldest and the largest first, equal ones by name."""


async def _get_vms(
    live: LiveCluster, wanted: _WantedRows, output: Output, *, headers: bool, watch: bool
) -> int:
    from kvplace.cli.view_tables import vm_columns, vm_reference
    from kvplace.nodes.cluster_reading import read_listed_vms, watch_listed_vms
    from kvplace.nodes.view_output import VM_KIND, vm_view_document

    columns = vm_columns(lambda: live.session.server_time, with_namespace=not live.namespace)
    listing = Listing(VM_KIND, columns, vm_view_document, vm_reference, output, headers=headers)
    if watch:
        async for listed in watch_listed_vms(live.api, live.vms, gather_s=GATHER_S):
            say(*listed.notes)
            listing.print_seen(wanted.of(listed.vms), is_first=listed.is_first)
    listed = await read_listed_vms(live.api, live.vms)
    say(*listed.notes)
    where = f"namespace {live.namespace}" if live.namespace else "the cluster"
    return _print(
        listing,
        wanted.of(listed.vms),
        wanted.names,
        [vm.name for vm in listed.vms] + [vm.pod.name for vm in listed.vms],
        f"VM that requests cores in {where}"
        + (f" in state {' or '.join(state.value for state in wanted.states)}" if wanted.states else ""),
    )


async def _get_nodes(
    live: LiveCluster, names: tuple[str, ...], output: Output, *, headers: bool, watch: bool
) -> int:
    from kvplace.cli.view_tables import NODE_COLUMNS
    from kvplace.kube.watches import NODE_STATUSES, NODES, Selector
    from kvplace.nodes.cluster_reading import read_cluster, read_node, watched_nodes
    from kvplace.nodes.view_output import NODE_KIND, node_view_document

    listing = Listing(NODE_KIND, NODE_COLUMNS, node_view_document, _node_reference, output, headers=headers)
    selector = Selector(label_terms=live.label_terms)
    if watch:
        async for is_first, nodes in watched_nodes(live.api, selector, gather_s=GATHER_S):
            listing.print_seen(_named(nodes, names), is_first=is_first)
    if len(names) != 1 or live.label_terms:
        view = await read_cluster(live.api, nodes=selector, pods=None, kind=NODE_STATUSES)
        return _print(listing, _named(view.nodes.values(), names), names, view.nodes, "node")
    view = await read_node(live.api, NodeName(names[0]), pods=False, kind=NODE_STATUSES)
    known = view.nodes or [node.name for node in await live.api.read_all(NODES)]
    return _print(listing, list(view.nodes.values()), names, known, "node")


def _named(nodes: Iterable[NodeView], names: tuple[str, ...]) -> list[NodeView]:
    return [node for node in nodes if not names or node.name in names]


def _node_reference(node: NodeView) -> str:
    return f"node/{node.name}"


def _print(
    listing: Listing[T], found: Sequence[T], names: tuple[str, ...], known: Iterable[str], what: str
) -> int:
    """Print the objects, and state the names that do not exist."""
    known = list(known)
    missing = [name for name in names if name not in known]
    if found or not names:
        listing.print_all(found, one=len(names) == len(found) == 1)
    kind, gap, limits = what.partition(" ")
    for name in missing:
        say(f"there is no {kind} called {name!r}{gap}{limits}{did_you_mean(name, known)}")
    if not found and not names:
        say(f"there is no {what}")
    return ExitCode.FAILED if missing else ExitCode.DONE


@click.command("top", short_help="Show how full and fragmented a cluster is, or its largest VMs.")
@click.argument("what", type=Words([*_NODE_WORDS, *_VM_WORDS]), metavar="nodes|vms", default="nodes")
@click.option(
    "--sort-by",
    type=Words(dict.fromkeys((*_TOP_NODE_ORDERS, *_TOP_VM_ORDERS))),
    help=f"For nodes: {', '.join(_TOP_NODE_ORDERS)} (default: name); for vms: {', '.join(_TOP_VM_ORDERS)} "
    "(default: cpus).",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="NUMBER", help="Number of rows.")
@output_option(Answer.LIST)
@cluster_flags()
def top(*, what: str, sort_by: str | None, limit: int | None, output: Output, flags: ClusterFlags) -> None:
    """Show how full the nodes are, or the largest VMs.

    FRAGMENTED compares the largest free block inside a NUMA node with the block that the free CPUs of the
    node could form: 0 % if they are equal. For nodes, a summary of the cluster follows.
    """
    show, orders = (_top_nodes, _TOP_NODE_ORDERS) if what in _NODE_WORDS else (_top_vms, _TOP_VM_ORDERS)
    if sort_by is not None and sort_by not in orders:
        raise click.UsageError(f"{what} cannot be sorted by {sort_by}, only by {', '.join(orders)}")
    flags.run(lambda live: show(live, sort_by or orders[0], limit, output))


async def _top_nodes(live: LiveCluster, order: str, limit: int | None, output: Output) -> None:
    from kvplace.cli.view_tables import TOP_NODE_COLUMNS, cluster_summary, top_document
    from kvplace.kube.watches import Selector
    from kvplace.nodes.cluster_reading import read_cluster

    view = await read_cluster(live.api, nodes=Selector(label_terms=live.label_terms), pods=None)
    nodes = sorted(view.nodes.values(), key=lambda node: (_node_key(node, order), node.name))

    def lines() -> Iterator[str]:
        if nodes:
            yield from table_of(TOP_NODE_COLUMNS, nodes[:limit], wide=output is Output.WIDE)
            _say_hidden(len(nodes), limit, "node")
            yield ""
            yield from (f"{title:<14}{sentence}" for title, sentence in cluster_summary(view))
        else:
            say("there is no node")

    print_answer(
        output, lambda: top_document(view, nodes[:limit]), lines(), map(_node_reference, nodes[:limit])
    )


async def _top_vms(live: LiveCluster, order: str, limit: int | None, output: Output) -> None:
    from kvplace.cli.view_tables import NAMESPACE, TOP_VM_COLUMNS, vm_reference
    from kvplace.nodes.cluster_reading import read_listed_vms
    from kvplace.nodes.view_output import VM_KIND, vm_view_document

    listed = await read_listed_vms(live.api, live.vms)
    say(*listed.notes)
    # A VM without a pod holds nothing, nor does a pod that has ended: a migration leaves one for long.
    vms = sorted((vm for vm in listed.vms if vm.has_pod and not vm.is_over), key=_VM_KEYS[order])
    columns = (*((NAMESPACE,) if not live.namespace else ()), *TOP_VM_COLUMNS)
    Listing(VM_KIND, columns, vm_view_document, vm_reference, output).print_all(vms[:limit])
    if output in (Output.TABLE, Output.WIDE):
        if not vms:
            say(f"there is no VM that requests cores in {live.namespace or 'the cluster'}")
        _say_hidden(len(vms), limit, "VM")


def _say_hidden(rows: int, limit: int | None, noun: str) -> None:
    if limit is not None and rows > limit:
        say(f"{counted(rows - limit, f'more {noun}')} not shown")


def _node_key(node: NodeView, order: str) -> str | float:
    blocks = node.free_blocks
    match order:
        case "used":
            return blocks.free - blocks.allocatable if blocks else 0
        case "free":
            return -blocks.free if blocks else 0
        case "fragmentation":
            return -blocks.largest[Level.NUMA].fragmentation if blocks else 0
        case "vms":
            return -len(node.ledger.claims)
        case _:
            return node.name
