"""`kvplace get`: the VMs and nodes of a live cluster, with their cores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

import click
from click.shell_completion import CompletionItem

from kvplace.cli.cluster_flags import cluster_flags, complete_node, complete_vm
from kvplace.cli.output import Output, say
from kvplace.cli.parameters import Answer, ClusterFlags, Words, output_option
from kvplace.core.errors import ExitCode
from kvplace.core.scalars import NodeName

if TYPE_CHECKING:
    from kvplace.cli.live_cluster import LiveCluster
    from kvplace.cli.output import Listing
    from kvplace.kube.watches import Selector
    from kvplace.nodes.cluster_view import NodeView, VmState, VmView

T = TypeVar("T")
GATHER_S = 0.2
"""Changes that follow each other so quickly are printed together."""


class What(Enum):
    """The kinds that can be listed."""

    VMS = "vms"
    NODES = "nodes"


_WORDS = {
    **dict.fromkeys(("vms", "vm", "vmis", "vmi"), What.VMS),
    **dict.fromkeys(("nodes", "node"), What.NODES),
}
_ORDERS = ("name", "state", "node", "age", "cpus")


def _complete_name(context: click.Context, argument: click.Parameter, begun: str) -> list[CompletionItem]:
    of_nodes = _WORDS.get(context.params.get("what", ""), What.VMS) is What.NODES
    return (complete_node if of_nodes else complete_vm)(context, argument, begun)


def _complete_state(_context: click.Context, _option: click.Parameter, begun: str) -> list[CompletionItem]:
    from kvplace.nodes.cluster_view import VmState

    return [CompletionItem(state.value) for state in VmState if state.value.lower().startswith(begun.lower())]


def _read_state(text: str) -> VmState:
    from kvplace.core.strict_json import did_you_mean
    from kvplace.nodes.cluster_view import VmState

    states = {state.value.lower(): state for state in VmState}
    if text.lower() not in states:
        names = [state.value for state in VmState]
        raise click.BadParameter(f"{text!r} is not one of {', '.join(names)}{did_you_mean(text, names)}")
    return states[text.lower()]


@click.command("get", short_help="List the VMs or nodes of a cluster with their cores.")
@click.argument("what", type=Words(list(_WORDS)), metavar="vms|nodes")
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
@click.option("--sort-by", "order", type=Words(_ORDERS), help="Order of the VMs (default: name).")
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
    from kvplace.cli.live_cluster import run_with_cluster

    headers = not no_headers
    if _WORDS[what] is What.VMS:
        wanted = _WantedRows(names, states, order or "name")
        return run_with_cluster(
            flags, lambda live: _get_vms(live, wanted, output, headers=headers, watch=watch)
        )
    if states or order:
        raise click.UsageError("--state and --sort-by are for VMs; `top nodes --sort-by` sorts nodes")
    return run_with_cluster(flags, lambda live: _get_nodes(live, names, output, headers=headers, watch=watch))


@dataclass(frozen=True, slots=True)
class _WantedRows:
    """Which VMs a user wants to see, and their order."""

    names: tuple[str, ...]
    states: tuple[VmState, ...]
    order: str

    def of(self, vms: Iterable[VmView]) -> list[VmView]:
        """Choose among VMs that are ordered by name, and order them."""
        chosen = [
            vm
            for vm in vms
            if (not self.names or vm.name in self.names or vm.pod.name in self.names)
            and (not self.states or vm.state in self.states)
        ]
        return chosen if self.order == "name" else sorted(chosen, key=_KEYS[self.order])


def _cpus(vm: VmView) -> int:
    return vm.placement.placement.cpus.bit_count() if vm.placement else 0


_KEYS: dict[str, Callable[[VmView], str | int]] = {
    "state": lambda vm: vm.state.value,
    "node": lambda vm: vm.node,
    # Creation times of one form, so the text has the order of the time.
    "age": lambda vm: vm.pod.created,
    "cpus": lambda vm: -_cpus(vm),
}
"""What orders VMs; equal ones stay in the order of their names. The oldest and the largest come first."""


async def _get_vms(
    live: LiveCluster, wanted: _WantedRows, output: Output, *, headers: bool, watch: bool
) -> int:
    from kvplace.cli.output import Listing, Printed, chosen_columns
    from kvplace.cli.view_tables import vm_columns, vm_reference
    from kvplace.nodes.view_documents import VM_KIND, vm_document
    from kvplace.nodes.vm_listing import read_listed_vms

    columns = vm_columns(lambda: live.session.server_time, with_namespace=live.flags.all_namespaces)
    printed = Printed(VM_KIND, chosen_columns(columns, wide=output is Output.WIDE), vm_document, vm_reference)
    listing = Listing(printed, output, headers=headers)

    if watch:
        await _watch_vms(live, listing, wanted)
    listed = await read_listed_vms(live.api, live.vms)
    found = listed.vms
    for note in listed.notes:
        say(note)
    where = f"namespace {live.namespace}" if live.namespace else "the cluster"
    return _print(
        listing,
        wanted.of(found),
        wanted.names,
        [vm.name for vm in found] + [vm.pod.name for vm in found],
        f"VM that requests cores in {where}"
        + (f" in state {' or '.join(state.value for state in wanted.states)}" if wanted.states else ""),
    )


async def _watch_vms(live: LiveCluster, listing: Listing[VmView], wanted: _WantedRows) -> None:
    from kvplace.nodes.vm_listing import watch_listed_vms

    async for listed in watch_listed_vms(live.api, live.vms, gather_s=GATHER_S):
        for note in listed.notes:
            say(note)
        chosen = wanted.of(listed.vms)
        if listed.is_first:
            listing.print_all(chosen)
        else:
            listing.print_changed(chosen)


async def _get_nodes(
    live: LiveCluster, names: tuple[str, ...], output: Output, *, headers: bool, watch: bool
) -> int:
    from kvplace.cli.output import Listing, Printed, chosen_columns
    from kvplace.cli.view_tables import NODE_COLUMNS
    from kvplace.kube.watches import NODE_STATUSES, NODES, Selector
    from kvplace.nodes.cluster_reading import read_cluster, read_node
    from kvplace.nodes.view_documents import NODE_KIND, node_document

    columns = chosen_columns(NODE_COLUMNS, wide=output is Output.WIDE)
    printed = Printed(NODE_KIND, columns, node_document, lambda node: f"node/{node.name}")
    listing = Listing(printed, output, headers=headers)
    selector = Selector(label_terms=live.flags.selector)
    if watch:
        await _watch_nodes(live, listing, names, selector)
    if len(names) != 1 or live.flags.selector:
        view = await read_cluster(live.api, nodes=selector, pods=None, kind=NODE_STATUSES)
        return _print(listing, _named(view.nodes.values(), names), names, view.nodes, "node")
    view = await read_node(live.api, NodeName(names[0]), pods=False, kind=NODE_STATUSES)
    known = view.nodes or [node.name for node in await live.api.read_all(NODES)]
    return _print(listing, list(view.nodes.values()), names, known, "node")


async def _watch_nodes(
    live: LiveCluster, listing: Listing[NodeView], names: tuple[str, ...], selector: Selector
) -> None:
    from kvplace.nodes.cluster_reading import watched_nodes

    async for first, nodes in watched_nodes(live.api, selector, gather_s=GATHER_S):
        chosen = _named(nodes, names)
        if first:
            listing.print_all(chosen)
        else:
            listing.print_changed(chosen)


def _named(nodes: Iterable[NodeView], names: tuple[str, ...]) -> list[NodeView]:
    return [node for node in nodes if not names or node.name in names]


def _print(
    listing: Listing[T], found: Sequence[T], names: tuple[str, ...], known: Iterable[str], what: str
) -> int:
    """Print the objects, and state the names that do not exist."""
    from kvplace.core.strict_json import did_you_mean

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
