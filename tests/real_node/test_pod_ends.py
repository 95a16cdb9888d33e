"""Whatever ends the QEMU of a VM, its pod ends with it: KubeVirt moves no VM that still has another pod."""

from __future__ import annotations

import os
import signal
import time
from datetime import datetime
from typing import Any

from harness.control_plane.watching import is_ready, wait_for
from harness.real_node.kernel_view import ContainerInKernel
from harness.waiting import wait_until
from tests.real_node.killing import kill_all, log_end, printed
from tests.real_node.vms import (
    HOOK,
    LEDGERS,
    VIRSH,
    Vm,
    Vms,
    begin_to_migrate,
    compute_with_qemu,
    end_of_migration,
    end_of_pod,
    migrate,
    status_of,
    uid_of_target,
)

Json = dict[str, Any]
SOON_S = 15
"""The time until a pod has ended, on a machine with other work; far below the grace period of 30 s."""


def test_the_sidecar_is_ready_before_the_vm_and_ends_once_and_cleanly_after_it(vms: Vms) -> None:
    vm = vms.start("ends", node="n1")
    vm.pinned()
    pod = vm.pod()
    assert is_ready(pod)
    assert status_of(pod, HOOK)["started"] is True
    assert begun(pod, HOOK) <= begun(pod, "compute")

    seen_by_virt_launcher(vms, pod)
    name = pod["metadata"]["name"]
    virsh = ("exec", "--namespace", vms.namespace, name, "-c", "compute", "--", *VIRSH)
    vms.cluster.plane.kubectl(*virsh, "destroy", "--domain", f"{vms.namespace}_ends")
    ended = end_of_pod(vms, vm)
    assert status_of(ended, HOOK)["state"]["terminated"]["exitCode"] == 0
    assert status_of(ended, HOOK)["restartCount"] == 0
    log = vms.cluster.plane.kubectl("logs", "--namespace", vms.namespace, name, "-c", HOOK)
    assert "KubeVirt called Shutdown because the VM has ended; the kubelet ends this container" in log


def test_a_sidecar_that_crashes_comes_back_beside_its_vm(vms: Vms) -> None:
    vm = vms.start("lasts")
    vm.pinned()
    qemu, pod = vm.compute.qemu(), vm.pod()
    kill_all(ContainerInKernel.of_pod(vm.node.sandbox, pod, HOOK).pids())
    wait_for(
        vms.cluster.plane,
        vms.pods,
        pod["metadata"]["name"],
        lambda seen: status_of(seen, HOOK)["restartCount"] == 1 and is_ready(seen),
    )
    assert vm.compute.qemu() == qemu
    migrate(vms, vm)
    vms.running("lasts").pinned()


def test_a_pod_ends_with_a_virt_launcher_that_is_killed(vms: Vms) -> None:
    vm = vms.start("killed", node="n1")
    os.kill(vm.compute.process("virt-launcher"), signal.SIGKILL)
    killed = time.monotonic()
    ended = end_of_pod(vms, vm)
    assert time.monotonic() - killed < SOON_S
    assert ended["status"]["phase"] == "Failed"
    wait_for(vms.cluster.plane, LEDGERS, "n1", lambda seen: not seen["spec"].get("claims"))


def test_a_migration_whose_target_is_killed_in_the_middle_does_not_stop_the_next_one(vms: Vms) -> None:
    vm = vms.start("survives")
    vm.pinned()
    begin_to_migrate(vms, vm, "in-vain")
    target = Vm(vms, vm.name, uid_of_target(vms, vm))
    os.kill(compute_with_qemu(target).process("virt-launcher"), signal.SIGKILL)
    killed = time.monotonic()

    ended = end_of_pod(vms, target)
    assert time.monotonic() - killed < SOON_S
    assert ended["status"]["phase"] == "Failed"
    assert end_of_migration(vms, vm, "in-vain") == "Failed"
    vm.pinned()

    migrate(vms, vm)
    moved = vms.running("survives")
    assert moved.node.name != vm.node.name
    moved.pinned()
    assert status_of(end_of_pod(vms, vm), HOOK)["restartCount"] == 0


def test_a_pod_that_is_deleted_before_a_container_has_begun_releases_its_cpu_soon(vms: Vms) -> None:
    """Its agent has never reported it: only its kubelet knows that nothing runs."""
    plane = vms.cluster.plane
    container = {
        "name": "work",
        "image": "on-no-node.test/work:1",
        "imagePullPolicy": "Never",
        "resources": {"limits": {"cpu": "1"}},
    }
    metadata = {"name": "never", "annotations": {"cpu-set": "any"}}
    selector = {"kubernetes.io/hostname": "n1"}
    spec = {"nodeSelector": selector, "containers": [container]}
    plane.request("POST", vms.pods, {"metadata": metadata, "spec": spec})
    wait_for(plane, LEDGERS, "n1", lambda seen: bool(seen["spec"].get("claims")))
    pod = wait_for(plane, vms.pods, "never", lambda seen: bool(seen["status"].get("containerStatuses")))
    assert "running" not in status_of(pod, "work")["state"]

    plane.request("DELETE", f"{vms.pods}/never")
    deleted = time.monotonic()
    wait_for(plane, LEDGERS, "n1", lambda seen: not seen["spec"].get("claims"))
    assert time.monotonic() - deleted < SOON_S


def seen_by_virt_launcher(vms: Vms, pod: Json) -> None:
    """Wait until virt-launcher has found QEMU.

    It checks once a second, and would wait minutes for a QEMU that it has missed.
    """
    wait_until(
        lambda: any("Found PID for" in line for line in printed(vms.cluster, pod, "compute")),
        lambda: log_end(vms.cluster, pod, "compute"),
    )


def begun(pod: Json, container: str) -> datetime:
    return datetime.fromisoformat(status_of(pod, container)["state"]["running"]["startedAt"])
