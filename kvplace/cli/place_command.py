"""`kvplace place`: where VMs would sit on one machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import click

from kvplace.cli.machine import cpu_manager_state_option, find_machine
from kvplace.cli.output import Output, output_option, say
from kvplace.core.errors import ExitCode


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
@click.option(
    "--make-room",
    is_flag=True,
    help="Kept VMs may move, so that a new one fits well; the answer lists the moves in their order.",
)
@click.option(
    "--thorough",
    is_flag=True,
    help="Search three moves to the end, which may take minutes for one request on a large machine.",
)
@click.option(
    "--explain/--no-explain", default=True, help="Say with each refusal what would mend it (default: yes)."
)
@cpu_manager_state_option
@output_option
def command(
    machine: str,
    free: str | None,
    keep: bool,
    make_room: bool,
    thorough: bool,
    explain: bool,
    cpu_manager_state: Path | None,
    output: Output,
) -> int:
    """Answer requests, one JSON object per line on stdin, with the CPUs that each VM would get.

    \b
    {"id": "db", "vcpus": 8, "cpuSet": "one-numa", "policy": "exclusive", "smt": "prefer",
     "memory": "8Gi", "hugepages": {"1Gi": 8}, "free": "0-15"}      all but vcpus may be left out
    {"release": "db"}                                               gives back what --keep has kept

    Each line is answered at once, before the next one is read.

    Leaves with 3 when nothing at all fitted, and with 2 when a line was wrong.
    """  # noqa: D301 - click wants the character itself
    from kvplace.cli.placing import MOST_BYTES, Outcome, Placing, free_cpus

    if make_room and not keep:
        raise click.UsageError("--make-room moves the VMs that --keep has kept; give both")
    if thorough and not make_room:
        raise click.UsageError("--thorough is about the search of --make-room; give both")
    found = find_machine(machine, cpu_manager_state=cpu_manager_state)
    for note in found.notes:
        say(note)
    placing = Placing(
        found.name,
        found.topology,
        free=None if free is None else free_cpus(free, "--free", found.topology),
        foreign=found.kubelet_cpus,
        keep=keep,
        rearrange=make_room,
        thorough=thorough,
        explain=explain,
    )
    seen: set[Outcome] = set()
    for number, line in _lines(sys.stdin.buffer, MOST_BYTES):
        answer = placing.answer(line, number)
        seen.add(answer.outcome)
        if output is Output.JSON:
            click.echo(json.dumps(answer.document, separators=(",", ":")))
        else:
            click.echo(answer.sentence)
        sys.stdout.flush()
    if Outcome.WRONG in seen:
        return ExitCode.USAGE
    return ExitCode.DOES_NOT_FIT if Outcome.REFUSED in seen and Outcome.PLACED not in seen else ExitCode.DONE


def _lines(stream: BinaryIO, most: int) -> Iterator[tuple[int, bytes]]:
    """Read lines as they come, with their numbers; empty ones are none.

    Of one that is too long only its beginning comes, which is no request.
    """
    number = 0
    while line := stream.readline(most):
        number += 1
        cut = line
        while len(cut) >= most and not cut.endswith(b"\n"):
            cut = stream.readline(most)
        if text := line.strip(b" \t\r\n"):
            yield number, text if len(line) < most else line
