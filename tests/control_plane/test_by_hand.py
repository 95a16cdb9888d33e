"""The cluster that a person starts by hand."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.usefixtures("kubernetes_programs")
def test_the_printed_lines_lead_to_a_cluster_that_ctrl_c_removes() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "harness.control_plane", "--nodes=2", "--cpus=4"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as cluster:
        assert cluster.stdout is not None
        kubeconfig, path = (cluster.stdout.readline() for _ in range(2))
        assert kubeconfig.startswith("export KUBECONFIG=")
        assert path.startswith("export PATH=")

        environment = {name: os.environ[name] for name in ("PATH", "HOME")}
        script = f"{kubeconfig}{path}kubectl create deployment d --image=i -o name; kubectl get nodes -o name"
        said = subprocess.run(
            ["sh", "-ec", script], env=environment, capture_output=True, text=True, check=True
        )
        assert said.stdout.split() == ["deployment.apps/d", "node/node-0", "node/node-1"]

        cluster.send_signal(signal.SIGINT)
        assert cluster.wait() == 0
    (folder,) = re.findall("KUBECONFIG=(.*)/", kubeconfig)
    assert not Path(folder).exists()
