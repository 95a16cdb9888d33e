"""`kvplace place`: which CPUs of one machine VMs would get."""

from __future__ import annotations

import json
import sys

import click

from kvplace.cli.example import example_option
from kvplace.cli.files import InputFile, take_stdin
from kvplace.cli.machine import chosen_machine, complete_machine, cpu_manager_state_option
from kvplace.cli.output import Answer, Output, output_option, print_document, say
from kvplace.cli.progress import Progress
from kvplace.core.errors import ExitCode

_MILLION = 1_000_000


@click.command("place", short_help="Choose CPUs of one machine for requests on stdin.")
@click.option(
    "--topology",
    "machine",
    type=InputFile(),
    required=True,
    metavar="FILE",
    shell_complete=complete_machine,
    help="The machine, in any form that `kvplace topology` reads.",
)
@click.option("--free", metavar="CPUS", help="Only these CPUs are free, for example 2-15,34-47.")
@click.option("--keep", is_flag=True, help="Each placement takes its CPUs until it is released by its id.")
@click.option(
    "--make-room",
    is_flag=True,
    help="Kept VMs may move so that a new one fits well; the answer lists the moves in order.",
)
@click.option(
    "--thorough",
    is_flag=True,
    help="Search 100 times as long for moves; one request on a large machine may take minutes.",
)
@click.option(
    "--explain/--no-explain",
    default=True,
    help="Add to each refusal the changes after which the VM would fit (default: yes).",
)
@cpu_manager_state_option
@example_option("request")
@output_option(Answer.REPORT)
def command(
    machine: str,
    free: str | None,
    keep: bool,
    make_room: bool,
    thorough: bool,
    explain: bool,
    cpu_manager_state: str | None,
    output: Output,
) -> int:
    """Answer requests, one JSON object per line on stdin, with the CPUs that each VM would get.

    \b
    {"id": "db", "vcpus": 8, "cpuSet": "one-numa", "policy": "exclusive", "smt": "prefer",
     "memory": "8Gi", "hugepages": {"1Gi": 8}, "free": "0-15"}      only vcpus is required
    {"release": "db"}                                               frees what --keep has kept

    Each line is answered before the next one is read. `kvplace schema request` lists the keys and their
    values. A request without an id is called request-N, where N is the number of its line.

    Ctrl-C ends a long search for moves with the best ones so far, and exit code 130; no more lines are read.

    Exit code 0 when every request was placed, 3 when none was, 4 when some were; 2 when a line was invalid.
    """  # noqa: D301 - click needs the literal backslash
    from kvplace.cli.place_session import AnswerKind, PlaceSession, free_cpus, numbered_lines

    if make_room and not keep:
        raise click.UsageError("--make-room moves the VMs that --keep has kept; give both")
    if thorough and not make_room:
        raise click.UsageError("--thorough is an option of --make-room; give both")
    take_stdin(click.get_current_context(), "the requests", ", one JSON object per line")
    found = chosen_machine(machine, state=cpu_manager_state)
    for note in found.notes:
        say(note)
    session = PlaceSession(
        found.name,
        found.topology,
        free=None if free is None else free_cpus(free, "--free", found.topology),
        foreign=found.kubelet_cpus,
        keep=keep,
        make_room=make_room,
        thorough=thorough,
        explain=explain,
    )
    kinds: set[AnswerKind] = set()
    interrupted = False
    for number, line in numbered_lines(sys.stdin.buffer):
        with Progress("searching for moves", session.most_steps // _MILLION, "million step") as progress:
            answer = session.answer(line, number, lambda steps: progress.show(steps // _MILLION))
        kinds.add(answer.kind)
        if output is Output.JSON:
            click.echo(json.dumps(answer.document, separators=(",", ":")))
        elif output is Output.YAML:
            click.echo("---")
            print_document(answer.document, output)
        else:
            click.echo(answer.sentence)
        sys.stdout.flush()
        if interrupted := progress.interrupted:
            break
    if interrupted:
        return ExitCode.INTERRUPTED
    if not kinds:
        say('<stdin> contains no requests; write one per line, such as {"vcpus": 8}')
    if AnswerKind.INVALID in kinds:
        return ExitCode.USAGE
    if AnswerKind.REFUSED in kinds:
        return ExitCode.PARTLY_DONE if AnswerKind.PLACED in kinds else ExitCode.DOES_NOT_FIT
    return ExitCode.DONE
