"""The real node that a person starts by hand."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.real_node.control_groups import PREFIX


@pytest.mark.usefixtures("sandbox_machine", "node_programs", "kubernetes_programs", "kubevirt_programs")
def test_the_printed_lines_lead_to_a_real_node_that_ctrl_c_removes() -> None:
    with _started() as node:
        assert node.stdout is not None
        kubeconfig, path = (node.stdout.readline() for _ in range(2))
        assert kubeconfig.startswith("export KUBECONFIG=")
        assert path.startswith("export PATH=")

        environment = {name: os.environ[name] for name in ("PATH", "HOME")}
        script = (
            f"{kubeconfig}{path}kubectl get nodes -o name; kubectl get crd nodeledgers.kvplace.io -o name"
        )
        said = subprocess.run(
            ["sh", "-ec", script], env=environment, capture_output=True, text=True, check=True
        )
        assert said.stdout.split() == [
            "node/node-1",
            "customresourcedefinition.apiextensions.k8s.io/nodeledgers.kvplace.io",
        ]
        groups = _groups_of_children(node.pid)
        assert groups

        node.send_signal(signal.SIGINT)
        assert node.wait() == 0
    (folder,) = re.findall("KUBECONFIG=(.*)/", kubeconfig)
    assert not Path(folder).exists()
    assert not any(group.exists() for group in groups)


@contextlib.contextmanager
def _started() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "harness.real_node"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as node:
        try:
            yield node
        finally:
            node.kill()  # no effect on one that has ended as it should


def _groups_of_children(parent: int) -> list[Path]:
    """Name the control groups of the sandboxes that a process has started, from whichever thread."""
    lists = Path(f"/proc/{parent}/task").glob("*/children")
    children = [child for found in lists for child in found.read_text().split()]
    return [path for child in children for path in Path("/sys/fs/cgroup").glob(f"*/{PREFIX}-{child}")]
