"""`explain` beside real KubeVirt: a VM that runs, and one whose live migration finds no room."""

from __future__ import annotations

import json
from typing import Any

from harness.control_plane.watching import wait_for
from kvplace.core.errors import ExitCode
from tests.cli.calls import Called, call_process
from tests.real_node.vms import Vms

MIGRATIONS = "virtualmachineinstancemigrations"


def explain(vms: Vms, name: str, *flags: str) -> Called:
    kubeconfig = str(vms.cluster.plane.kubeconfig)
    return call_process("explain", f"vmi/{name}", "-n", vms.namespace, "--kubeconfig", kubeconfig, *flags)


def test_a_migration_that_finds_no_room_is_reported_beside_the_vm_that_runs_on(vms: Vms) -> None:
    vm, other = vms.start("stays"), vms.start("other")
    vm.pinned()
    other.pinned()
    assert vm.node.name != other.node.name, "each node has one CPU to give"

    migration = {"kind": "VirtualMachineInstanceMigration", "metadata": {"name": "away"}}
    vms.cluster.kubevirt.create(MIGRATIONS, vms.namespace, {**migration, "spec": {"vmiName": "stays"}})
    migrations = f"/apis/kubevirt.io/v1/namespaces/{vms.namespace}/{MIGRATIONS}"
    wait_for(
        vms.cluster.plane,
        migrations,
        "away",
        lambda seen: seen.get("status", {}).get("phase") == "Scheduling",
    )
    target = next(
        pod["metadata"]["name"]
        for pod in vms.cluster.plane.request("GET", vms.pods)["items"]
        if "kubevirt.io/migrationJobUID" in pod["metadata"]["labels"]
    )
    wait_for(vms.cluster.plane, vms.pods, target, was_refused)

    said = explain(vms, "stays", "-o", "json")
    assert said.code == ExitCode.DOES_NOT_FIT, said.err
    found = json.loads(said.out)
    assert found["state"] == "Pinned"
    assert found["notes"][0] == f"pod {target}, the target of its live migration, has no node yet"
    (seat,) = found["pods"]
    assert (seat["node"], seat["unclaimed"], seat["nodeReady"]) == (vm.node.name, "", True)
    (obstacle,) = found["fits"]["obstacles"]
    assert obstacle["nodes"] == [vm.node.name]
    (refusal,) = found["fits"]["refusals"]
    assert refusal["nodes"] == [other.node.name]


def was_refused(pod: dict[str, Any]) -> bool:
    """Return whether kube-scheduler has found no node for a pod."""
    conditions = pod.get("status", {}).get("conditions", [])
    return any(one["type"] == "PodScheduled" and one["status"] == "False" for one in conditions)
