"""`kvplace simulate`: how a cluster fares under a load, decided by the code that decides in a cluster."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvplace.cli.output import Output, console, output_option, print_json, say
from kvplace.core.errors import ExitCode

if TYPE_CHECKING:
    from rich.console import Console

    from kvplace.simulate.scenario import Scenario
    from kvplace.simulate.simulation import Outcome

_PAUSE = 2.0


@click.command("simulate", short_help="Play a load of VMs on a cluster of your machines.")
@click.option(
    "--scenario",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Nodes and load, in YAML or JSON; without it the example is played.",
)
@click.option("--example", is_flag=True, help="Print the example scenario, to change it and play it.")
@output_option
def command(scenario: Path | None, example: bool, output: Output) -> int:
    """Let VMs come to a cluster and go, for each strategy and seed of a scenario.

    Tells how many were placed and refused, refused while enough was free, spread over more NUMA nodes or
    caches than needed; how much of the cluster was in use at the first refusal and at the end, and how
    much was stranded: free CPUs without memory to go with them, free memory without CPUs.

    Everything but the times is the same whenever it is played.
    """
    from kvplace.simulate.scenario import example_scenario, example_text, load_scenario
    from kvplace.simulate.simulation import simulate
    from kvplace.simulate.simulation_report import report_document

    if example:
        click.echo(example_text(), nl=False)
        return ExitCode.DONE
    wanted = example_scenario() if scenario is None else load_scenario(scenario)
    seeds = wanted.seeds if wanted.mix is not None else (None,)
    plays = [(strategy, seed) for strategy in wanted.strategies for seed in seeds]
    outcomes = []
    told = time.monotonic()
    for number, (strategy, seed) in enumerate(plays):
        if time.monotonic() - told > _PAUSE:
            told = time.monotonic()
            say(f"{number} of {len(plays)} simulations done")
        outcomes.append(simulate(wanted, strategy, seed))
    if output is Output.JSON:
        print_json(report_document(wanted, outcomes))
    else:
        _print(wanted, outcomes, console())
    return ExitCode.DONE


def _print(scenario: Scenario, outcomes: list[Outcome], out: Console) -> None:
    from rich import box
    from rich.table import Table

    from kvplace.simulate.simulation_report import summary

    columns = [
        (strategy, summary([outcome for outcome in outcomes if outcome.strategy is strategy]))
        for strategy in scenario.strategies
    ]
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(f"{len(scenario.nodes)} nodes" + _seeds(scenario))
    for strategy, _ in columns:
        table.add_column(strategy.value)
    for row in range(len(columns[0][1])):
        table.add_row(columns[0][1][row][0], *(told[row][1] for _, told in columns))
    out.print(table)


def _seeds(scenario: Scenario) -> str:
    if scenario.mix is None or len(scenario.seeds) == 1:
        return ""
    return f", means over {len(scenario.seeds)} seeds"
