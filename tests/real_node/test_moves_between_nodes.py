"""A VM gives its core to one that waits: it migrates to another node, with every real part on both sides."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from harness.control_plane.cluster import MERGE_PATCH, ControlPlane
from harness.control_plane.watching import condition, wait_for
from harness.kvplace_cluster.installation import NAMESPACE
from kvplace.core.cluster.defragmentation import DefragmentingMove
from kvplace.core.scalars import Bytes, NodeName
from kvplace.kube.api_cluster import ApiCluster
from kvplace.kube.credentials import CredentialOptions
from kvplace.kube.session import Limits, open_session
from kvplace.plan.defragmentation_run import MoveResult, carry_out
from tests.real_node.killing import Serve, log_end, pods_of
from tests.real_node.vms import LEDGERS, MIGRATIONS, ON_ITS_OWN, Vm, Vms, ledger

Json = dict[str, Any]
OWN_CPU = {"n1": 1, "n2": 0}
"""The CPU that each node has to give: the other one is reserved."""
MOVABLE = {**ON_ITS_OWN, "kvplace.io/movable": "nodes"}


def claims_of(ledger: Json) -> Json:
    claims: Json = ledger["spec"].get("claims", {})
    return claims


def compute_has_ended(pod: Json) -> bool:
    statuses = pod["status"].get("containerStatuses", [])
    return any(one["name"] == "compute" and "terminated" in one["state"] for one in statuses)


def cordon(plane: ControlPlane, node: str, *, cordoned: bool = True) -> None:
    patch = {"spec": {"unschedulable": cordoned}}
    plane.request("PATCH", f"/api/v1/nodes/{node}", patch, content_type=MERGE_PATCH)


def migrations(vms: Vms) -> str:
    return f"/apis/kubevirt.io/v1/namespaces/{vms.namespace}/{MIGRATIONS}"


def can_leave(vms: Vms) -> tuple[Vm, str, str]:
    """Start a VM that may leave its node; return it, its node and the other one."""
    vms.cluster.kubevirt.migrations_ended()
    vm = vms.start("leaves", annotations=MOVABLE)
    vm.pinned()
    vmis = f"/apis/kubevirt.io/v1/namespaces/{vms.namespace}/virtualmachineinstances"
    wait_for(vms.cluster.plane, vmis, "leaves", lambda seen: condition(seen, "LiveMigratable") == "True")
    source = vm.node.name
    return vm, source, next(name for name in OWN_CPU if name != source)


def seen(vms: Vms, path: str, is_wanted: Callable[[Json], bool]) -> Json:
    """Wait for an object of a list; the error shows the log of `serve`, too."""
    try:
        return vms.cluster.kubevirt.first(path, is_wanted)
    except TimeoutError as missing:
        for pod in pods_of(vms.cluster, NAMESPACE, "serve"):
            missing.add_note(log_end(vms.cluster, pod, "serve"))
        raise


def migration_for_room(vms: Vms) -> Json:
    """Wait for the migration that kvplace creates."""
    return seen(vms, f"{migrations(vms)}?labelSelector=kvplace.io/move=true", lambda _: True)


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
    _, source, _ = can_leave(vms)
    vms.create("waits", node=source)
    assert ended(vms, migration_for_room(vms)) == "Succeeded"
    each_has_its_core(vms, source)


@pytest.mark.timeout(600)
def test_serve_is_killed_after_each_step_and_each_vm_gets_its_core(vms: Vms) -> None:
    """The first kills may end an attempt: its reservations end by themselves, and the next one begins."""
    vm, source, target = can_leave(vms)
    serve = Serve(vms.cluster)
    vms.create("waits", node=source)
    waiting = vms.cluster.kubevirt.launcher_pod(vms.namespace, "waits")["metadata"]["uid"]
    of_source, of_target = (f"{LEDGERS}?fieldSelector=metadata.name={node}" for node in (source, target))

    seen(vms, of_target, lambda one: any("reserved" in claim for claim in claims_of(one).values()))
    serve = serve.kill()
    seen(vms, of_source, lambda one: waiting in claims_of(one))
    serve = serve.kill()
    migration = migration_for_room(vms)
    serve = serve.kill()
    seen(vms, of_target, lambda one: any("reserved" not in claim for claim in claims_of(one).values()))
    serve = serve.kill()
    seen(vms, f"{vms.pods}?fieldSelector=metadata.name={vm.pod()['metadata']['name']}", compute_has_ended)
    serve.kill()
    assert ended(vms, migration) == "Succeeded"
    each_has_its_core(vms, source)


@pytest.mark.parametrize("how", ["deleted by hand", "target cordoned"])
def test_a_migration_that_comes_to_nothing_leaves_the_vm_where_it_is_and_nothing_reserved(
    vms: Vms, how: str
) -> None:
    plane = vms.cluster.plane
    vm, source, target = can_leave(vms)
    vms.create("waits", node=source)
    vms.cluster.kubevirt.launcher_pod(vms.namespace, "waits")
    if how == "deleted by hand":
        plane.request("DELETE", f"{migrations(vms)}/{migration_for_room(vms)['metadata']['name']}")
        comes_to_nothing(vms, vm, source, target)
        left = plane.request("GET", migrations(vms))["items"]
        assert [one for one in left if "deletionTimestamp" not in one["metadata"]] == []
        return
    try:
        with vms.cluster.kubevirt.virt_controller.paused():  # it would make the target pod at once
            migration = migration_for_room(vms)
            cordon(plane, target)
        assert ended(vms, migration) == "Failed"
        comes_to_nothing(vms, vm, source, target)
    finally:
        cordon(plane, target, cordoned=False)


def comes_to_nothing(vms: Vms, vm: Vm, source: str, target: str) -> None:
    """Check that soon nothing is reserved, that this lasts, and that the VM has stayed."""
    plane = vms.cluster.plane
    wait_for(plane, LEDGERS, source, lambda one: set(claims_of(one)) == {vm.pod_uid})
    wait_for(plane, LEDGERS, target, lambda one: not claims_of(one))
    time.sleep(10)
    assert set(ledger(vms.cluster, source)["claims"]) == {vm.pod_uid}
    assert {thread.cpus for thread in vm.threads().threads} == {1 << OWN_CPU[source]}
    assert vms.running("leaves").pod_uid == vm.pod_uid


def test_a_migration_of_defragment_is_complete_when_the_source_has_given_up_its_core(vms: Vms) -> None:
    """A node of one free CPU gains nothing by a move, so the test plans one itself."""
    vm, source, target = can_leave(vms)
    about = vm.pod()["metadata"]
    placed = vm.bound().placement
    move = DefragmentingMove("leaves", NodeName(source), NodeName(target), placed, placed, False, 0, Bytes(0))

    async def carried_out() -> list[MoveResult]:
        credentials = CredentialOptions(str(vms.cluster.plane.kubeconfig), None)
        session = await open_session(credentials, Limits())
        try:
            client = ApiCluster(session, component="defragment")
            pod = await client.read_pod(vms.namespace, about["name"])
            assert pod is not None
            moves = carry_out(client, [move], {"leaves": pod}, may_continue=lambda: True)
            return [result async for result in moves]
        finally:
            await session.close()

    assert asyncio.run(carried_out()) == [MoveResult(move)]
    assert ledger(vms.cluster, source)["claims"] == {}
    moved = vms.running("leaves")
    assert moved.node.name == target
    assert moved.pinned() == f"revision 1: all threads run on CPU {OWN_CPU[target]} as placed"
