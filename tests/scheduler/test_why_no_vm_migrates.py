"""An event gives the reason why no VM migrates, and a VM that has just started is tried soon."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvplace.kube.events import EventReason
from kvplace.kube.migrations import MigrationRecord
from kvplace.kube.object_records import PodRecord
from kvplace.scheduler.extender import ExtenderSettings
from kvplace.scheduler.limits import MOST_PER_HOUR, SEARCH_S, SOON_S
from kvplace.scheduler.room_maker import MakeRoom
from tests.controller.relocations import NodeAgent, edit
from tests.controller.replicas import Replica, asking_pod, replica
from tests.kube.faulty_cluster import FaultyCluster
from tests.scheduler.crowded_node import notes
from tests.scheduler.two_nodes import VirtController, nodes, two_crowded

NONE_CAN = "no VM migrates: none of the VMs that agreed can migrate now"
NODES = ExtenderSettings(make_room=MakeRoom.NODES)
TRY_S = 10.0
"""How often pods are searched that kube-scheduler does not offer."""


@pytest.fixture
def cluster() -> FaultyCluster:
    return FaultyCluster()


@pytest.fixture
def agents(cluster: FaultyCluster) -> dict[str, NodeAgent]:
    return nodes(cluster, "a", "b")


def put_waiting(one: Replica) -> PodRecord:
    """Create a VM that every node has too few CPUs for."""
    big = asking_pod(one.cluster, "big", 8)
    one.cluster.put_running_vmi(big.vmi, big.vmi_uid, status={"phase": "Pending"})
    one.cluster.change_pod("default", "big", was_tried=True, unschedulable="2 Insufficient cpu")
    return big


@pytest.mark.parametrize(
    ("why", "reported"),
    [
        ("hour", "no VM migrates: 6 migrations have begun within an hour"),
        ("under way", "no VM migrates: another VM migrates to make room"),
        ("evacuation", "no VM migrates: VMs are being evacuated"),
        (
            "disks",
            f"{NONE_CAN} (it is not LiveMigratable (DisksNotLiveMigratable): 2 VMs)",
        ),
        ("peace", f"{NONE_CAN} (it has migrated lately: 2 VMs)"),
    ],
)
async def test_an_event_on_the_waiting_vm_gives_the_reason(
    cluster: FaultyCluster, agents: dict[str, NodeAgent], why: str, reported: str
) -> None:
    disks = {"type": "LiveMigratable", "status": "False", "reason": "DisksNotLiveMigratable"}
    async with replica(cluster, extending=NODES) as one:
        for vm in await two_crowded(one, agents):
            if why == "disks":
                cluster.put_running_vmi(vm.vmi, vm.vmi_uid, status={"conditions": [disks]})
            if why == "peace":
                cluster.put_migration("default", f"by-hand-{vm.vmi}", vm.vmi, "Succeeded")
        ours = {"hour": MOST_PER_HOUR, "under way": 1}.get(why, 0)
        for number in range(ours):
            key, phase = ("other", f"kvplace-{number}"), "Succeeded" if why == "hour" else "Running"
            cluster.migrations.put(key, MigrationRecord(*key, "vm", phase, cluster.time(), is_ours=True))
        if why == "evacuation":
            cluster.put_migration("other", "kubevirt-evacuation-x", "plain", "Running")
        put_waiting(one)
        await asyncio.sleep(2 * TRY_S)
        assert notes(cluster, "big", EventReason.ROOM_NOT_MADE) == [reported]


@pytest.mark.parametrize("missing", ["pinned", "LiveMigratable", "nothing"])
async def test_a_vm_that_has_just_started_migrates_as_soon_as_it_can(
    cluster: FaultyCluster, agents: dict[str, NodeAgent], missing: str
) -> None:
    assert SOON_S < SEARCH_S / 2
    async with replica(cluster, extending=NODES) as one:
        virt = VirtController(one, agents)
        small = await two_crowded(one, agents)
        for vm, agent in zip(small, agents.values(), strict=True):
            pinned = agent.in_force.pop(vm.uid) if missing == "pinned" else None
            agent.report()
            status: dict[str, Any] = {} if missing == "nothing" else {"status": {"conditions": []}}
            cluster.put_running_vmi(vm.vmi, vm.vmi_uid, **status)
            if pinned is not None:
                agent.in_force[vm.uid] = pinned
        put_waiting(one)
        await asyncio.sleep(2 * TRY_S + 1)
        assert bool(virt.created) == (missing == "nothing")
        assert notes(cluster, "big", EventReason.ROOM_NOT_MADE) == []
        for vm, agent in zip(small, agents.values(), strict=True):
            agent.report()
            cluster.put_running_vmi(vm.vmi, vm.vmi_uid)
        await asyncio.sleep(SOON_S + TRY_S + 1)
        assert len(virt.created) == 1


@pytest.mark.parametrize("why", ["disks", "no condition for long", "annotations removed"])
async def test_a_vm_that_never_can_migrate_is_searched_for_no_more_often_than_others(
    cluster: FaultyCluster, agents: dict[str, NodeAgent], why: str
) -> None:
    disks = {"type": "LiveMigratable", "status": "False", "reason": "DisksNotLiveMigratable"}
    conditions = [disks] if why == "disks" else []
    async with replica(cluster, extending=NODES) as one:
        virt = VirtController(one, agents)
        small = await two_crowded(one, agents)
        for vm in small:
            cluster._put_pod(replace(cluster._pod(vm.namespace, vm.name), created=cluster.time()))
            cluster.put_running_vmi(vm.vmi, vm.vmi_uid, status={"conditions": conditions})
            if why == "annotations removed":
                edit(cluster, vm, {})
        if why == "no condition for long":
            await asyncio.sleep(300)
        put_waiting(one)
        await asyncio.sleep(TRY_S + 1)
        for vm in small:
            cluster.put_running_vmi(vm.vmi, vm.vmi_uid)
            if why == "annotations removed":
                edit(cluster, vm, {"cpu-set": "one-socket", "kvplace.io/movable": "nodes"})
        await asyncio.sleep(SEARCH_S - TRY_S)
        assert virt.created == []
        await virt.until_created()
