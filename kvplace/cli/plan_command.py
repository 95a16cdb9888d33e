"""`kvplace plan`: many VMs at once, on the nodes of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from kvplace.cli.output import print_json, say
from kvplace.core.cluster.node_choice import Strategy
from kvplace.core.errors import ExitCode

if TYPE_CHECKING:
    from kvplace.core.cluster.planning import Plan
    from kvplace.plan.mip_bound import MipBound


@click.command("plan", short_help="Place many VMs at once on the nodes of a cluster.")
@click.option(
    "--cluster",
    metavar="FILE",
    help="The cluster, as `kvplace simulate` describes one; left out: six nodes to try it on.",
)
@click.option(
    "--requests",
    required=True,
    metavar="FILE",
    help="The VMs, or - for stdin: requests as `kvplace place` takes them, one a line or as a YAML list.",
)
@click.option(
    "--strategy",
    type=click.Choice([strategy.value for strategy in Strategy]),
    default=Strategy.PACK.value,
    show_default=True,
    help="Which nodes VMs go to while everything fits.",
)
@click.option("--make-room", is_flag=True, help="Running VMs may move inside their machines.")
@click.option("--optimal", is_flag=True, help="Also compute an upper bound with a MIP solver (needs HiGHS).")
@click.option(
    "--seconds",
    type=click.FloatRange(0.1, 86_400),
    default=30.0,
    show_default=True,
    help="How long --optimal may search.",
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "wide", "json", "yaml", "name"]),
    default="table",
    show_default=True,
    help="How to print the answer.",
)
def command(
    *,
    cluster: str | None,
    requests: str,
    strategy: str,
    make_room: bool,
    optimal: bool,
    seconds: float,
    output: str,
) -> int:
    """Find room for as many VMs as possible, and say which nodes and CPUs they get.

    \b
    {"id": "db", "vcpus": 8, "cpuSet": "one-numa", "memory": "32Gi"}
    {"id": "web", "vcpus": 2, "count": 20}              so many equal VMs

    All are looked at together, so more of them find room than one after the other; both are told.

    Leaves with 4 when some found no room, and with 3 when none did.
    """  # noqa: D301 - click wants the character itself
    from kvplace.core.cluster.planning import plan
    from kvplace.plan.mip_bound import mip_bound
    from kvplace.plan.plan_cluster import read_plan_cluster
    from kvplace.plan.vm_requests import read_vm_requests

    nodes = read_plan_cluster(cluster)
    wanted = read_vm_requests(requests, (vm.id for node in nodes for vm in node.running))
    bound = mip_bound(nodes, wanted, seconds=seconds) if optimal else None
    hint = bound.hint if bound is not None else ()
    found = plan(nodes, wanted, Strategy(strategy), make_room=make_room, hint=hint)
    if output in ("json", "yaml"):
        from kvplace.plan.plan_report import plan_document

        document = plan_document(found, nodes, wanted, bound)
        if output == "json":
            print_json(document)
        else:
            import yaml

            click.echo(yaml.safe_dump(document, sort_keys=False), nl=False)
    elif output == "name":
        for seat in found.planned:
            click.echo(seat.id)
        if found.refused:
            say(f"no room for {len(found.refused)} of {len(wanted)} VMs")
    else:
        _print(found, bound, wide=output == "wide")
    if not found.refused:
        return ExitCode.DONE
    return ExitCode.PARTLY_DONE if found.planned else ExitCode.DOES_NOT_FIT


def _print(plan: Plan, bound: MipBound | None, *, wide: bool) -> None:
    from kvplace.plan.plan_report import HEADS, WIDE_HEADS, rows, summary

    if plan.planned:
        _print_columns([WIDE_HEADS if wide else HEADS, *rows(plan, wide=wide)])
        click.echo()
    for title, sentence in summary(plan, bound):
        click.echo(f"{title:<12}{sentence}")


def _print_columns(lines: Sequence[Sequence[str]]) -> None:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        click.echo("   ".join(cells).rstrip())
