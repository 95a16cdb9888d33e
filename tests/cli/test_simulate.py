"""`kvplace simulate` simulates a scenario and prints its report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvplace.cli.simulate_command import command
from kvplace.core.errors import BadBody, ExitCode
from tests.cli.calls import Caller

SMALL = """
nodes:
- {name: n, count: 2, machine: epyc-7502p}
mix:
- request: {vcpus: 8, memory: 16Gi}
requests: 20
strategies: [pack, spread]
"""


def play(tmp_path: Path, text: str, *more: str) -> str:
    path = tmp_path / "scenario.yaml"
    path.write_text(text)
    result = CliRunner().invoke(command, ["--scenario", str(path), *more], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    assert result.return_value == ExitCode.DONE
    return result.stdout


def test_the_table_has_a_column_for_each_strategy(tmp_path: Path) -> None:
    printed = play(tmp_path, SMALL)
    lines = [line.split() for line in printed.splitlines() if line.strip()]
    assert lines[0] == ["2", "nodes", "pack", "spread"]
    assert ["VMs", "placed", "/", "refused", "14", "/", "6", "14", "/", "6"] in lines


def test_json_has_a_run_for_each_strategy_and_seed(tmp_path: Path) -> None:
    document = json.loads(play(tmp_path, SMALL, "-o", "json"))
    assert document["kind"] == "SimulationReport"
    assert [(run["strategy"], run["seed"]) for run in document["runs"]] == [("pack", 1), ("spread", 1)]
    assert document["runs"][0]["firstRefusal"]["placedBefore"] == 14
    assert document["runs"][0]["reasons"] == {"NoSocketFits": 6}


def test_an_invalid_scenario_is_an_error_that_names_file_and_key(tmp_path: Path) -> None:
    with pytest.raises(BadBody) as error:
        play(tmp_path, SMALL.replace("vcpus: 8", "vcpus: many"))
    assert str(error.value).endswith(
        "scenario.yaml: mix[0].request: vcpus is 'many'; it must be a whole number from 1 to 4096"
    )


def test_the_scenario_may_be_stdin(kvplace: Caller) -> None:
    called = kvplace("simulate", "--scenario", "-", "-o", "json", stdin=SMALL)
    assert called.code == 0
    assert len(json.loads(called.out)["runs"]) == 2
    called = kvplace("simulate", "--scenario", "-", stdin="")
    assert (called.code, called.out) == (2, "")
    assert called.err.startswith("kvplace: <stdin> contains nothing")


def test_without_a_scenario_nothing_long_begins_and_the_first_step_is_named(kvplace: Caller) -> None:
    called = kvplace("simulate")
    assert (called.code, called.out) == (2, "")
    assert called.err == (
        "kvplace: name a scenario with --scenario FILE; `kvplace simulate --example` prints one as a start, "
        "and `kvplace demo` needs none (see `kvplace simulate --help`)\n"
    )
