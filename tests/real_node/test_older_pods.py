"""Pods of earlier releases, with the hook as an ordinary container, run beside new ones."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from harness.control_plane.cluster import ControlPlane, RequestRefused
from harness.control_plane.watching import wait_for
from harness.kvplace_cluster.vms import VMS, vm_manifest
from harness.waiting import wait_until
from tests.cli.calls import call_process
from tests.real_node.older_release import older_release
from tests.real_node.vms import (
    HOOK,
    LEDGERS,
    ON_ITS_OWN,
    SMALL_DOMAIN,
    Vm,
    Vms,
    begin_to_migrate,
    compute_with_qemu,
    end_of_migration,
    end_of_pod,
    ledger,
    migrate,
    status_of,
    uid_of_target,
)

Json = dict[str, Any]
GRACE_S = 30
"""The grace period of virt-launcher's pods: the hook of an older one lasts as long as that."""


def test_an_older_pod_and_a_new_one_are_pinned_and_the_older_one_ends_with_its_migration(
    vms: Vms, tmp_path: Path
) -> None:
    with older_release(vms.cluster.plane, vms.namespace, tmp_path):
        older = vms.start("older")
    assert HOOK in containers(older.pod(), "containers")
    newer = vms.start("newer")
    assert HOOK in containers(newer.pod(), "initContainers")
    for vm in (older, newer):
        (cpu,) = ledger(vms.cluster, vm.node.name)["owners"]
        assert vm.pinned() == f"revision 1: all threads run on CPU {cpu} as placed"
    assert older.node.name != newer.node.name
    vms.remove("newer")

    migrate(vms, older)
    ended = end_of_pod(vms, older)
    assert status_of(ended, HOOK)["state"]["terminated"]["exitCode"] == 0
    wait_for(vms.cluster.plane, LEDGERS, older.node.name, lambda seen: not seen["spec"].get("claims"))
    moved = vms.running("older")
    assert HOOK in containers(moved.pod(), "initContainers")
    moved.pinned()


def test_an_older_pod_whose_virt_launcher_is_killed_releases_its_cpu_and_ends_with_its_vmi(
    vms: Vms, tmp_path: Path
) -> None:
    """KubeVirt deletes the failed VMI of a VM, and the hook lasts as long as the grace period of its pod."""
    plane = vms.cluster.plane
    with older_release(plane, vms.namespace, tmp_path):
        selector = {"nodeSelector": {"kubernetes.io/hostname": "n1"}}
        manifest = vm_manifest("older", cores=1, annotations=ON_ITS_OWN, domain=SMALL_DOMAIN, **selector)
        vms.cluster.kubevirt.create(VMS, vms.namespace, manifest)
        older = vms.running("older")
    older.pinned()
    name = older.pod()["metadata"]["name"]
    os.kill(older.compute.process("virt-launcher"), signal.SIGKILL)
    killed = time.monotonic()
    wait_for(plane, LEDGERS, "n1", lambda seen: older.pod_uid not in seen["spec"].get("claims", {}))
    wait_until(lambda: is_over(plane, f"{vms.pods}/{name}"), lambda: f"{name} still runs")
    assert time.monotonic() - killed < 2 * GRACE_S
    assert HOOK in containers(vms.running("older").pod(), "initContainers")


def test_an_older_target_that_is_killed_is_named_by_doctor_with_the_fix(vms: Vms, tmp_path: Path) -> None:
    vm = vms.start("moves")
    vm.pinned()
    with older_release(vms.cluster.plane, vms.namespace, tmp_path):
        begin_to_migrate(vms, vm, "in-vain")
        target = Vm(vms, vm.name, uid_of_target(vms, vm))
    os.kill(compute_with_qemu(target).process("virt-launcher"), signal.SIGKILL)
    assert end_of_migration(vms, vm, "in-vain") == "Failed"
    name = target.pod()["metadata"]["name"]
    fix = f"`kubectl -n {vms.namespace} delete pod {name}`"
    wait_until(lambda: fix in fixes(vms), lambda: f"doctor does not state {fix}", pause_s=1)

    vms.cluster.plane.kubectl("--namespace", vms.namespace, "delete", "pod", name)
    migrate(vms, vm)
    vms.running("moves").pinned()


def containers(pod: Json, field: str) -> set[str]:
    return {container["name"] for container in pod["spec"].get(field, [])}


def is_over(plane: ControlPlane, path: str) -> bool:
    """Whether a pod has ended or is gone."""
    try:
        return plane.request("GET", path)["status"]["phase"] in {"Succeeded", "Failed"}
    except RequestRefused as refused:
        if refused.status != 404:
            raise
        return True


def fixes(vms: Vms) -> set[str]:
    called = call_process("doctor", "-o", "json", "--kubeconfig", str(vms.cluster.plane.kubeconfig))
    return {finding["fix"] for check in json.loads(called.out)["checks"] for finding in check["findings"]}
