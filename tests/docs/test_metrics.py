"""docs/reference/metrics.md lists the metrics that each process exposes, with the same labels."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.docs.reading import PROJECT, page, section

_LIST = """
import sys
from importlib import import_module
from prometheus_client import REGISTRY
import_module(sys.argv[1])
for metric in REGISTRY._collector_to_names:
    name = getattr(metric, "_name", "")
    if name.startswith("kvplace_"):
        suffix = "_total" if metric._type == "counter" else ""
        print(name + suffix, metric._type, ",".join(metric._labelnames))
"""
_NAME = re.compile(r"kvplace(_[a-z0-9]+){2,}")


def exposed(process: str) -> set[tuple[str, str, tuple[str, ...]]]:
    """List the name, type and labels of the metrics of `serve` or `agent`, from a process of its own."""
    printed = subprocess.run(
        [sys.executable, "-c", _LIST, f"kvplace.{process}.process"],
        capture_output=True,
        check=True,
        text=True,
        cwd=PROJECT,
    ).stdout
    lines = [line.split(" ") for line in printed.splitlines()]
    return {(name, kind, tuple(filter(None, labels.split(",")))) for name, kind, labels in lines}


TABLES = {
    "serve": ("Exposed by `serve`", "Exposed by both"),
    "agent": ("Exposed by the agent", "Exposed by both"),
}


def documented(process: str) -> set[tuple[str, str, tuple[str, ...]]]:
    """List the metrics of its tables; a colon and values, up to a semicolon, may follow a label."""
    found = set()
    listed = page("reference/metrics.md")
    for line in "".join(section(listed, heading) for heading in TABLES[process]).splitlines():
        if line.startswith("| `kvplace_"):
            name, kind, labels, _ = (cell.strip() for cell in line.split("|")[1:-1])
            words = [re.match(r"`(\w+)`", label.strip()) for label in labels.split(";")]
            found.add((name.strip("`"), kind, tuple(word[1] for word in words if word)))
    return found


@pytest.mark.parametrize("process", ["serve", "agent"])
def test_each_process_exposes_the_metrics_that_the_reference_lists(process: str) -> None:
    assert documented(process) == exposed(process)


@pytest.mark.parametrize("process", ["serve", "agent"])
def test_names_state_component_noun_and_unit(process: str) -> None:
    for name, kind, _ in exposed(process):
        assert _NAME.fullmatch(name), name
        assert name.endswith("_total") == (kind == "counter")
        if kind in {"histogram", "summary"}:
            assert name.endswith("_seconds")
