"""`kvplace simulate`: a load of VMs on a cluster, placed by the code that places VMs in a cluster."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvplace.cli.files import InputFile
from kvplace.cli.output import Output, output_option, print_document, print_table, say
from kvplace.core.errors import ExitCode

if TYPE_CHECKING:
    from kvplace.simulate.scenario import Scenario
    from kvplace.simulate.simulation import Outcome

_PROGRESS_INTERVAL_S = 2.0


@click.command("simulate", short_help="Simulate a load of VMs on a cluster of your machines.")
@click.option(
    "--scenario",
    type=InputFile(),
    metavar="FILE",
    help="The scenario, - for stdin (see `kvplace schema scenario`); default: the example.",
)
@click.option("--example", is_flag=True, help="Print the example scenario, as a start for your own.")
@output_option(Output.TABLE, Output.JSON)
def command(scenario: str | None, example: bool, output: Output) -> int:
    """Simulate VMs that arrive at a cluster and end, for each strategy and seed of a scenario.

    The report counts VMs that were placed, refused, refused although enough was free, and spread over more
    NUMA nodes or L3 caches than needed. It says how much of the cluster was in use at the first refusal and
    at the end, and how much was stranded: free CPUs without memory for them, free memory without CPUs.

    Equal scenarios give equal reports, except for times. Refused VMs are part of the answer: the exit code
    is 0.
    """
    from kvplace.simulate.scenario import example_scenario, example_text, load_scenario
    from kvplace.simulate.simulation import simulate
    from kvplace.simulate.simulation_report import report_document

    if example:
        click.echo(example_text(), nl=False)
        return ExitCode.DONE
    chosen = example_scenario() if scenario is None else load_scenario(Path(scenario))
    seeds = chosen.seeds if chosen.mix is not None else (None,)
    runs = [(strategy, seed) for strategy in chosen.strategies for seed in seeds]
    outcomes = []
    reported = time.monotonic()
    for number, (strategy, seed) in enumerate(runs):
        if time.monotonic() - reported > _PROGRESS_INTERVAL_S:
            reported = time.monotonic()
            say(f"{number} of {len(runs)} simulations done")
        outcomes.append(simulate(chosen, strategy, seed))
    if output is Output.JSON:
        print_document(report_document(chosen, outcomes), output)
    else:
        _print(chosen, outcomes)
    return ExitCode.DONE


def _print(scenario: Scenario, outcomes: list[Outcome]) -> None:
    from kvplace.simulate.simulation_report import summary

    columns = [
        summary([outcome for outcome in outcomes if outcome.strategy is strategy])
        for strategy in scenario.strategies
    ]
    head = (f"{len(scenario.nodes)} nodes{_seeds(scenario)}", *(each.value for each in scenario.strategies))
    rows = ((line[0][0], *(value for _, value in line)) for line in zip(*columns, strict=True))
    print_table([head, *rows])


def _seeds(scenario: Scenario) -> str:
    if scenario.mix is None or len(scenario.seeds) == 1:
        return ""
    return f", means over {len(scenario.seeds)} seeds"
