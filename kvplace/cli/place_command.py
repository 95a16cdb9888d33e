"""`kvplace place`: where VMs would sit on one machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import BinaryIO

import click

from kvplace.cli.output import Output, output_option, say
from kvplace.core.errors import BadBody, ExitCode

_MOST_BYTES = 1024 * 1024


@click.command("place", short_help="Answer requests on stdin with CPUs of one machine.")
@click.option(
    "--topology",
    "machine",
    required=True,
    metavar="FILE",
    help="The machine, as `kvplace topology` takes it.",
)
@click.option("--free", metavar="CPUS", help="Only these CPUs are free, for instance 2-15,34-47.")
@click.option("--keep", is_flag=True, help="Each answer takes its CPUs, until they are released by id.")
@output_option
def command(machine: str, free: str | None, keep: bool, output: Output) -> int:
    """Answer requests, one JSON object per line on stdin, with the CPUs that each VM would get.

    \b
    {"id": "db", "vcpus": 8, "cpuSet": "one-numa", "policy": "exclusive", "smt": "prefer",
     "memory": "8Gi", "hugepages": {"1Gi": 8}, "free": "0-15"}      all but vcpus may be left out
    {"release": "db"}                                               gives back what --keep has kept

    Each line is answered at once, before the next one is read.

    Leaves with 3 when nothing at all fitted, and with 2 when a line was wrong.
    """  # noqa: D301 - click wants the character itself
    from kvplace.cli.machine import find_machine
    from kvplace.cli.placing import Outcome, Placing, free_cpus

    found = find_machine(machine)
    for note in found.notes:
        say(note)
    only = None if free is None else free_cpus(free, "--free", found.topology)
    placing = Placing(found.name, found.topology, free=only, keep=keep)
    seen: set[Outcome] = set()
    for line in _lines(sys.stdin.buffer):
        answer = placing.answer(line)
        seen.add(answer.outcome)
        if output is Output.JSON:
            click.echo(json.dumps(answer.document, separators=(",", ":")))
        else:
            click.echo(answer.sentence)
        sys.stdout.flush()
    if Outcome.WRONG in seen:
        return ExitCode.USAGE
    return ExitCode.DOES_NOT_FIT if Outcome.REFUSED in seen and Outcome.PLACED not in seen else ExitCode.DONE


def _lines(stream: BinaryIO) -> Iterator[str]:
    """Read lines as they come; one that is no text or too long becomes one that no request looks like."""
    while line := stream.readline(_MOST_BYTES):
        if not line.endswith(b"\n") and len(line) >= _MOST_BYTES:
            raise BadBody(f"a line on stdin is longer than {_MOST_BYTES} bytes; write one request per line")
        if text := line.decode("utf-8", "replace").strip():
            yield text
