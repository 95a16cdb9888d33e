"""`kvplace rewrite`: what the hook would make of a libvirt domain."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvplace.core.errors import BadBody, Misconfigured

if TYPE_CHECKING:
    from kvplace.core.placement import PodPlacement

_FILE = click.Path(path_type=Path, dir_okay=False, allow_dash=True)


@click.command("rewrite", short_help="Pin a libvirt domain as a placement says.")
@click.option("--domain", type=_FILE, required=True, help="The domain XML; - is stdin.")
@click.option(
    "--placement",
    type=_FILE,
    help="Text of a pod's kvplace.io/placement, or an answer of `kvplace place -o json`; - is stdin.",
)
@click.option("--cpu-map", metavar="JSON", help='A bare cpu-map, for instance {"socket0": ["2", "34"]}.')
@click.option(
    "--topology",
    "machine",
    metavar="FILE",
    help="The machine; needed only to bind the memory of guest NUMA cells.",
)
def command(domain: Path, placement: Path | None, cpu_map: str | None, machine: str | None) -> None:
    """Print a libvirt domain with its threads pinned and its memory bound as a placement says."""
    from kvplace.core.placement import PodPlacement
    from kvplace.domainxml import MAX_DOMAIN_BYTES, rewrite

    if (placement is None) == (cpu_map is None):
        raise click.UsageError("give --placement or --cpu-map, one of the two", click.get_current_context())
    if placement is not None and str(placement) == str(domain) == "-":
        raise click.UsageError("--domain and --placement cannot both be stdin", click.get_current_context())
    xml = _read(domain, "--domain", MAX_DOMAIN_BYTES)
    if placement is not None:
        chosen = _placement(_read(placement, "--placement", 1024 * 1024))
    else:
        chosen = PodPlacement.of_cpu_map(cpu_map or "")
    if chosen.floats:
        raise Misconfigured(
            "this placement says that the VM runs unpinned: the hook leaves its domain as it is"
        )
    sys.stdout.buffer.write(rewrite(xml, chosen, _nodes(machine), _tell))
    sys.stdout.buffer.flush()


def _tell(sentence: str) -> None:
    click.echo(f"kvplace: {sentence}", err=True)


def _placement(raw: bytes) -> PodPlacement:
    """Read an annotation, or one answer of `kvplace place`, which holds the same fields and more."""
    from kvplace.core.placement import PodPlacement

    try:
        text = raw.decode()
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadBody(f"--placement is no JSON: {error}") from None
    if isinstance(document, dict) and "placement" in document:
        text = json.dumps(document["placement"])
    elif isinstance(document, dict) and "refusal" in document:
        raise BadBody("--placement holds a refusal: there are no CPUs to pin to")
    return PodPlacement.from_json(text)


def _nodes(machine: str | None) -> Mapping[int, int]:
    """Map CPUs to NUMA nodes."""
    if machine is None:
        return {}
    from kvplace.cli.machine import find_machine
    from kvplace.core.cpuset import cpus_of

    return {cpu: node.id for node in find_machine(machine).topology.numa_nodes for cpu in cpus_of(node.cpus)}


def _read(path: Path, option: str, most: int) -> bytes:
    try:
        if str(path) == "-":
            content = sys.stdin.buffer.read(most + 1)
        else:
            with path.open("rb") as file:
                content = file.read(most + 1)
    except OSError as error:
        raise BadBody(f"{option}: {path} cannot be read: {error.strerror}") from None
    if len(content) > most:
        raise BadBody(f"{option}: {path} is longer than {most} bytes")
    return content
