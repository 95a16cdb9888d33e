"""`kvplace rollout`: many VMs from templates: planned, made in waves, followed until they are pinned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvplace.cli.cluster_flags import ClusterFlags, cluster_flags, complete_rollout
from kvplace.cli.output import (
    Column,
    Output,
    plain,
    print_answer,
    print_message,
    say,
    table_lines,
    table_of,
)
from kvplace.cli.parameters import (
    Answer,
    Commands,
    InputFile,
    Words,
    check_confirmation,
    example_option,
    filename_option,
    output_option,
    yes_option,
)
from kvplace.core.errors import BadBody, ExitCode
from kvplace.core.quantity import counted, first_of
from kvplace.core.vm_stages import Percentiles, VmStage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from kvplace.cli.live_cluster import LiveCluster
    from kvplace.rollout.report import Report
    from kvplace.rollout.rollouts import Prepared, Rollouts

_MOST_NODES = 20
"""Nodes that a plan shows one by one."""
_MOST_DIGITS = 9
_WAIT_FOR_ROOM = click.option(
    "--wait-for-room", is_flag=True, help="Create VMs that do not fit, too; they wait."
)
_NO_PLAN = click.option(
    "--no-plan", is_flag=True, help="Do not plan first, which needs the right to read nodes."
)
_FLAGS = cluster_flags(everywhere=False, selector=False)
_Answer = TypeVar("_Answer")


def _read_waves(_context: click.Context, _option: click.Parameter, text: str | None) -> list[Any] | None:
    """Split the sizes of waves; the document checks them."""
    if text is None:
        return None
    sizes = [size.strip() for size in text.split(",")]
    return [int(size) if size.isdecimal() and len(size) <= _MOST_DIGITS else size for size in sizes]


@click.group("rollout", cls=Commands, short_help="Create hundreds of VMs from templates, and follow them.")
def command() -> None:
    """Create hundreds of VMs from templates, and follow them until they are pinned.

    \b
    kvplace rollout create -f vm-templates/web-server.yaml --count 500 --name web
    kvplace rollout status web
    kvplace rollout resume web     after an interruption, or when there is room for more
    kvplace rollout delete web
    """  # noqa: D301 - click needs the literal backslash


@command.command("create", short_help="Plan VMs, create them after a confirmation, and wait for them.")
@filename_option(
    "files",
    "A VirtualMachine or VirtualMachineInstance as template, several of them, or a rollout document.",
)
@click.option("--count", type=click.IntRange(1), help="VMs to make from each template (default: one).")
@click.option("--names", type=InputFile(), metavar="FILE", help="Make one VM for each name in a list.")
@click.option("--name", help="Name of the rollout; its VMs' names begin with it (default: the template's).")
@click.option(
    "--waves",
    callback=_read_waves,
    help="Sizes of the first waves, for example 1,10%; each waits for the wave before.",
)
@click.option(
    "--max-in-flight",
    "maxInFlight",
    type=click.IntRange(1),
    help="VMs that are created but not ready, at most (default: 100).",
)
@click.option(
    "--max-failures", "maxFailures", type=click.IntRange(1), help="Create no more VMs after so many failures."
)
@click.option(
    "--until",
    type=Words([stage.value for stage in VmStage]),
    help="Stage of a ready VM (default: pinned; running for VMs that did not opt in).",
)
@click.option("--timeout", metavar="TIME", help="Longest wait for all VMs, for example 15m (default: 30m).")
@_WAIT_FOR_ROOM
@_NO_PLAN
@click.option("--dry-run", is_flag=True, help="Check and plan only.")
@example_option("rollout")
@yes_option
@output_option(Answer.LIST)
@_FLAGS
def create(
    *,
    flags: ClusterFlags,
    files: tuple[str, ...],
    count: int | None,
    names: str | None,
    name: str | None,
    yes: bool,
    dry_run: bool,
    wait_for_room: bool,
    no_plan: bool,
    output: Output,
    **limits: Any,
) -> int:
    """Plan VMs on the cluster, create them after a confirmation, and wait until they are pinned.

    The plan is a forecast from the CPUs that are free now: other pods may take them first. VMs that will not
    fit are not created and count as failed; `kvplace rollout resume` creates them later.

    Ctrl-C stops the rollout; created VMs stay, and `kvplace rollout resume` continues.

    Exit code 0 when all VMs are ready, 3 when none fits, 4 when some are not ready, 5 after the timeout.
    """
    # The other options have the names of the document's keys.
    if not files:
        raise click.UsageError("give a template or a rollout document with -f")
    from kvplace.cli.rollout_dialog import read_given

    limits = {key: value for key, value in limits.items() if value is not None}

    async def body(live: LiveCluster) -> int:
        from kvplace.rollout.rollouts import rollouts_on

        rollout = read_given(
            files, flags.namespace, live.namespace, name=name, count=count, names=names, limits=limits
        )
        check_confirmation(yes or dry_run)
        rollouts = rollouts_on(live.session, rollout.namespace)
        prepared = await rollouts.prepare(rollout, plan=not no_plan)
        if dry_run:
            return _print_plan(prepared, output)
        return await _carry_out(rollouts, prepared, yes=yes, everything=wait_for_room, output=output)

    return flags.run(body)


@command.command("resume", short_help="Continue a rollout after an interruption.")
@click.argument("name", shell_complete=complete_rollout)
@_WAIT_FOR_ROOM
@_NO_PLAN
@yes_option
@output_option(Answer.LIST)
@_FLAGS
def resume(
    *, flags: ClusterFlags, name: str, wait_for_room: bool, no_plan: bool, yes: bool, output: Output
) -> int:
    """Create the missing VMs of a rollout, and wait until all are ready.

    Templates and counts are the same as at its creation. VMs that exist stay as they are.
    """

    async def body(rollouts: Rollouts) -> int:
        stored = await rollouts.stored(name)
        check_confirmation(yes)
        prepared = await rollouts.prepare(stored, plan=not no_plan)
        return await _carry_out(rollouts, prepared, yes=yes, everything=wait_for_room, output=output)

    return _on_rollouts(flags, body)


@command.command("status", short_help="Show the progress of a rollout.")
@click.argument("name", shell_complete=complete_rollout)
@output_option(Answer.LIST)
@_FLAGS
def status(*, flags: ClusterFlags, name: str, output: Output) -> int:
    """Show the progress of a rollout, from its VMs in the cluster.

    Exit code 0 when all VMs are ready, 4 when some are not.
    """
    report = _on_rollouts(flags, lambda rollouts: rollouts.status(name))
    _print_report(report, output, unfinished=True)
    return report.exit_code


@command.command("list", short_help="List the rollouts of a namespace.")
@output_option(Answer.LIST)
@_FLAGS
def list_rollouts(*, flags: ClusterFlags, output: Output) -> None:
    """List the rollouts of a namespace."""

    async def body(rollouts: Rollouts) -> None:
        names = await rollouts.names()
        print_answer(
            output,
            lambda: {"rollouts": list(names)},
            table_lines([("NAME",), *((name,) for name in names)]) if names else (),
            names,
        )
        if not names and not output.is_document:
            say(f"no rollouts in namespace {rollouts.namespace}")

    _on_rollouts(flags, body)


@command.command("delete", short_help="Delete a rollout with all of its VMs.")
@click.argument("name", shell_complete=complete_rollout)
@click.option("--timeout", metavar="TIME", default="10m", show_default=True, help="Longest wait.")
@yes_option
@_FLAGS
def delete(*, flags: ClusterFlags, name: str, timeout: str, yes: bool) -> None:
    """Delete a rollout and all of its VMs, and wait until the VMs and their pods are gone."""
    check_confirmation(yes)
    from kvplace.documents.rollout import read_duration

    try:
        seconds = read_duration(timeout)
    except ValueError as error:
        raise BadBody(f"--timeout: {error}") from None

    async def body(rollouts: Rollouts) -> None:
        from kvplace.cli.live_cluster import ask
        from kvplace.cli.rollout_dialog import told_what_is_left

        if not yes:
            vms = await rollouts.count_vms(name)
            ask(f"Delete {counted(vms, 'VM')} of rollout {name} in namespace {rollouts.namespace}?")
        deleted = await rollouts.delete(name, timeout_s=seconds, on_change=told_what_is_left())
        say(f"{counted(deleted, 'VM')} of rollout {name} deleted")

    _on_rollouts(flags, body)


def _on_rollouts(flags: ClusterFlags, body: Callable[[Rollouts], Awaitable[_Answer]]) -> _Answer:
    """Await the body with the rollouts of the chosen namespace."""

    async def run(live: LiveCluster) -> _Answer:
        from kvplace.rollout.rollouts import rollouts_on

        return await body(rollouts_on(live.session, live.namespace))

    return flags.run(run)


async def _carry_out(
    rollouts: Rollouts, prepared: Prepared, *, yes: bool, everything: bool, output: Output
) -> int:
    from kvplace.cli.live_cluster import ask
    from kvplace.cli.rollout_dialog import shown_run

    to_make = len(prepared.missing) - (0 if everything else len(prepared.forecast.left_out))
    for line in _plan_lines(prepared):
        print_message(plain(line))
    name = prepared.rollout.name
    if prepared.fits_nowhere and not everything:
        say("none of the VMs fits; no VM was created")
        _print_report(rollouts.left_out(prepared), output)
        return ExitCode.DOES_NOT_FIT
    if to_make and not yes:
        ask(f"Create {counted(to_make, 'VM')}?")
    report = await shown_run(await rollouts.begin(prepared, everything=everything))
    _print_report(report, output)
    if report.interrupted:
        say(f"interrupted; `kvplace rollout resume {name} -n {report.namespace}` continues")
    elif report.exit_code is not ExitCode.DONE:
        say(f"not all VMs are ready; `kvplace rollout resume {name} -n {report.namespace}` tries again")
    return report.exit_code


def _plan_lines(prepared: Prepared) -> list[str]:
    rollout, forecast = prepared.rollout, prepared.forecast
    there = len(rollout.vms) - len(prepared.missing)
    known = f", {there} of them created already" if there else ""
    vms = counted(len(rollout.vms), "VM")
    lines = [f"rollout {rollout.name} in namespace {rollout.namespace}: {vms}{known}"]
    by_node = list(forecast.by_node.items())
    lines += [f"  {node}: {number}" for node, number in by_node[:_MOST_NODES]]
    if len(by_node) > _MOST_NODES:
        rest = by_node[_MOST_NODES:]
        lines.append(f"  and {counted(len(rest), 'more node')}: {sum(number for _, number in rest)}")
    return [*lines, *forecast.summary]


def _print_plan(prepared: Prepared, output: Output) -> int:
    forecast = prepared.forecast
    left_out = forecast.left_out
    document = {
        "vms": len(prepared.rollout.vms),
        "made": len(prepared.rollout.vms) - len(prepared.missing),
        "nodes": {str(node): vms for node, vms in forecast.by_node.items()},
        "notPlanned": list(forecast.unplanned),
        "failed": [{"name": name, "reason": why} for name, why in left_out.items()],
    }
    names = [vm.name for vm in prepared.missing if vm.name not in left_out]
    print_answer(output, lambda: document, _plan_lines(prepared), names)
    if not left_out:
        return ExitCode.DONE
    return ExitCode.DOES_NOT_FIT if len(left_out) == len(prepared.rollout.vms) else ExitCode.PARTLY_DONE


def _print_report(report: Report, output: Output, *, unfinished: bool = False) -> None:
    document = report.document()
    if unfinished:
        waiting = [{"name": one.name, "reason": one.reason} for one in report.unfinished]
        document = {"wanted": report.counts.wanted, **document, "unfinished": waiting}
    lines = _report_lines(report, wide=output is Output.WIDE)
    print_answer(output, lambda: document, lines, report.ready)
    say(*report.notes)


def _report_lines(report: Report, *, wide: bool) -> Iterator[str]:
    from kvplace.rollout.report import by_reason

    yield from table_of(_stage_columns(report), report.counts.reached.items())
    for title, vms in (("failed", report.failed), ("not ready", report.unfinished)):
        for alike in by_reason(vms):
            names = first_of([one.name for one in alike], len(alike) if wide else 1)
            yield f"{title}: {names}: {alike[0].reason}"


def _stage_columns(report: Report) -> tuple[Column[tuple[VmStage, int]], ...]:
    """Give the columns of stages with the number of VMs that have reached each."""

    def seconds(cell: Callable[[Percentiles], float]) -> Callable[[tuple[VmStage, int]], str]:
        def written(stage: tuple[VmStage, int]) -> str:
            times = report.seconds.get(stage[0])
            return f"{cell(times):.1f} s" if times is not None and stage[1] else "-"

        return written

    return (
        Column("STAGE", lambda stage: stage[0].value),
        Column("VMS", lambda stage: f"{stage[1]} of {report.counts.wanted}"),
        Column("P50", seconds(lambda times: times.p50)),
        Column("P95", seconds(lambda times: times.p95)),
        Column("MAX", seconds(lambda times: times.max)),
    )
