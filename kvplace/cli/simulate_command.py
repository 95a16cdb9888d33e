"""`kvplace simulate`: a load of VMs on a cluster, placed by the code that places VMs in a cluster."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvplace.cli.output import Output, print_document, print_table
from kvplace.cli.parameters import Answer, InputFile, example_option, output_option
from kvplace.cli.progress import Progress
from kvplace.core.errors import ExitCode

if TYPE_CHECKING:
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
    is 0. Ctrl-C ends early, with the report of what was run, and exit code 130.
    """
    from kvplace.simulate.scenario import load_scenario
    from kvplace.simulate.simulation import report_document, simulate

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
            goes_on = partial(_show, progress, before, name if seed is None else f"{name}, seed {seed}")
            outcomes.append(simulate(chosen, strategy, seed, goes_on))
            if progress.interrupted:
                break
    if output.is_document:
        print_document(report_document(chosen, outcomes, interrupted=progress.interrupted), output)
    else:
        _print(chosen, outcomes)
        if progress.interrupted:
            click.echo(
                f"\ninterrupted in simulation {len(outcomes)} of {len(runs)}: the table counts the VMs so far"
            )
    return ExitCode.INTERRUPTED if progress.interrupted else ExitCode.DONE


def _show(progress: Progress, before: int, name: str, arrived: int) -> bool:
    return progress.show(before + arrived, name)


def _print(scenario: Scenario, outcomes: list[SimulationOutcome]) -> None:
    from kvplace.core.quantity import counted
    from kvplace.simulate.simulation import summary

    by_strategy = {
        strategy: [outcome for outcome in outcomes if outcome.strategy is strategy]
        for strategy in scenario.strategies
    }
    columns = [summary(found) for found in by_strategy.values() if found]
    heads = [strategy.value for strategy, found in by_strategy.items() if found]
    head = (f"{counted(len(scenario.nodes), 'node')}{_seeds(scenario)}", *heads)
    rows = ((line[0][0], *(value for _, value in line)) for line in zip(*columns, strict=True))
    print_table([head, *rows])


def _seeds(scenario: Scenario) -> str:
    if scenario.mix is None or len(scenario.seeds) == 1:
        return ""
    return f", means over {len(scenario.seeds)} seeds"
