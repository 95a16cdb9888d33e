"""`kvplace get vms` beside KubeVirt's own controller: VMs that have no pod, and why."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from typing import Any

from harness.control_plane.kubevirt_parts import KubeVirt
from tests.cli.calls import COMMAND
from tests.cli.live_cluster.small_cluster import Call, SmallCluster, rows


def _vm(name: str, run: str, volumes: list[dict[str, Any]]) -> dict[str, Any]:
    disks = [{"name": volume["name"], "disk": {}} for volume in volumes]
    domain = {"cpu": {"cores": 2}, "memory": {"guest": "1Gi"}, "devices": {"disks": disks}}
    template = {
        "metadata": {"annotations": {"cpu-set": "one-numa"}, "labels": {"app": name}},
        "spec": {"domain": domain, "volumes": volumes},
    }
    return {
        "kind": "VirtualMachine",
        "metadata": {"name": name},
        "spec": {"runStrategy": run, "template": template},
    }


def test_vms_without_a_pod_are_listed_with_kubevirts_word(
    on_cluster: Call, cluster: SmallCluster, kubevirt: KubeVirt
) -> None:
    namespace = cluster.plane.create_namespace("podless")
    options = ["-n", namespace, "-w", "--kubeconfig", str(cluster.plane.kubeconfig)]
    kubevirt.create("virtualmachines", namespace, _vm("halted", "Halted", []))
    with subprocess.Popen(
        [*COMMAND, "get", "vms", *options],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as watching:
        assert watching.stdout is not None
        assert watching.stdout.readline().split()[:3] == ["NAME", "STATE", "PHASE"]
        while (line := watching.stdout.readline().split())[:3] != ["halted", "NotCreated", "Stopped"]:
            assert line[:2] == ["halted", "NotCreated"]
        disk = {"name": "root", "persistentVolumeClaim": {"claimName": "nowhere"}}
        kubevirt.create("virtualmachines", namespace, _vm("lost", "Always", [disk]))
        while (line := watching.stdout.readline().split())[2] != "ErrorPvcNotFound":
            assert line[:2] == ["lost", "NotCreated"]
        watching.send_signal(signal.SIGINT)
        assert watching.wait() == 130
    called = on_cluster("get", "vms", "-n", namespace)
    assert (called.code, called.err) == (0, "")
    assert [line[:5] for line in rows(called.out)] == [
        ["NAME", "STATE", "PHASE", "NODE", "POLICY"],
        ["halted", "NotCreated", "Stopped", "-", "exclusive"],
        ["lost", "NotCreated", "ErrorPvcNotFound", "-", "exclusive"],
    ]
    halted = json.loads(on_cluster("get", "vm", "halted", "-n", namespace, "-o", "json").out)
    assert (halted["pod"], halted["uid"], halted["state"], halted["phase"]) == (
        None,
        None,
        "NotCreated",
        "Stopped",
    )
    names = on_cluster("get", "vms", "-n", namespace, "-l", "app=lost", "-o", "name")
    assert names.out.split() == ["virtualmachine.kubevirt.io/lost"]
    assert "there is no VM that requests cores" in on_cluster("top", "vms", "-n", namespace).err
    cluster.plane.remove_namespace(namespace)


def test_a_user_who_may_only_list_pods_is_informed_of_the_missing_vms(
    on_cluster: Call, cluster: SmallCluster, kubevirt: KubeVirt
) -> None:
    plane, user = cluster.plane, "pods-only"
    path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{cluster.namespace}"
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    plane.request("POST", f"{path}/roles", {"metadata": {"name": user}, "rules": rules})
    subject = {"kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io"}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": user}
    binding = {"metadata": {"name": user}, "roleRef": role, "subjects": [subject]}
    plane.request("POST", f"{path}/rolebindings", binding)
    while (called := on_cluster("get", "vms", "-n", cluster.namespace, "--as", user)).code == 2:
        assert "you may not list pods" in called.err  # until the API server has seen the binding
    assert called.code == 0
    assert "you may not list virtual" in called.err
    assert "VMs without a pod and KubeVirt's phases are left out" in called.err
    assert "late" in called.out
    top = on_cluster("top", "vms", "-n", cluster.namespace, "--as", user)
    assert (top.code, top.err) == (0, called.err)
    assert "late" in top.out
