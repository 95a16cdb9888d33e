"""docs/install.md and docs/quickstart.md from first to last, on a real node that a person starts by hand."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.install_page.checkout import (
    EARLIER,
    become_the_previous_release,
    copy_checkout,
    use_this_environment,
)
from harness.install_page.newcomer import FOLDER, Newcomer, fit_this_machine
from harness.install_page.quickstart import lines_not_printed
from harness.libvirt_session.threads import Affinities
from harness.real_node.control_groups import PREFIX
from harness.real_node.kvplace_pods import COMPONENT
from kvplace import __version__

THE_VM = "-l vm.kubevirt.io/name=web-server"
COUNTS = "kubectl get nodeledgers --no-headers -o custom-columns=:.spec.summary"
SIDECAR = f"kubectl get pods {THE_VM} -o jsonpath='{{.items[*].spec.initContainers[*].image}}'"
INSTALLING = ("Requirements", "Images", "Your folder", "Apply", "Nodes", "First VM")
FEWEST_STEPS = 8
SERVE = "-n kvplace-system -l app.kubernetes.io/component=serve"
IMAGES = f"kubectl get pods {SERVE} -o jsonpath='{{..containers[*].image}}'"
VMI = "kubectl get vmi web-server -o jsonpath='{.metadata.uid}'"
RESTARTED = """
kubectl wait --for=create --timeout=5m vmi/web-server
kubectl wait --for=jsonpath='{.status.phase}'=Running --timeout=5m vmi/web-server
"""
PINNED = f"""
kubectl wait --for=condition=kvplace.io/Pinned --timeout=5m pod {THE_VM} --field-selector=status.phase=Running
"""


@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("sandbox_machine", "node_programs", "kubernetes_programs", "kubevirt_programs")
def test_a_newcomer_gets_from_a_checkout_to_a_pinned_vm_that_outlives_upgrade_and_uninstall(
    tmp_path: Path,
) -> None:
    previous, current = (copy_checkout(tmp_path / name) for name in ("previous", "current"))
    become_the_previous_release(previous)
    for checkout in (previous, current):
        use_this_environment(checkout)
        fit_this_machine(checkout)

    with _started() as node:
        assert node.stdout is not None
        shell = "".join(node.stdout.readline() for _ in range(2))
        (folder,) = re.findall("KUBECONFIG=(.*)/", shell)
        environment = {name: os.environ[name] for name in ("PATH", "HOME")}
        newcomer = Newcomer(shell, environment, "node-1", Path(folder) / COMPONENT)
        groups = _groups_of_children(node.pid)
        assert groups

        def ask(command: str) -> list[str]:
            return newcomer.run(current, command).split()

        installed = list(newcomer.follow(previous, *INSTALLING))
        assert len(installed) >= FEWEST_STEPS
        assert lines_not_printed(newcomer, previous, installed) == []
        qemu = _qemu(groups)
        pins = Affinities.of_process(qemu).vcpus()
        assert [cpus.bit_count() for cpus in pins.values()] == [1]
        assert f"kvplace/hook:{EARLIER}" in ask(SIDECAR)
        assert ask(COUNTS) == ["<none>"]

        for name in (FOLDER, COMPONENT):
            shutil.copytree(previous / name, current / name)
        earlier = ask(f"kubectl get pods {SERVE} -o name")
        list(newcomer.follow(current, "Images"))
        upgrade = newcomer.follow(current, "Upgrade")
        next(upgrade)
        ask(PINNED)
        assert (_qemu(groups), Affinities.of_process(qemu).vcpus()) == (qemu, pins)
        assert f"kvplace/hook:{EARLIER}" in ask(SIDECAR)
        # Until it has ended, a replica of the earlier release answers on connections that are open.
        ask(f"kubectl -n kvplace-system wait --for=delete --timeout=2m {' '.join(earlier)}")
        assert ask(IMAGES) == [f"kvplace/serve:{__version__}"]

        running = ask(VMI)
        list(upgrade)  # the restart of the VM
        ask(RESTARTED)
        ask(PINNED)
        assert ask(VMI) != running
        assert f"kvplace/hook:{__version__}" in ask(SIDECAR), ask("kubectl get pods -A -o wide")
        assert ask(COUNTS) == ["map[owned:1", "pods:1", "shared:0]"]
        assert _qemu(groups) != qemu
        qemu = _qemu(groups)
        assert Affinities.of_process(qemu).vcpus() == pins

        list(newcomer.follow(current, "Uninstall"))
        assert ask("kubectl get crd,ns,clusterrole -o name | grep kvplace || echo nothing") == ["nothing"]
        assert ask("kubectl get vmi web-server -o jsonpath='{.status.phase}'") == ["Running"]
        assert (_qemu(groups), Affinities.of_process(qemu).vcpus()) == (qemu, pins)

        node.send_signal(signal.SIGINT)
        assert node.wait() == 0
    assert not Path(folder).exists()
    assert not any(group.exists() for group in groups)


def _qemu(groups: list[Path]) -> int:
    """Find the one QEMU in the node's control groups."""
    lists = {path for group in groups for path in group.rglob("cgroup.procs")}
    pids = {int(pid) for found in lists for pid in _text_of(found).split()}
    (qemu,) = (pid for pid in pids if _text_of(Path(f"/proc/{pid}/comm")).startswith("qemu-system"))
    return qemu


def _text_of(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESRCH, errno.ENODEV):
            raise
        return ""  # control groups and processes of kvplace's pods come and go


@contextlib.contextmanager
def _started() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "harness.real_node", "--without-kvplace"],
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
