"""The commands of docs/kubectl.md run as they stand there."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.cli.calls import Caller
from tests.cli.live_cluster.small_cluster import SmallCluster

PAGE = Path(__file__).resolve().parents[3] / "docs" / "kubectl.md"
BLOCKS = re.findall(r"^```\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
COMMANDS = [line.removeprefix("kubectl kvplace ") for block in BLOCKS for line in block.splitlines()]


@pytest.fixture
def kubeconfig(cluster: SmallCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the namespace of `db` that of the context, in a folder with the VMs of the page."""
    content = json.loads(cluster.plane.kubeconfig.read_text())
    content["contexts"][0]["context"]["namespace"] = cluster.namespace
    (tmp_path / "kubeconfig").write_text(json.dumps(content))
    (tmp_path / "vms.jsonl").write_text('{"id": "new", "vcpus": 2}\n')
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.chdir(tmp_path)


def test_the_page_has_commands_of_every_kind() -> None:
    assert {command.split()[0] for command in COMMANDS} == {"get", "top", "map", "plan"}


@pytest.mark.usefixtures("kubeconfig")
@pytest.mark.parametrize("command", [command for command in COMMANDS if "-w" not in command.split()])
def test_a_command_of_the_page_runs(kvplace: Caller, cluster: SmallCluster, command: str) -> None:
    called = kvplace(*shlex.split(re.sub(r"worker-1(?!\.)", cluster.first, command)))
    assert called.code == 0, called.err
