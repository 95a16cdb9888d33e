"""`kvplace map`: a machine drawn, with who owns which core."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvplace.cli.output import Output, console, output_option, print_json, say
from kvplace.core.errors import BadBody, Corrupt

if TYPE_CHECKING:
    from kvplace.core.ledger import Ledger
    from kvplace.core.topology import Topology

_FILE = click.Path(path_type=Path, dir_okay=False)
_MOST_BYTES = 16 * 1024 * 1024


@click.command("map", short_help="Draw the cores of a machine, and whose they are.")
@click.argument("machine", metavar="FILE")
@click.option(
    "--ledger",
    type=_FILE,
    help="Who owns what: the NodeLedger of the node (`kubectl get nodeledger NODE -o json`).",
)
@output_option
def command(machine: str, ledger: Path | None, output: Output) -> None:
    """Draw the cores of a machine, and whose they are.

    FILE is the machine as `kvplace topology` takes it: a description, a folder or archive, or the name of a
    server type that comes with kvplace.
    """
    from kvplace.cli.machine import find_machine
    from kvplace.core.drawing import core_map_document, draw
    from kvplace.core.ledger import Ledger

    found = find_machine(machine)
    for note in found.notes:
        say(note)
    book = Ledger() if ledger is None else _read_ledger(ledger, found.topology)
    drawing = draw(found.name, found.topology, book)
    if output is Output.JSON:
        print_json(core_map_document(drawing))
        return
    from kvplace.cli.terminal_map import print_map

    print_map(console(), drawing)


def _read_ledger(path: Path, topology: Topology) -> Ledger:
    """Read a NodeLedger, JSON or YAML; raises BadBody when it is none, or not of this machine."""
    from kvplace.core.cpuset import format_cpu_list
    from kvplace.core.ledger import read_ledger

    document = _load(path)
    try:
        ledger = read_ledger(document.get("spec") or {} if "spec" in document else document)
    except Corrupt as error:
        raise BadBody(f"--ledger: {path}: {error}") from None
    named = ledger.owned
    for claim in ledger.claims.values():
        named |= claim.cpus
    if named & ~topology.cpus:
        raise BadBody(
            f"--ledger: {path} names CPU {format_cpu_list(named & ~topology.cpus)}, which the machine lacks; "
            "is it the ledger of another node?"
        )
    return ledger


def _load(path: Path) -> dict[str, Any]:
    import yaml

    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise BadBody(f"--ledger: {path} is longer than {_MOST_BYTES} bytes")
        document = yaml.load(content, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except OSError as error:
        raise BadBody(f"--ledger: {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise BadBody(f"--ledger: {path} is neither JSON nor YAML") from None
    if not isinstance(document, dict):
        raise BadBody(f"--ledger: {path} is no NodeLedger")
    return document
