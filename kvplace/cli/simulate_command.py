"""`kvplace simulate` and `kvplace demo`: loads of VMs, placed by the code that places VMs in a cluster.

`simulate` runs a scenario. `demo` takes VMs from vm-templates/ all the way to their libvirt domains.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvplace.cli.output import Column, Output, console, print_answer, print_document, table_of
from kvplace.cli.parameters import Answer, InputFile, example_option, output_option
from kvplace.cli.progress import Progress
from kvplace.core.errors import ExitCode
from kvplace.core.quantity import counted, first_of
from kvplace.core.vm_stages import Percentiles

if TYPE_CHECKING:
    from rich.console import Console

    from kvplace.simulate.demo import DemoRefusal, DemoReport
    from kvplace.simulate.scenario import Scenario
    from kvplace.simulate.simulation import SimulationOutcome


@click.command("simulate", short_help="Simulate a load of VMs on a cluster of your machines.")
@click.option(
    "--scenario",
    type=InputFile(),
    metavar="FILE",
    help="The scenario, - for stdin (see `kvplace schema scenario`).",
)
@example_option("scenario")
@output_option(Answer.REPORT)
def command(scenario: str | None, output: Output) -> int:
    """Simulate VMs that arrive at a cluster and end, for each strategy and seed of a scenario.

    The report counts VMs that were placed, refused, refused although enough was free, and spread over more
    NUMA nodes or L3 caches than needed. It states how much of the cluster was in use at the first refusal and
    at the end, and how much was stranded: free CPUs without memory for them, free memory without CPUs.

    Equal scenarios give equal reports, except for times. Refused VMs are part of the answer: the exit code
    is 0. Ctrl-C ends early, with the report of the simulations so far, and exit code 130.
    """
    from kvplace.simulate.scenario import load_scenario
    from kvplace.simulate.simulation import simulate, simulation_document

    if scenario is None:
        raise click.UsageError(
            "name a scenario with --scenario FILE; `kvplace simulate --example` prints one as a start, and "
            "`kvplace demo` needs none"
        )
    chosen = load_scenario(Path(scenario))
    seeds = chosen.seeds if chosen.mix is not None else (None,)
    runs = [(strategy, seed) for strategy in chosen.strategies for seed in seeds]
    outcomes: list[SimulationOutcome] = []
    with Progress("simulating", len(runs) * chosen.arrivals, "VM") as progress:
        for number, (strategy, seed) in enumerate(runs):
            before, name = number * chosen.arrivals, strategy.value
            now = name if seed is None else f"{name}, seed {seed}"
            goes_on = partial(lambda before, now, arrived: progress.show(before + arrived, now), before, now)
            outcomes.append(simulate(chosen, strategy, seed, goes_on))
            if progress.interrupted:
                break
    print_answer(
        output,
        lambda: simulation_document(chosen, outcomes, interrupted=progress.interrupted),
        _table(chosen, outcomes),
    )
    if progress.interrupted and not output.is_document:
        click.echo(
            f"\ninterrupted in simulation {len(outcomes)} of {len(runs)}: the table counts the VMs so far"
        )
    return ExitCode.INTERRUPTED if progress.interrupted else ExitCode.DONE


def _table(scenario: Scenario, outcomes: list[SimulationOutcome]) -> Iterator[str]:
    from kvplace.simulate.simulation import simulation_summary

    head = f"{counted(len(scenario.nodes), 'node')}{_seeds(scenario)}"
    columns: list[Column[str]] = [Column(head, lambda title: title)]
    titles: list[str] = []
    for strategy in scenario.strategies:
        if found := [outcome for outcome in outcomes if outcome.strategy is strategy]:
            values = simulation_summary(found)
            columns.append(Column(strategy.value, values.__getitem__))
            titles = list(values)
    yield from table_of(columns, titles)


def _seeds(scenario: Scenario) -> str:
    if scenario.mix is None or len(scenario.seeds) == 1:
        return ""
    return f", means over {len(scenario.seeds)} seeds"


@click.command("demo", short_help="Place 500 VMs on an example cluster, without any set-up.")
@click.option("--vms", type=click.IntRange(1, 20_000), default=500, show_default=True, help="VMs to place.")
@click.option(
    "--nodes", type=click.IntRange(1, 5_000), default=24, show_default=True, help="Nodes of the cluster."
)
@click.option("--seed", type=int, default=1, show_default=True, help="Another seed draws other VMs.")
@output_option(Answer.REPORT)
def demo(vms: int, nodes: int, seed: int, output: Output) -> int:
    """Place VMs from vm-templates/ on an example cluster of well-known servers.

    Each VM goes through the same code as in a cluster: VMI admission, its virt-launcher pod, pod admission,
    the extender's filter, prioritize and bind, the node's ledger, and the hook that rewrites its libvirt
    domain. VMs that do not fit are part of the answer: the exit code is 0. Ctrl-C ends early, with the report
    of the VMs so far, and exit code 130.
    """
    import asyncio

    from kvplace.simulate.demo import DemoSettings, demo_document, run_demo

    with Progress("placing", vms, "VM") as progress:
        settings = DemoSettings(vms, nodes, seed)
        report = asyncio.run(run_demo(settings, lambda so_far: progress.show(so_far.done)))
    if output.is_document:
        print_document(demo_document(report), output)
    else:
        _print_demo(report, console(sys.stdout))
    if report.cpus_owned_twice:
        return ExitCode.FAILED
    return ExitCode.INTERRUPTED if progress.interrupted else ExitCode.DONE


def _print_demo(report: DemoReport, out: Console) -> None:
    from kvplace.cli.terminal_map import print_map
    from kvplace.simulate.demo import similar_refusals

    settings, drawing = report.settings, report.core_map()
    out.print(
        f"{counted(settings.vms, 'VM')} from vm-templates/ requested cores on "
        f"{counted(settings.nodes, 'server')}, one after the other. Each went through\n"
        "kvplace's webhooks, its answers to kube-scheduler, the claim in the node's ledger and the libvirt\n"
        "hook, as in a cluster.",
        highlight=False,
    )
    _print_rule(out, f"{drawing.name}, one of the servers, with the VMs on its cores")
    print_map(out, drawing, compact=True)
    example = report.example(drawing.name)
    if example is not None:
        from kvplace.simulate.demo import domain_diff

        _print_rule(out, f"how {example.name} is pinned: lines that the hook adds to its libvirt domain")
        _print_diff(domain_diff(example), out)
    _print_rule(out, "all VMs")
    _print_summary(report, similar_refusals(report), out)


def _print_rule(out: Console, title: str) -> None:
    from rich.rule import Rule

    out.print()
    out.print(Rule(title, align="left", style="dim"))


def _print_diff(lines: list[str], out: Console) -> None:
    from rich.text import Text

    styles = {"+": "green", "-": "red", "@": "cyan"}
    for line in lines:
        out.print(Text(line.expandtabs(2), style=styles.get(line[:1], "")), soft_wrap=True)


def _print_summary(report: DemoReport, refusals: list[list[DemoRefusal]], out: Console) -> None:
    from kvplace.simulate.demo_vms import has_mistakes

    ordered = report.settings.vms
    servers = len({topology.fingerprint for topology in report.machines.values()})
    floating = len(report.placed) - len(report.pinned)
    out.print(
        f"placed    {len(report.placed)} of {counted(ordered, 'VM')} on "
        f"{counted(len(report.machines), 'node')} of {counted(servers, 'server type')} "
        f"in {report.seconds:.1f} s" + (f" ({floating} of them unpinned, as requested)" if floating else "")
    )
    if report.done < ordered:
        out.print(f"          interrupted: {counted(ordered - report.done, 'VM')} not tried")
    out.print(f"NUMA      {_spread(report.numa_splits, 'NUMA node')}")
    out.print(f"sockets   {_spread(report.socket_splits, 'socket')}")
    share = report.owned_cpus / report.allocatable_cpus
    out.print(
        f"CPUs      {report.owned_cpus} of {report.allocatable_cpus} owned by one VM each ({share:.0%}), "
        f"{report.cpus_owned_twice} by two"
    )
    for title, seconds, meaning in (
        ("deciding", [vm.deciding_seconds for vm in report.placed], "node and cores of one VM"),
        ("per VM", [vm.seconds for vm in report.placed], "order to pinned domain; claims share writes"),
    ):
        latency = Percentiles.of(seconds)
        out.print(
            f"{title:<9} p50 {latency.p50 * 1e3:.1f} ms, p95 {latency.p95 * 1e3:.1f} ms, "
            f"max {latency.max * 1e3:.1f} ms ({meaning})"
        )
    mistakes = " (three VMs have mistakes on purpose)" if has_mistakes(ordered) and refusals else ""
    out.print(f"refused   {len(report.refused)}{mistakes}")
    for alike in refusals:
        names, first = first_of([vm.name for vm in alike], 1), alike[0]
        out.print(f"          {names}, by {first.by}: {first.reason}", soft_wrap=True)


def _spread(splits: Mapping[int, int], noun: str) -> str:
    return ", ".join(f"{counted(vms, 'VM')} on {counted(number, noun)}" for number, vms in splits.items())
