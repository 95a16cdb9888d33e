"""A VM gives its core to one that waits: it migrates to another node, with every real part on both sides."""

from __future__ import annotations

import time
from typing import Any

from harness.control_plane.watching import condition, wait_for
from harness.kvplace_cluster.installation import NAMESPACE
from tests.real_node.killing import kill_container, log_end, pods_of
from tests.real_node.vms import LEDGERS, MIGRATIONS, ON_ITS_OWN, Vm, Vms, ledger

Json = dict[str, Any]
OWN_CPU = {"n1": 1, "n2": 0}
"""What each node has to give: the other one is reserved."""
MOVABLE = {**ON_ITS_OWN, "kvplace.io/movable": "nodes"}


def migrations(vms: Vms) -> str:
    return f"/apis/kubevirt.io/v1/namespaces/{vms.namespace}/{MIGRATIONS}"


def asked_to_leave(vms: Vms) -> tuple[Vm, str, Json]:
    """Let a VM wait for the core of another one; return that one, its node and its migration."""
    vm = vms.start("leaves", annotations=MOVABLE)
    vm.pinned()
    vmis = f"/apis/kubevirt.io/v1/namespaces/{vms.namespace}/virtualmachineinstances"
    wait_for(vms.cluster.plane, vmis, "leaves", lambda seen: condition(seen, "LiveMigratable") == "True")
    source = vm.node.name
    vms.create("waits", node=source)
    of_kvplace = f"{migrations(vms)}?labelSelector=kvplace.io/move=true"
    try:
        return vm, source, vms.cluster.kubevirt.first(of_kvplace, lambda _: True)
    except TimeoutError as missing:
        for pod in pods_of(vms.cluster, NAMESPACE, "serve"):
            missing.add_note(log_end(vms.cluster, pod, "serve"))
        raise


def ended(vms: Vms, migration: Json) -> str:
    """Wait until KubeVirt calls a migration done, and return what it calls it."""
    done = wait_for(
        vms.cluster.plane,
        migrations(vms),
        migration["metadata"]["name"],
        lambda seen: seen.get("status", {}).get("phase") in {"Succeeded", "Failed"},
    )
    return str(done["status"]["phase"])


def each_has_its_core(vms: Vms, source: str) -> None:
    """Check that the one that waited runs where the other one was, and each owns its core alone."""
    target = next(name for name in OWN_CPU if name != source)
    wait_for(
        vms.cluster.plane,
        f"/apis/kubevirt.io/v1/namespaces/{vms.namespace}/virtualmachineinstances",
        "waits",
        lambda seen: seen.get("status", {}).get("phase") == "Running",
    )
    for name, node in (("leaves", target), ("waits", source)):
        vm = vms.running(name)
        assert vm.node.name == node
        assert {thread.cpus for thread in vm.threads().threads} == {1 << OWN_CPU[node]}
        assert vm.pinned() == f"revision 1: all threads run on CPU {OWN_CPU[node]} as placed"
        assert ledger(vms.cluster, node)["owners"] == {str(OWN_CPU[node]): vm.pod_uid}
        assert set(ledger(vms.cluster, node)["claims"]) == {vm.pod_uid}


def test_a_vm_migrates_and_the_one_that_waited_runs_on_its_core(vms: Vms) -> None:
    _, source, migration = asked_to_leave(vms)
    assert ended(vms, migration) == "Succeeded"
    each_has_its_core(vms, source)


def test_the_migration_goes_on_when_serve_is_killed_right_after_it_was_created(vms: Vms) -> None:
    _, source, migration = asked_to_leave(vms)
    for pod in pods_of(vms.cluster, NAMESPACE, "serve"):
        kill_container(vms.cluster, NAMESPACE, pod, "serve")
    assert ended(vms, migration) == "Succeeded"
    each_has_its_core(vms, source)


def test_a_migration_that_is_deleted_leaves_the_vm_where_it_is_and_nothing_reserved(vms: Vms) -> None:
    vm, source, migration = asked_to_leave(vms)
    vms.cluster.plane.request("DELETE", f"{migrations(vms)}/{migration['metadata']['name']}")
    target = next(name for name in OWN_CPU if name != source)
    wait_for(vms.cluster.plane, LEDGERS, source, lambda seen: set(seen["spec"]["claims"]) == {vm.pod_uid})
    wait_for(vms.cluster.plane, LEDGERS, target, lambda seen: not seen["spec"].get("claims"))
    time.sleep(10)
    left = vms.cluster.plane.request("GET", migrations(vms))["items"]
    assert [one for one in left if "deletionTimestamp" not in one["metadata"]] == []
    assert {thread.cpus for thread in vm.threads().threads} == {1 << OWN_CPU[source]}
    assert vms.running("leaves").pod_uid == vm.pod_uid
