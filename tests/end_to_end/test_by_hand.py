"""`./make cluster`: the cluster in which a person tries kvplace."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest


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

            (url,) = re.findall(r"the web map: (\S+)", said)
            (make_token,) = re.findall(r"kubectl create token .*", said)
            authority = run("kubectl config view -o jsonpath='{.clusters[0].cluster.certificate-authority}'")
            question = urllib.request.Request(
                f"{url}/api/cluster", headers={"Authorization": f"Bearer {run(make_token).strip()}"}
            )
            trusted = urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=authority))
            no_proxy = urllib.request.ProxyHandler({})
            with urllib.request.build_opener(no_proxy, trusted).open(question) as answer:
                assert [node["name"] for node in json.load(answer)["nodes"]] == ["node-0"]
        finally:
            cluster.send_signal(signal.SIGINT)
        assert cluster.wait() == 0
    (folder,) = re.findall("KUBECONFIG=(.*)/", printed)
    assert not Path(folder).exists()
