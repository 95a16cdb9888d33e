"""`kvplace map`: the cores of a machine, drawn with the VMs that hold them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click
from click.shell_completion import CompletionItem

from kvplace.cli.cluster_flags import ClusterFlags, cluster_flags, complete_drawn
from kvplace.cli.output import Output, console, document_text, say
from kvplace.cli.parameters import (
    InputFile,
    chosen_machine,
    cpu_manager_state_option,
    machine_argument,
    names_and_files,
    read_cpus,
)
from kvplace.core.errors import Absent, BadBody, KvplaceError
from kvplace.core.ledger import Ledger
from kvplace.core.scalars import NO_CPUS, CpuMask, NodeName, PodUid
from kvplace.core.strict_json import did_you_mean, near_word

if TYPE_CHECKING:
    from kvplace.cli.claims_by_node import ClaimsByNode, NodeClaims
    from kvplace.core.drawing.core_map import CoreMap

_WIDE_WIDTH = 160
"""Columns of `-o wide` in a file or pipe."""


_FORMS = {output.value: output for output in Output if output is not Output.NAME}
_FORM_OF_FILE = {".svg": Output.SVG, ".json": Output.JSON, ".yaml": Output.YAML, ".txt": Output.TABLE}


@dataclass(frozen=True, slots=True)
class MapTarget:
    """The form of the map, and the file that it is written to instead of stdout."""

    form: Output
    file: Path | None

    @classmethod
    def of(cls, values: tuple[str, ...]) -> MapTarget:
        """Read the values of `-o`: the name of a form, a file, or both; raises BadParameter."""
        named = [_FORMS[value] for value in values if value in _FORMS]
        files = [Path(value) for value in values if value not in _FORMS]
        if len(named) > 1 or len(files) > 1:
            raise click.BadParameter("takes one form, and one file beside it")
        file = files[0] if files else None
        if file is None or named:
            return cls(named[0] if named else Output.TABLE, file)
        if file.suffix not in _FORM_OF_FILE:
            raise click.BadParameter(
                f"{str(file)!r} is neither one of {', '.join(_FORMS)} nor a file that ends in "
                f"{', '.join(_FORM_OF_FILE)}"
            )
        return cls(_FORM_OF_FILE[file.suffix], file)


def _complete_target(_context: click.Context, _option: click.Parameter, begun: str) -> list[CompletionItem]:
    return names_and_files(list(_FORMS), begun)


def _complete_node(context: click.Context, _option: click.Parameter, begun: str) -> list[CompletionItem]:
    claims = _claims_on_line(context)
    names = () if claims is None else claims.nodes
    return [CompletionItem(name) for name in names if name.startswith(begun)]


def _complete_found(context: click.Context, _option: click.Parameter, begun: str) -> list[CompletionItem]:
    """Complete the VM of `VM=CPUS`."""
    claims = _claims_on_line(context)
    if claims is None:
        return []
    node = claims.on_node(context.params.get("machine") or "", context.params.get("node"))
    names = {claim.vmi or claim.pod or claim.uid for claim in node.ledger.claims.values()}
    return [CompletionItem(f"{name}=") for name in sorted(names) if name.startswith(begun)]


def _claims_on_line(context: click.Context) -> ClaimsByNode | None:
    """Read the file that stands on the line already; never stdin, where a user types."""
    from kvplace.cli.claims_by_node import read_claims

    placements = context.params.get("placements")
    return read_claims(placements, "") if placements and placements != "-" else None


@click.command("map", short_help="Draw the cores of a machine and the VMs on them.")
@machine_argument(complete_drawn)
@click.option(
    "--placements",
    type=InputFile(),
    metavar="FILE",
    help="The VMs on the machine, - for stdin: answers of `kvplace place --keep -o json`, a plan of "
    "`kvplace plan -o json`, a NodeLedger (`kubectl get nodeledger NODE -o yaml`), or pods "
    "(`kubectl get pods -A -o json`).",
)
@click.option(
    "--node",
    metavar="NAME",
    shell_complete=_complete_node,
    help="The node of --placements to draw (default: the only node, or the node with the machine's name).",
)
@click.option("--all", "everything", is_flag=True, help="All nodes of the live cluster, a line for each.")
@click.option("--live", is_flag=True, help="FILE is a node of the live cluster; --context etc. imply it.")
@cpu_manager_state_option
@click.option("--foreign", metavar="CPUS", help="CPUs in use outside of kvplace, for example 8-11,40-43.")
@click.option(
    "--found",
    metavar="VM=CPUS",
    multiple=True,
    shell_complete=_complete_found,
    help="The CPUs where the pinned threads of a VM run in fact; the map shows a difference from its "
    "placement as drift. May be repeated.",
)
@click.option(
    "-o",
    "--output",
    "target",
    metavar="FORM|FILE",
    multiple=True,
    callback=lambda _context, _option, values: MapTarget.of(values),
    shell_complete=_complete_target,
    help="table (default), wide, json, yaml or svg; or a file to write; its suffix .svg, .json, .yaml or "
    ".txt chooses the form. May be given twice, for a form and a file.",
)
@cluster_flags(namespaced=False, selector=False)
def command(
    *,
    machine: str | None,
    placements: str | None,
    node: str | None,
    everything: bool,
    live: bool,
    cpu_manager_state: str | None,
    foreign: str | None,
    found: tuple[str, ...],
    target: MapTarget,
    flags: ClusterFlags,
) -> None:
    """Draw the cores of a machine and the VMs on them.

    FILE is the machine in any form that `kvplace topology` reads; without FILE it is this machine. The map
    nests sockets, NUMA nodes, L3 caches, cores and threads.

    A name that is neither a file nor a server type is a node of the cluster of the kubeconfig: its map shows
    the VMs of its ledger, and threads that its agent has found elsewhere. node/NAME is always a node, and
    file/NAME always a file.

    Contradictions are marked in the map and explained on stderr: two VMs that own one CPU, CPUs that the
    machine does not have, threads that run elsewhere than placed.
    """
    from kvplace.cli.claims_by_node import NodeClaims, read_placements
    from kvplace.core.drawing.core_map import draw

    kind, slash, name = (machine or "").partition("/")
    if slash and name and kind in ("node", "file"):
        live = live or kind == "node"
        machine = name if kind == "node" else str(Path.cwd() / name)
    offline = (placements, node, cpu_manager_state, foreign, *found)
    names_cluster = everything or live or flags.are_given
    if names_cluster or (machine is not None and not any(offline) and names_a_node(machine)):
        if any(given is not None for given in offline):
            raise click.UsageError(
                "--placements, --node, --cpu-manager-state, --foreign and --found describe a machine; "
                "leave them out to draw a live cluster"
            )
        _draw_live(machine, target, flags, everything=everything)
        return
    if node is not None and placements is None:
        raise click.UsageError("--node chooses a node of --placements; give --placements too")
    known = chosen_machine(machine, state=cpu_manager_state)
    claims = NodeClaims(Ledger())
    if placements is not None:
        claims = read_placements(placements, known.name, known.topology.fingerprint, node=node)
    drawing = draw(
        node or known.name,
        known.topology,
        claims.ledger,
        foreign=known.kubelet_cpus | read_cpus(foreign or "", "--foreign"),
        found=read_found(found, claims),
        placements=claims.placements,
        counts=() if known.devices is None else known.devices.counts,
    )
    for sentence in claims.notes:
        say(sentence)
    _show(drawing, target)


def _draw_live(machine: str | None, target: MapTarget, flags: ClusterFlags, *, everything: bool) -> None:
    if everything == (machine is not None):
        raise click.UsageError("name one node of the cluster, or give --all")
    if machine is not None:
        _show(drawn_node(flags, machine), target)
        return
    if target.form is Output.SVG:
        raise click.UsageError("an SVG shows one node: name it instead of --all")
    from kvplace.cli.view_tables import draw_cluster
    from kvplace.nodes.cluster_reading import read_cluster

    def draw_all(file: TextIO) -> None:
        view = flags.run(lambda live: read_cluster(live.api, pods=None))  # the ledgers name the VMs
        draw_cluster(view, target.form, file)

    _write(draw_all, target)


def _show(drawing: CoreMap, target: MapTarget) -> None:
    for fault in drawing.faults:
        say(f"{fault.kind.value}: {fault.sentence}")
    _write(lambda file: _draw(drawing, target.form, file), target)


def read_found(texts: Iterable[str], claims: NodeClaims) -> dict[PodUid, CpuMask]:
    """Read the values of `--found VM=CPUS`, by the UIDs of the VMs' claims; raises BadBody."""
    from kvplace.core.drawing.occupancy import printable

    found: dict[PodUid, CpuMask] = {}
    for text in texts:
        name, equals, cpus = text.rpartition("=")
        if not equals:
            raise BadBody(f"--found {printable(text)[:60]!r} is not of the form VM=CPUS, for example db=4-7")
        try:
            claim = claims.find(name)
            found[claim.uid] = found.get(claim.uid, NO_CPUS) | read_cpus(cpus, "CPUs")
        except BadBody as error:
            raise BadBody(f"--found: {error}") from None
    return found


def _write(draw: Callable[[TextIO], None], target: MapTarget) -> None:
    if target.file is None:
        draw(sys.stdout)
        return
    try:
        with target.file.open("w", encoding="utf-8") as file:
            draw(file)
    except OSError as error:
        raise click.ClickException(f"{target.file} cannot be written: {error.strerror}") from None


def _draw(drawing: CoreMap, form: Output, file: TextIO) -> None:
    if form is Output.SVG:
        from kvplace.core.drawing.svg_map import svg_map

        file.write(svg_map(drawing))
    elif form.is_document:
        from kvplace.core.drawing.core_map_json import core_map_document

        file.write(document_text(core_map_document(drawing), form))
    else:
        from kvplace.cli.terminal_map import print_map

        wide = form is Output.WIDE
        print_map(console(file, _WIDE_WIDTH) if wide else console(file), drawing, wide=wide)


def names_a_node(machine: str) -> bool:
    """Whether a node has this name: it is neither a file nor a server type, and there is a kubeconfig.

    Without a kubeconfig a likely typo of a server type names no node; raises Absent for any other name.
    """
    from kvplace.kube.kubeconfig import kubeconfig_files
    from kvplace.machines.server_types import machine_names

    if not machine or machine == "-" or "/" in machine or machine in machine_names():
        return False
    try:
        if Path(machine).exists():
            return False
    except OSError:
        return False
    if kubeconfig_files(None) is None:
        if near_word(machine, machine_names()):
            return False
        raise Absent(
            f"{machine!r} is neither a file nor a server type, and no kubeconfig names a cluster with nodes: "
            "set KUBECONFIG or give --kubeconfig, or choose a type that `kvplace topology --help` lists"
        )
    return True


def drawn_node(flags: ClusterFlags, name: str) -> CoreMap:
    """Read one node and draw it; raises KvplaceError with the reason where nothing can be drawn."""
    from kvplace.cli.live_cluster import LiveCluster
    from kvplace.kube.watches import NODES
    from kvplace.machines.server_types import machine_names
    from kvplace.nodes.cluster_reading import read_node
    from kvplace.nodes.view_output import draw_node

    node = NodeName(name)

    async def read(live: LiveCluster) -> CoreMap:
        view = await read_node(live.api, node)
        if node not in view.nodes:
            known = [record.name for record in await live.api.read_all(NODES)]
            raise Absent(
                f"{live.session.server} has no node {name!r}{did_you_mean(name, [*known, *machine_names()])}"
            )
        drawing = draw_node(view.nodes[node], view.by_node.get(node, ()))
        if drawing is None:
            raise KvplaceError(f"node {name} cannot be drawn: {view.nodes[node].problem}")
        return drawing

    return flags.run(read)
