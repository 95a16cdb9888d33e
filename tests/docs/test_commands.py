"""The commands of the pages that need no cluster run as they stand there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from kvplace.machines.server_types import machine_names
from tests.docs.blocks import block
from tests.docs.shell import Shell

MACHINE = "2x-epyc-9354-nps2"


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def test_the_first_command_prints_the_output_on_the_first_page(shell: Shell) -> None:
    command, *shown = block("README.md", "$ kvplace place").splitlines()
    (printed,) = shell.run(command.removeprefix("$ "))
    assert printed.splitlines() == shown


def test_the_commands_of_the_first_page_that_need_no_cluster_run(shell: Shell) -> None:
    commands = block("README.md", "kvplace topology").splitlines()
    place, topology, draw, plan, simulate = commands
    shell.run(topology)
    assert MACHINE in machine_names()

    database = Path("vm-templates/database.yaml").read_text()
    (shell.folder / "vm.yaml").write_text(database)
    place = place.partition("#")[0]
    (answer,) = shell.run(place, instead={"FILE": MACHINE})
    assert answer.startswith(f"VirtualMachine database fits on {MACHINE}: 16 vCPUs, 64Gi\n")
    (shell.folder / "requests").write_text('{"id": "db", "vcpus": 8}\n{"id": "web", "vcpus": 2}\n')
    shell.run(f"{place} -o json > placed", instead={"FILE": MACHINE})
    shell.run(draw, instead={"map FILE": f"map {MACHINE}", "--placements FILE": "--placements placed"})
    assert (shell.folder / "map.svg").read_text().startswith("<svg")

    (planned,) = shell.run(plan, instead={"FILE": "requests"})
    assert "2 of 2 VMs" in planned

    scenario = {
        "nodes": [{"name": "worker", "count": 2, "machine": MACHINE}],
        "mix": [{"share": 1, "request": {"vcpus": 8}}],
        "requests": 20,
    }
    (shell.folder / "scenario.yaml").write_text(yaml.safe_dump(scenario))
    (simulated,) = shell.run(simulate, instead={"FILE": "scenario.yaml"})
    assert "pack" in simulated


def test_a_plan_of_the_requests_of_the_reference_is_drawn(shell: Shell) -> None:
    (shell.folder / "vms.json").write_text(block("docs/reference/cli.md", '{"id": "db"'))
    _, drawn = shell.run(block("docs/reference/cli.md", "kvplace plan --requests vms.json"))
    plan = json.loads((shell.folder / "plan.json").read_text())
    assert plan["summary"]["placed"]["vms"] == 21
    owned = sum(len(vm["placement"]["vcpus"]) for vm in plan["placed"] if vm["node"] == "edge-01")
    assert owned
    assert f" {owned} owned" in drawn


def test_the_schema_is_written_where_the_page_states(shell: Shell) -> None:
    shell.run(block("docs/reference/cli.md", "kvplace schema scenario"))
    assert json.loads((shell.folder / "scenario.schema.json").read_text())["$schema"]
