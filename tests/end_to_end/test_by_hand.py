"""`./make cluster`: the cluster in which a person tries kvplace."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.usefixtures("kubernetes_programs", "kubevirt_programs")
def test_the_printed_lines_lead_to_a_vm_that_the_plugin_shows_and_ctrl_c_removes_the_cluster() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "harness.kvplace_cluster", "--nodes=1", "--replicas=1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as cluster:
        assert cluster.stdout is not None
        printed = "".join(cluster.stdout.readline() for _ in range(2))
        environment = {name: os.environ[name] for name in ("PATH", "HOME")}

        def run(command: str) -> str:
            return subprocess.run(
                ["sh", "-ec", printed + command], env=environment, capture_output=True, text=True, check=True
            ).stdout

        run("kubectl apply -f vm-templates/web-server.yaml")
        run("kubectl wait --for=create vmi/web-server --timeout=120s")
        run("kubectl wait --for=jsonpath='{.status.phase}'=Scheduled vmi/web-server --timeout=120s")
        assert run("kubectl kvplace get vms -o name") == "virtualmachineinstance.kubevirt.io/web-server\n"
        assert "web-server" in run("kubectl kvplace map node-0")
        cluster.send_signal(signal.SIGINT)
        assert cluster.wait() == 0
    (folder,) = re.findall("KUBECONFIG=(.*)/", printed)
    assert not Path(folder).exists()
