"""`-o` offers the same words wherever it means the same."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml

from kvplace.cli.main import cli
from kvplace.cli.parameters import Answer
from tests.cli.calls import Caller

SCENARIO = """
nodes:
- {name: n, machine: epyc-7502p}
mix:
- request: {vcpus: 8, memory: 16Gi}
requests: 5
strategies: [pack]
"""
REQUEST = '{"vcpus": 2}\n'
OFFLINE: dict[str, tuple[Answer, list[str], str]] = {
    "place": (Answer.REPORT, ["place", "--topology", "epyc-7502p"], REQUEST),
    "plan": (Answer.LIST, ["plan", "--requests", "-"], REQUEST),
    "topology": (Answer.LIST, ["topology", "epyc-7502p"], ""),
    "simulate": (Answer.REPORT, ["simulate", "--scenario", "-"], SCENARIO),
    "demo": (Answer.REPORT, ["demo", "--vms", "4", "--nodes", "2"], ""),
    "version": (Answer.REPORT, ["version", "--client"], ""),
    "schema": (Answer.DOCUMENT, ["schema", "rollout"], ""),
}
ON_A_CLUSTER = {
    "get": Answer.LIST,
    "top": Answer.LIST,
    "rollout create": Answer.LIST,
    "rollout resume": Answer.LIST,
    "rollout status": Answer.LIST,
    "rollout list": Answer.LIST,
    "defragment": Answer.LIST,
    "evacuate": Answer.LIST,
    "explain": Answer.REPORT,
    "doctor": Answer.REPORT,
    "describe-node": Answer.DOCUMENT,
}
OF_ITS_OWN = {"map"}
"""It draws, and `-o` may name a file."""


def commands(group: click.Group, *before: str) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, *before, name)
        else:
            yield " ".join((*before, name)), command


def choices(command: click.Command) -> tuple[str, ...] | None:
    for option in command.params:
        if "--output" in option.opts:
            return tuple(getattr(option.type, "choices", ()))
    return None


def test_every_command_that_prints_an_answer_offers_the_forms_of_its_kind() -> None:
    offered = {name: found for name, command in commands(cli) if (found := choices(command)) is not None}
    wanted = {name: answer for name, (answer, _, _) in OFFLINE.items()} | ON_A_CLUSTER
    assert {name: found for name, found in offered.items() if name not in OF_ITS_OWN} == {
        name: tuple(output.value for output in answer.value) for name, answer in wanted.items()
    }


def test_the_reference_lists_the_same_forms_for_the_same_commands() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "cli.md").read_text()
    table = text.partition("### Forms of an answer")[2].partition("\n### ")[0]
    written: dict[str, tuple[str, ...]] = {}
    for line in table.splitlines():
        cells = [re.findall(r"`([^`]+)`", cell) for cell in line.split("|")]
        if len(cells) == 5 and cells[2]:
            written |= {name: tuple(cells[2]) for name in cells[3]}
    assert written == {
        name: found
        for name, command in commands(cli)
        if (found := choices(command)) is not None and name not in OF_ITS_OWN
    }


@pytest.mark.parametrize("name", OFFLINE)
def test_every_form_is_printed(kvplace: Caller, name: str) -> None:
    answer, arguments, stdin = OFFLINE[name]
    printed = {output.value: kvplace(*arguments, "-o", output.value, stdin=stdin) for output in answer.value}
    assert {called.code for called in printed.values()} == {0}
    assert all(called.out.strip() for called in printed.values())
    as_json, as_yaml = json.loads(printed["json"].out), yaml.safe_load(printed["yaml"].out)
    if name in ("demo", "simulate"):  # the times in them differ from run to run
        assert set(as_json) == set(as_yaml)
    else:
        assert as_json == as_yaml
