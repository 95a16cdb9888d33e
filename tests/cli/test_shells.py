"""Real shells complete what a user types, with the script that `kvplace completion` prints."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.terminal import Terminal

PROGRAMS = {
    "kvplace": "from kvplace.cli.main import main; main()",
    "kubectl-kvplace": "from kvplace.cli.main import main; main()",
    "kubectl_complete-kvplace": "from kvplace.cli.main import answer_kubectl; answer_kubectl()",
}
START = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
PREPARE = {
    "bash": "source <(kvplace completion bash)",
    "zsh": "autoload -U compinit && compinit -u -d $PWD/.dump && source <(kvplace completion zsh)",
}


KUBECONFIG = """
apiVersion: v1
kind: Config
contexts:
- {name: production, context: {}}
- {name: staging, context: {}}
"""
LEDGER = """
{"kind": "NodeLedger", "metadata": {"name": "worker-1"}, "spec": {"owners": {}, "claims": {
"uid-of-database": {"namespace": "default", "pod": "database", "policy": "share", "cpus": "2-3",
"since": "2026-01-01T00:00:00Z"}}}}
"""


@pytest.fixture
def commands(tmp_path: Path) -> dict[str, str]:
    """An environment in which the programs of the wheel are on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, program in PROGRAMS.items():
        file = folder / name
        file.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{program}" "$@"\n', encoding="utf-8")
        file.chmod(0o755)
    (tmp_path / ".kube").mkdir()
    (tmp_path / ".kube" / "config").write_text(KUBECONFIG, encoding="utf-8")
    (tmp_path / "placed.json").write_text(LEDGER, encoding="utf-8")
    return {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(tmp_path), "KUBECONFIG": ""}


@pytest.fixture(params=["bash", pytest.param("zsh", marks=pytest.mark.debian_packages)])
def terminal(request: pytest.FixtureRequest, commands: dict[str, str], tmp_path: Path) -> Iterator[Terminal]:
    """A shell that has read its script, in a folder with one file."""
    shell = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed (apt-get install {shell})")
    (tmp_path / "vms-of-mine.json").write_text("", encoding="utf-8")
    with Terminal(START[shell], commands) as opened:
        opened.type(f"cd {tmp_path} && {PREPARE[shell]} && echo rea''dy\n")
        opened.read_until("ready")
        yield opened


def test_tab_completes_commands_options_words_server_types_and_files(terminal: Terminal) -> None:
    terminal.type("kvplace topol\t")
    terminal.read_until("ogy")
    terminal.type("epyc-75\t")
    terminal.read_until("02p")
    terminal.type("-o wi\t")
    terminal.read_until("de")
    terminal.type("\x15kvplace plan --strat\t")
    terminal.read_until("egy")
    terminal.type("spr\t")
    terminal.read_until("ead")
    terminal.type("\x15kvplace plan --strategy=bal\t")
    terminal.read_until("ance")
    terminal.type("--requests vms\t")
    terminal.read_until("-of-mine.json")
    terminal.type("\x15kvplace get vms --context prod\t")
    terminal.read_until("uction")
    terminal.type("\x15kvplace map epyc-7502p --placements placed.json --node work\t")
    terminal.read_until("er-1")
    terminal.type("--found data\t0-1\x01echo \x05 | tr a-z A-Z\n")
    terminal.read_until("--FOUND DATABASE=0-1")
    terminal.type("\x15kvplace help compl\t")
    terminal.read_until("etion")


def test_tab_shows_the_possible_values(terminal: Terminal) -> None:
    terminal.type("kvplace plan --strategy \t\t")
    assert "pack" in terminal.read_until("spread")


def test_a_line_that_makes_no_sense_stays_as_it_is(terminal: Terminal) -> None:
    terminal.type("kvplace mapp --no-such-option \t")
    terminal.type("\x15echo still he''re\n")
    shown = terminal.read_until("still here")
    assert "Error" not in shown
    assert "Traceback" not in shown


@pytest.mark.debian_packages
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("kvplace topol", "topology"),
        ("kvplace topology epyc-75", "epyc-7502p"),
        ("kvplace plan --strategy sp", "spread"),
        ("kvplace plan --strategy=sp", "--strategy=spread"),
        ("kvplace schema scen", "scenario"),
        ("kvplace get vms --context prod", "production"),
        ("kvplace map epyc-7502p --placements placed.json --found data", "database="),
    ],
)
def test_fish_completes_with_descriptions(commands: dict[str, str], line: str, offered: str) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed (apt-get install fish)")
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"kvplace completion fish | source; complete -C '{line}'"],
        env={**os.environ, **commands},
        cwd=commands["HOME"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert offered in [found.split("\t")[0] for found in done.stdout.splitlines()]
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["topology", "epyc-75"], ["epyc-7502p", ":0"]),
        (["plan", "--strategy", "sp"], ["spread", ":4"]),
        (["plan", "--strategy=sp"], ["--strategy=spread", ":4"]),
        (["plan", "--strat"], ["--strategy\tWhich nodes VMs go to while everything fits.", ":4"]),
        (["mapp", "--x", ""], [":4"]),
        (["plan", "--requests", "x"], [":0"]),
        (["get", "vms", "--context", "prod"], ["production", ":4"]),
        (["map", "epyc-7502p", "--placements", "placed.json", "--node", "w"], ["worker-1", ":4"]),
        (["map", "epyc-7502p", "--placements", "placed.json", "--found", "d"], ["database=", ":6"]),
    ],
)
def test_kubectl_gets_words_with_their_descriptions(
    commands: dict[str, str], words: list[str], lines: list[str]
) -> None:
    done = subprocess.run(
        ["kubectl_complete-kvplace", *words],
        env={**os.environ, **commands},
        cwd=commands["HOME"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == lines
    assert done.stderr == ""
