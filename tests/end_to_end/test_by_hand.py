"""`./make cluster`: the cluster in which a person tries kvplace."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from harness.waiting import PATIENCE_S
from tests.docs.blocks import block


@pytest.mark.usefixtures("kubernetes_programs", "kubevirt_programs")
def test_the_printed_lines_lead_to_a_vm_that_plugin_and_web_map_show_and_ctrl_c_removes_the_cluster() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "harness.kvplace_cluster", "--nodes=1", "--replicas=1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as cluster:
        assert cluster.stdout is not None
        assert cluster.stderr is not None
        try:
            printed = "".join(cluster.stdout.readline() for _ in range(2))
            said = "".join(itertools.takewhile(lambda line: not line.startswith("Ctrl-C"), cluster.stderr))
            environment = {name: os.environ[name] for name in ("PATH", "HOME")}

            def run(command: str) -> str:
                return subprocess.run(
                    ["sh", "-ec", printed + command],
                    env=environment,
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout

            run("kubectl apply -f vm-templates/web-server.yaml")
            run("kubectl wait --for=create vmi/web-server --timeout=120s")
            run("kubectl wait --for=jsonpath='{.status.phase}'=Scheduled vmi/web-server --timeout=120s")
            assert run("kubectl kvplace get vms -o name") == "virtualmachineinstance.kubevirt.io/web-server\n"
            assert "web-server" in run("kubectl kvplace map node-0")

            assert "the web map: kubectl kvplace web\n" in said
            command = block("docs/web.md", "kubectl kvplace web").strip()
            shown = _read_map(f"{printed}exec {command} --no-browser")
            assert [node["name"] for node in shown] == ["node-0"]
        finally:
            cluster.send_signal(signal.SIGINT)
        assert cluster.wait() == 0
    (folder,) = re.findall("KUBECONFIG=(.*)/", printed)
    assert not Path(folder).exists()


def _read_map(command: str) -> list[Any]:
    """Run the map, read its nodes, and end it."""
    with subprocess.Popen(
        ["sh", "-ec", command],
        env={name: os.environ[name] for name in ("PATH", "HOME")},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        (url,) = re.findall(r"http://\S+", process.stderr.readline())
        no_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with no_proxy.open(f"{url}api/cluster") as answer:
            nodes: list[Any] = json.load(answer)["nodes"]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    return nodes
