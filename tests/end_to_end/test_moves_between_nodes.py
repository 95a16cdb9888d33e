"""A VM fits on no node: the real virt-controller migrates another VM, for which cores are reserved before."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from harness.control_plane.cluster import MERGE_PATCH, STRATEGIC_MERGE_PATCH, ControlPlane
from harness.control_plane.hollow_node import NodesInBackground
from harness.control_plane.kubevirt_parts import KubeVirt
from harness.control_plane.watching import wait_for
from harness.kvplace_cluster.installation import Installation, described_nodes
from harness.waiting import PATIENCE_S, wait_until
from kvplace.core.cluster.defragmentation import DefragmentingMove, defragment
from kvplace.core.cpuset import cpus_of, parse_cpu_list
from kvplace.core.placement import PodPlacement
from kvplace.core.topology import Topology
from kvplace.core.well_known_names import PINNED, PLACEMENT
from kvplace.kube.api_cluster import ApiCluster
from kvplace.kube.credentials import CredentialOptions
from kvplace.kube.object_client import ObjectClient
from kvplace.kube.session import Limits, open_session
from kvplace.nodes.movable_cluster import read_movable_cluster
from kvplace.plan.defragmentation_run import MoveResult, carry_out
from tests.end_to_end.crowded_nodes import NODES, Crowded
from tests.end_to_end.pods_that_ask import LEDGERS, MACHINE, told

Json = dict[str, Any]


@pytest.fixture(scope="module")
def cluster(kubernetes_programs: Path) -> Iterator[ControlPlane]:
    """Start a control plane of this module's own: the others run without moves between nodes."""
    with ControlPlane() as plane:
        yield plane


@pytest.fixture(scope="module")
def virt(cluster: ControlPlane, kubevirt_programs: Path) -> Iterator[KubeVirt]:
    with KubeVirt(cluster, kubevirt_programs) as running:
        yield running


@pytest.fixture(scope="module")
def kvplace(cluster: ControlPlane, virt: KubeVirt) -> Iterator[Installation]:
    """Install kvplace with the component that operators add, two replicas and a kube-scheduler for each."""
    with Installation(cluster, replicas=2, components=("moves-between-nodes",)) as installation:
        for replica in installation.replicas:
            installation.add_scheduler(replica)
        yield installation
        assert [line for replica in installation.replicas for line in replica.denials()] == []


@pytest.fixture
def machine() -> Topology:
    return MACHINE


@pytest.fixture
def crowded(
    cluster: ControlPlane, virt: KubeVirt, kvplace: Installation, nodes: NodesInBackground, vm_namespace: str
) -> Iterator[Crowded]:
    with described_nodes(kvplace, dict.fromkeys(NODES, MACHINE)):
        yield Crowded(cluster, virt, kvplace, nodes, vm_namespace)


def test_a_vm_migrates_to_reserved_cores_and_the_waiting_one_gets_its_old_cores(crowded: Crowded) -> None:
    cluster, kvplace = crowded.cluster, crowded.kvplace
    source_uid = crowded.source["metadata"]["uid"]
    crowded.agents_report()
    waiting = crowded.wait_for_room()
    migration = crowded.migration()
    assert migration["spec"]["vmiName"] == "moves"
    assert migration["spec"]["addedNodeSelector"] == {"kubernetes.io/hostname": "move-b"}
    awaited = kvplace.ledger("move-a")["claims"][waiting["metadata"]["uid"]]

    target = crowded.virt.launcher_pod(crowded.namespace, "moves", other_than=source_uid)
    target = crowded.bound(target)
    uid = target["metadata"]["uid"]
    assert target["metadata"]["annotations"]["kubevirt.io/migrationJobName"] == migration["metadata"]["name"]
    assert target["spec"]["nodeName"] == "move-b"
    placed = PodPlacement.from_json(target["metadata"]["annotations"][PLACEMENT]).placement
    there = kvplace.ledger("move-b")
    assert "reserved" not in there["claims"][uid]
    owned = {cpu for cpu, owner in there["owners"].items() if owner == uid}
    assert owned == {str(cpu) for cpu in cpus_of(placed.owned)}
    assert set(kvplace.ledger("move-a")["owners"].values()) >= {source_uid}

    crowded.nodes.do(
        crowded.nodes.nodes.end_container(crowded.namespace, crowded.source["metadata"]["name"], "compute")
    )
    bound = crowded.bound(waiting)
    assert bound["spec"]["nodeName"] == "move-a"
    got = PodPlacement.from_json(bound["metadata"]["annotations"][PLACEMENT]).placement
    assert got.owned == parse_cpu_list(awaited["reserved"]["owned"])
    wait_for(cluster, LEDGERS, "move-a", lambda ledger: source_uid not in ledger["spec"]["claims"])
    assert "migrates from move-a to CPUs" in crowded.event("waits", "MakingRoom")["message"]


@pytest.mark.parametrize("how", ["deleted by hand", "target cordoned"])
def test_a_migration_that_comes_to_nothing_leaves_the_vm_where_it_is_and_nothing_reserved(
    crowded: Crowded, how: str
) -> None:
    cluster, kvplace = crowded.cluster, crowded.kvplace
    source_uid = crowded.source["metadata"]["uid"]
    before = kvplace.ledger("move-a")
    waiting = crowded.wait_for_room()["metadata"]["name"]
    told(cluster, crowded.pods, waiting, "Insufficient cpu")  # so Filter is never asked about it
    with crowded.virt.virt_controller.paused():
        crowded.agents_report()
        name = crowded.migration()["metadata"]["name"]
        if how == "target cordoned":
            cordoned = {"spec": {"unschedulable": True}}
            cluster.request("PATCH", "/api/v1/nodes/move-b", cordoned, content_type=MERGE_PATCH)
        else:
            cluster.request("DELETE", f"{crowded.migrations}/{name}")
    crowded.event("waits", "RoomNotMade")
    wait_until(
        lambda: not crowded.reservations(),
        lambda: f"serve still reserves {crowded.reservations()}",
        pause_s=0.5,
    )
    assert kvplace.ledger("move-a") == before
    assert source_uid in {pod["metadata"]["uid"] for pod in cluster.request("GET", crowded.pods)["items"]}
    time.sleep(3)
    unfinished = [
        one
        for one in cluster.request("GET", crowded.migrations)["items"]
        if one.get("status", {}).get("phase") not in ("Failed", "Succeeded")
    ]
    assert unfinished == []


def test_a_migration_of_defragment_goes_to_the_planned_node_and_ends_the_run_when_it_is_deleted(
    crowded: Crowded,
) -> None:
    cluster = crowded.cluster
    crowded.agents_report()
    pinned = {"type": PINNED, "status": "True", "reason": "AsPlaced", "message": "revision 1"}
    for pods in crowded.started.values():
        for pod in pods:
            path, status = f"{crowded.pods}/{pod['metadata']['name']}/status", {"conditions": [pinned]}
            cluster.request("PATCH", path, {"status": status}, content_type=STRATEGIC_MERGE_PATCH)

    async def defragmented() -> tuple[DefragmentingMove, list[MoveResult]]:
        session = await open_session(CredentialOptions(str(cluster.kubeconfig), None), Limits())
        try:
            client = ApiCluster(session, component="defragment")
            later = datetime.now(UTC) + timedelta(hours=1)  # all VMs have just started
            there = await read_movable_cluster(client, ObjectClient(session), (), later)
            found = defragment(there.nodes, (), there.between)
            pods = {name: vm.pod for name, vm in there.vms.items()}
            results = [one async for one in carry_out(client, found.moves, pods, may_continue=lambda: True)]
            return found.moves[0], results
        finally:
            await session.close()

    with ThreadPoolExecutor() as pool:
        running = pool.submit(asyncio.run, defragmented())
        migration = crowded.migration()
        source_uid = crowded.source["metadata"]["uid"]
        target = crowded.bound(crowded.virt.launcher_pod(crowded.namespace, "moves", other_than=source_uid))
        cluster.request("DELETE", f"{crowded.migrations}/{migration['metadata']['name']}")
        move, (result,) = running.result(timeout=PATIENCE_S)
    assert (move.id, move.target) == (f"{crowded.namespace}/moves", "move-b")
    assert target["spec"]["nodeName"] == "move-b"
    placed = PodPlacement.from_json(target["metadata"]["annotations"][PLACEMENT]).placement
    assert placed.owned == move.after.owned
    assert "was deleted" in result.error
