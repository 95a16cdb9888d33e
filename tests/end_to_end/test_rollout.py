"""Rollouts in a cluster with KubeVirt's admission and virt-controller; only nodes and guests are played."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from harness.control_plane.cluster import ControlPlane, RequestRefused
from harness.control_plane.kubevirt_parts import KubeVirt
from harness.control_plane.watching import wait_for
from harness.kvplace_cluster.installation import Installation, described_nodes
from harness.kvplace_cluster.machines import node_shape, two_socket_machine
from harness.kvplace_cluster.played_vms import played_vms
from harness.kvplace_cluster.vms import VMIS, VMS
from tests.cli.terminal import Terminal
from tests.docs.blocks import block
from tests.docs.reading import PROJECT

NAMES = ["rolled-0", "rolled-1"]
ROLES = "/apis/rbac.authorization.k8s.io/v1"
Json = dict[str, Any]


@pytest.fixture(scope="module")
def shop(cluster: ControlPlane, virt: KubeVirt, kvplace: Installation) -> Iterator[str]:
    """Two nodes of 30 CPUs to give out, and a namespace whose VMs run and are pinned once they are bound."""
    machine = two_socket_machine()
    namespace = cluster.create_namespace("shop")
    for number, name in enumerate(NAMES, 1):
        cluster.request("POST", "/api/v1/nodes", node_shape(name, machine).manifest(f"172.16.9.{number}"))
    try:
        with described_nodes(kvplace, dict.fromkeys(NAMES, machine)), played_vms(cluster, namespace):
            yield namespace
            cluster.remove_namespace(namespace)
    finally:
        for name in NAMES:
            cluster.request("DELETE", f"/api/v1/nodes/{name}")


def started(cluster: ControlPlane, *arguments: str, kubeconfig: Path | None = None) -> subprocess.Popen[str]:
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig or cluster.kubeconfig)}
    return subprocess.Popen(
        [sys.executable, "-m", "kvplace", "rollout", *arguments],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        cwd=PROJECT,
    )  # fmt: skip


def called(
    cluster: ControlPlane, *arguments: str, kubeconfig: Path | None = None
) -> subprocess.CompletedProcess[str]:
    with started(cluster, *arguments, kubeconfig=kubeconfig) as process:
        out, err = process.communicate(timeout=240)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def made(cluster: ControlPlane, namespace: str) -> dict[str, str]:
    """Return the UIDs of all VMs by their names."""
    path = f"/apis/kubevirt.io/v1/namespaces/{namespace}/{VMS}"
    return {vm["metadata"]["name"]: vm["metadata"]["uid"] for vm in cluster.request("GET", path)["items"]}


def test_the_commands_of_the_page_do_as_the_page_shows(cluster: ControlPlane, shop: str) -> None:
    commands = block("docs/rollout.md", "kvplace rollout list")
    answers: list[subprocess.CompletedProcess[str]] = []
    for line in commands.splitlines():
        words = line.replace("--count 500", "--count 3").removeprefix("kvplace rollout ").split()
        answers.append(called(cluster, *words, "-n", shop))
        assert answers[-1].returncode == 0, (line, answers[-1])
        if "--dry-run" in words:
            assert made(cluster, shop) == {}
        elif "create" in words:
            assert sorted(made(cluster, shop)) == ["web-01", "web-02", "web-03"]
    planned, created, listed, status, resumed, _ = answers
    assert "3 VMs will get cores on" in planned.stdout
    assert listed.stdout == "NAME\nweb\n"
    for answer in (created, status, resumed):
        assert re.search(r"pinned +3 of 3", answer.stdout), answer
    assert "3 created, 3 bound, 3 running, 3 pinned; ready: 3 of 3 VMs" in created.stderr
    assert made(cluster, shop) == {}


def test_the_script_of_the_page_runs(cluster: ControlPlane, shop: str) -> None:
    script = block("docs/rollout.md", "import asyncio")
    environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}
    done = subprocess.run(
        [sys.executable, "-c", script.replace('"count": 6', '"count": 2')],
        capture_output=True, text=True, check=False, env=environment, cwd=PROJECT, timeout=240,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "2 created, 2 bound, 2 running, 2 pinned; ready: 2 of 2 VMs\n"
    assert made(cluster, shop) == {}


def cordon(cluster: ControlPlane, *, unschedulable: bool) -> None:
    """Keep new pods off all nodes, or let them come again."""
    body = {"spec": {"unschedulable": unschedulable}}
    for name in NAMES:
        cluster.request("PATCH", f"/api/v1/nodes/{name}", body, content_type="application/merge-patch+json")


def test_an_interrupted_rollout_is_resumed_with_every_vm_once(cluster: ControlPlane, shop: str) -> None:
    template = str(PROJECT / "vm-templates" / "web-server.yaml")
    arguments = ["--count", "5", "--name", "stop", "--max-in-flight", "2", "--yes", "-o", "json", "-n", shop]
    vms = f"/apis/kubevirt.io/v1/namespaces/{shop}/{VMS}"
    cordon(cluster, unschedulable=True)
    refused = called(cluster, "create", "-f", template, *arguments)
    assert refused.returncode == 3
    assert "will not fit: 2 nodes: the node is cordoned (spec.unschedulable)" in refused.stderr
    assert made(cluster, shop) == {}
    with started(cluster, "create", "-f", template, "--wait-for-room", *arguments) as process:
        wait_for(cluster, vms, "stop-02", lambda vm: True)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert f"`kvplace rollout resume stop -n {shop}` continues" in err
    before = made(cluster, shop)
    assert json.loads(out)["created"] == len(before) == 2
    cordon(cluster, unschedulable=False)

    answer = called(cluster, "resume", "stop", "--yes", "-o", "json", "-n", shop)
    assert answer.returncode == 0, answer
    document = json.loads(answer.stdout)
    assert {key: document[key] for key in ("created", "bound", "running", "pinned", "failed")} == {
        "created": 5, "bound": 5, "running": 5, "pinned": 5, "failed": []
    }  # fmt: skip
    after = made(cluster, shop)
    assert len(after) == 5
    assert before.items() <= after.items()
    delete = [sys.executable, "-m", "kvplace", "rollout", "delete", "stop", "-n", shop]
    with Terminal(delete, {"KUBECONFIG": str(cluster.kubeconfig)}) as terminal:
        terminal.read_until(f"Delete 5 VMs of rollout stop in namespace {shop}? [y/N]:")
        terminal.type("n\r")
        assert terminal.end() == 130
    assert made(cluster, shop) == after
    assert called(cluster, "delete", "stop", "--yes", "-n", shop).returncode == 0
    assert made(cluster, shop) == {}


def template(path: Path, **domain: Any) -> str:
    vm = {
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {"annotations": {"cpu-set": "one-socket"}},
        "spec": {
            "domain": {"cpu": {"cores": 2}, "memory": {"guest": "1Gi"}, "devices": {}, **domain},
        },
    }
    path.write_text(json.dumps(vm))
    return str(path)


def test_mistakes_are_one_sentence_before_anything_is_made(
    cluster: ControlPlane, shop: str, tmp_path: Path
) -> None:
    good = template(tmp_path / "good.json")
    bad = template(tmp_path / "bad.json", devices={"disks": [{"name": "root", "disk": {"bus": "virtio"}}]})
    vmis = f"/apis/kubevirt.io/v1/namespaces/{shop}/{VMIS}"
    foreign = {**json.loads((tmp_path / "good.json").read_text())}
    foreign["metadata"] = {"name": "taken-03"}
    cluster.request("POST", vmis, foreign)
    quota = {"metadata": {"name": "small"}, "spec": {"hard": {"count/pods": "3"}}}
    quotas = f"/api/v1/namespaces/{shop}/resourcequotas"
    cluster.request("POST", quotas, quota)
    # The controller-manager, which is not there, counts what is used.
    status = {"status": {"hard": {"count/pods": "3"}, "used": {"count/pods": "1"}}}
    cluster.request("PATCH", f"{quotas}/small/status", status, content_type="application/merge-patch+json")
    cases = [
        (["-f", good, "--name", "x", "-n", "nowhere"], 2, "there is no namespace nowhere"),
        (["-f", good, "--name", "taken", "--count", "3", "-n", shop], 3, "taken-03; choose another name"),
        (
            ["-f", good, "--name", "x", "--count", "3", "-n", shop],
            3,
            " of count/pods left, and the VMs need 3",
        ),
        (["-f", bad, "--name", "x", "-n", shop], 2, "the template of x is refused"),
        (["-f", good, "--name", "X_1", "-n", shop], 2, "cannot be the name of a VM"),
    ]
    try:
        for arguments, code, sentence in cases:
            answer = called(cluster, "create", *arguments, "--yes", "-o", "json")
            assert (answer.returncode, answer.stdout) == (code, ""), (arguments, answer)
            (line,) = answer.stderr.splitlines()
            assert sentence in line
        assert [vmi["metadata"]["name"] for vmi in cluster.request("GET", vmis)["items"]] == ["taken-03"]
        maps = cluster.request("GET", f"/api/v1/namespaces/{shop}/configmaps")["items"]
        assert not [one for one in maps if one["metadata"]["name"].startswith("kvplace-rollout")]
    finally:
        cluster.request("DELETE", f"{quotas}/small")
        with suppress(RequestRefused):
            cluster.request("DELETE", f"{vmis}/taken-03")


def test_the_role_is_enough_and_the_rights_of_planning_are_named(
    cluster: ControlPlane, shop: str, tmp_path: Path
) -> None:
    cluster.create_service_account(shop, "author")
    kubeconfig = cluster.service_account_kubeconfig(shop, "author")
    subject = {"kind": "ServiceAccount", "name": "author", "namespace": shop}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "kvplace-rollout"}
    binding = {"metadata": {"name": "author"}, "subjects": [subject], "roleRef": role}
    cluster.request("POST", f"{ROLES}/namespaces/{shop}/rolebindings", binding)
    arguments = ["-f", template(tmp_path / "vmi.json"), "--name", "mine", "--yes", "-n", shop]

    refused = called(cluster, "create", *arguments, kubeconfig=kubeconfig)
    assert refused.returncode == 2, refused
    assert "the ClusterRole kvplace-viewer grants this right" in refused.stderr

    for command in (["create", *arguments, "--no-plan"], ["status", "mine", "-n", shop], ["list", "-n", shop],
                    ["delete", "mine", "--yes", "-n", shop]):  # fmt: skip
        answer = called(cluster, *command, kubeconfig=kubeconfig)
        assert answer.returncode == 0, (command, answer)
