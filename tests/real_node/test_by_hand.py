"""The real node that a person starts by hand, and on it what docs/install.md says about a whole life."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.real_node.control_groups import PREFIX

# No release is older than this one: what changes is a setting of every component, and with it every pod.
UPGRADED = """
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [../on-real-nodes]
configMapGenerator:
- {name: kvplace-settings, namespace: kvplace-system, behavior: merge, literals: [LOG_LEVEL=debug]}
- {name: kvplace-agent-settings, namespace: kvplace-agent, behavior: merge, literals: [LOG_LEVEL=debug]}
"""
VM = """
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstance
metadata: {name: small, annotations: {cpu-set: any}}
spec:
  terminationGracePeriodSeconds: 0
  domain:
    cpu: {cores: 1}
    memory: {guest: 64Mi}
    devices: {}
"""
PATIENCE = "--timeout=300s"
# Each is a command of docs/install.md, but for the names and the folder.
INSTALLED = f"""
kubectl -n kvplace-system wait --for=condition=Available {PATIENCE} deployment --all
kubectl -n kvplace-agent rollout status {PATIENCE} daemonset/kvplace-agent
kubectl wait --for=create {PATIENCE} nodetopology/node-1
kubectl wait --for=condition=Ready {PATIENCE} nodetopology --all
"""
TRIED = f"""
kubectl apply -f vm.yaml
kubectl wait --for=jsonpath='{{.status.phase}}'=Running {PATIENCE} vmi/small
kubectl wait --for=condition=kvplace.io/Pinned {PATIENCE} pod -l vm.kubevirt.io/name=small
"""
UPGRADE = f"""
kubectl apply --server-side -k upgraded
kubectl -n kvplace-system rollout status {PATIENCE} deployment/kvplace-serve
kubectl -n kvplace-agent rollout status {PATIENCE} daemonset/kvplace-agent
"""
UNINSTALL = f"""
kubectl delete {PATIENCE} -k upgraded
kubectl annotate nodes --all cpu-map- kvplace.io/released-at-
"""


@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("sandbox_machine", "node_programs", "kubernetes_programs", "kubevirt_programs")
def test_the_printed_lines_lead_to_a_real_node_where_a_vm_outlives_upgrade_and_uninstall(
    record_property: Callable[[str, object], None],
) -> None:
    with _started() as node:
        assert node.stdout is not None
        kubeconfig, path = (node.stdout.readline() for _ in range(2))
        assert kubeconfig.startswith("export KUBECONFIG=")
        assert path.startswith("export PATH=")
        (folder,) = re.findall("KUBECONFIG=(.*)/", kubeconfig)
        manifests = Path(folder) / "manifests"
        (manifests / "upgraded").mkdir()
        (manifests / "upgraded" / "kustomization.yaml").write_text(UPGRADED)
        (manifests / "vm.yaml").write_text(VM)

        def run(step: str, script: str) -> list[str]:
            environment = {name: os.environ[name] for name in ("PATH", "HOME")}
            began = time.monotonic()
            said = subprocess.run(
                ["sh", "-ec", f"{kubeconfig}{path}{script}"],
                cwd=manifests,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            record_property(f"seconds of {step}", round(time.monotonic() - began, 1))
            assert said.returncode == 0, f"{step}: {said.stdout}{said.stderr}"
            return said.stdout.split()

        names = run("look", "kubectl get nodes -o name; kubectl get crd nodeledgers.kvplace.io -o name")
        assert names == [
            "node/node-1",
            "customresourcedefinition.apiextensions.k8s.io/nodeledgers.kvplace.io",
        ]
        groups = _groups_of_children(node.pid)
        assert groups

        run("install", INSTALLED)
        run("first VM", TRIED)
        qemu = _qemu(groups)
        cpus = _cpus_of(qemu)
        assert any(len(allowed) == 1 for allowed in cpus.values())

        run("upgrade", UPGRADE)
        run(
            "look again",
            f"kubectl wait --for=condition=kvplace.io/Pinned {PATIENCE} pod -l vm.kubevirt.io/name=small",
        )
        assert (_qemu(groups), _cpus_of(qemu)) == (qemu, cpus)

        run("uninstall", UNINSTALL)
        left = run("what is left", "kubectl get crd,ns,clusterrole -o name | grep kvplace || echo nothing")
        assert left == ["nothing"]
        assert run("the VM", "kubectl get vmi small -o jsonpath='{.status.phase}'") == ["Running"]
        assert (_qemu(groups), _cpus_of(qemu)) == (qemu, cpus)

        node.send_signal(signal.SIGINT)
        assert node.wait() == 0
    assert not Path(folder).exists()
    assert not any(group.exists() for group in groups)


def _qemu(groups: list[Path]) -> int:
    """Find the one QEMU in the node's control groups."""
    lists = {path for group in groups for path in group.rglob("cgroup.procs")}
    pids = {int(pid) for found in lists for pid in found.read_text().split()}
    (qemu,) = (pid for pid in pids if _name_of(pid).startswith("qemu-system"))
    return qemu


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except (FileNotFoundError, ProcessLookupError):  # processes of kvplace's pods come and go
        return ""


def _cpus_of(pid: int) -> dict[str, tuple[int, ...]]:
    """Read where each vCPU thread of a QEMU may run."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        name = (task / "comm").read_text().strip()
        if name.startswith("CPU "):
            found[name] = tuple(sorted(os.sched_getaffinity(int(task.name))))
    return found


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
