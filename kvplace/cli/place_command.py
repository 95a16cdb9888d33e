"""`kvplace place`: which CPUs of one machine VMs would get."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from kvplace.cli.output import Output, print_document, say
from kvplace.cli.parameters import (
    Answer,
    chosen_machine,
    cpu_manager_state_option,
    example_option,
    filename_option,
    output_option,
    take_stdin,
    topology_option,
)
from kvplace.cli.progress import Progress
from kvplace.core.errors import ExitCode

if TYPE_CHECKING:
    from kvplace.cli.manifest_vms import StatedVm
    from kvplace.cli.place_session import PlaceAnswer, PlaceSession
    from kvplace.core.search_budget import Watch
    from kvplace.machines.machine import Machine

_MILLION = 1_000_000


@click.command("place", short_help="Show which CPUs of a machine the VMs of a manifest would get.")
@filename_option(
    "manifests", "A manifest with VMs, VMIs or pods, and with the instancetypes that they name; - for stdin."
)
@topology_option(
    "The machine: a file, a server type, or / for this machine; `kvplace topology --help` lists all forms.",
    required=True,
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
    help="Add to each refusal the changes that would make the VM fit (default: yes).",
)
@cpu_manager_state_option
@example_option("request")
@output_option(Answer.REPORT)
def command(
    *,
    manifests: tuple[str, ...],
    machine: str,
    free: str | None,
    keep: bool,
    make_room: bool,
    thorough: bool,
    explain: bool,
    cpu_manager_state: str | None,
    output: Output,
) -> int:
    """Show which CPUs of a machine the VMs of manifests, or of requests on stdin, would get.

    \b
    kvplace place -f vm.yaml --topology 2x-epyc-9354

    The VMs of the manifests are placed together, each on CPUs of its own. Where a VM does not fit,
    the answer has the reason and the changes that help.

    Without -f, stdin has one request per line as JSON:

    \b
    {"id": "db", "vcpus": 8, "cpuSet": "one-numa", "policy": "exclusive", "smt": "prefer",
     "memory": "8Gi", "hugepages": {"1Gi": 8}, "free": "0-15"}      only vcpus is required
    {"release": "db"}                                               frees the CPUs that --keep has kept

    Each line is answered before the next one is read. `kvplace schema request` lists the keys and their
    values. A request without an id is called request-N, where N is the number of its line.

    Ctrl-C ends a long search for moves with the best moves so far, and exit code 130; no more lines are read.

    Exit code 0 when every request was placed, 3 when none was, 4 when some were; 2 when a line was invalid.
    """  # noqa: D301 - click needs the literal backslash
    from kvplace.cli.place_session import AnswerKind, PlaceSession, free_cpus, numbered_lines

    if make_room and not (keep or manifests):
        raise click.UsageError("--make-room moves the VMs that --keep has kept; give both")
    if thorough and not make_room:
        raise click.UsageError("--thorough is an option of --make-room; give both")
    if not manifests:
        take_stdin(click.get_current_context(), "the requests", ", one JSON object per line")
    found = chosen_machine(machine, state=cpu_manager_state)
    session = PlaceSession(
        found,
        free=None if free is None else free_cpus(free, "--free", found.topology),
        keep=keep or bool(manifests),
        make_room=make_room,
        thorough=thorough,
        explain=explain,
    )
    kinds: set[AnswerKind] = set()
    interrupted = False
    for asked in _stated(manifests) if manifests else numbered_lines(sys.stdin.buffer):
        with Progress("searching for moves", session.most_steps // _MILLION, "million step") as progress:
            answer, text = _answer(session, found, asked, lambda steps: progress.show(steps // _MILLION))
        kinds.add(answer.kind)
        if output is Output.JSON:
            click.echo(json.dumps(answer.document, separators=(",", ":")))
        elif output is Output.YAML:
            click.echo("---")
            print_document(answer.document, output)
        else:
            click.echo(text)
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


def _stated(files: Sequence[str]) -> tuple[StatedVm, ...]:
    from kvplace.cli.manifest_vms import stated_vms
    from kvplace.documents.reading import read_manifests

    return stated_vms([manifest for file in files for manifest in read_manifests(file)])


def _answer(
    session: PlaceSession, machine: Machine, asked: StatedVm | tuple[int, bytes], watch: Watch
) -> tuple[PlaceAnswer, str]:
    """Answer a VM of a manifest or a numbered line, also as text for people."""
    if isinstance(asked, tuple):
        number, line = asked
        answer = session.answer(line, number, watch)
        return answer, answer.sentence
    from kvplace.cli.manifest_vms import decision_lines

    answer = session.place(asked.name, asked.request, watch=watch)
    assert answer.decision is not None
    return answer, "\n".join(decision_lines(asked, machine, answer.decision))
