"""Defragmentation moves only settled VMs of owners who agreed, and only where KubeVirt can migrate them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from kvplace.core.allocator.allocate import try_place
from kvplace.core.claim_changes import claim_while_relocating
from kvplace.core.free_resources import free_of
from kvplace.core.ledger import Ledger, LedgerChange, Relocation, claim_of
from kvplace.core.node_topology import Enforcement
from kvplace.core.placement import PodPlacement
from kvplace.core.request import OnFailure, PinningOptions, Policy, Request, Scope
from kvplace.core.request_json import PodRequest, write_request
from kvplace.core.scalars import NodeName, PodUid, ResourceName
from kvplace.core.well_known_names import MOVABLE, PINNED, RELOCATED
from kvplace.kube.migrations import MigrationRecord
from kvplace.kube.node_filters import RunningVmi, SchedulableNode
from kvplace.kube.object_records import (
    Condition,
    LedgerRecord,
    NodeRecord,
    PodRecord,
    PodReport,
    TopologyRecord,
)
from kvplace.nodes.cluster_view import cluster_view
from kvplace.nodes.movable_cluster import MovableCluster, movable_cluster
from kvplace.nodes.node_cache import PEACE_S
from kvplace.nodes.planning_cluster import planning_cluster
from tests.nodes.machines import TWO, scheduled

HERE, THERE, BARE = (NodeName(name) for name in ("here", "there", "bare"))
NOW = datetime(2026, 1, 2, 12, tzinfo=UTC)
MIGRATABLE = {"type": "LiveMigratable", "status": "True"}
UID = PodUid("uid-db")
FOUR = Request(4)


def schedulable(name: NodeName) -> SchedulableNode:
    node = scheduled(name)
    return msgspec.structs.replace(
        node, metadata=msgspec.structs.replace(node.metadata, labels={"kubevirt.io/schedulable": "true"})
    )


ONE_SOCKET = {"cpu-set": "one-socket"}


def vmi(
    annotations: dict[str, str],
    conditions: list[Any] | None = None,
    opted_in: Mapping[str, str] = ONE_SOCKET,
) -> RunningVmi:
    document = {
        "metadata": {
            "name": "db",
            "namespace": "shop",
            "uid": "vmi-db",
            "annotations": {**opted_in, **annotations},
        },
        "status": {"phase": "Running", "conditions": [MIGRATABLE] if conditions is None else conditions},
    }
    return msgspec.convert(document, RunningVmi)


def movable(
    asking: RunningVmi,
    *,
    request: Request = FOUR,
    revision: int = 1,
    reported: int = 1,
    pinned: bool = True,
    relocating: bool = False,
    relocated: timedelta | None = None,
    created: str = "2026-01-01T00:00:00Z",
    migrations: tuple[MigrationRecord, ...] = (),
    enforcement: Enforcement = Enforcement.NRI,
    twice: bool = False,
    plain_pod: Mapping[str, str] | None = None,
) -> MovableCluster:
    """One VM on the first of two nodes with an agent, and a third without.

    At its start its owner has agreed to all moves; what counts is what its VMI states now.
    `plain_pod`: it is a pod with these annotations instead.
    """
    placement = try_place(TWO, free_of(TWO, Ledger()), request)
    assert placement is not None
    placed = PodPlacement(UID, HERE, TWO.fingerprint, OnFailure.WAIT, placement, revision=revision)
    claim = claim_of(UID, placement, namespace="shop", pod="virt-launcher-db", vmi="db", revision=revision)
    if relocating:
        claim = claim_while_relocating(claim, Relocation(replace(placed, revision=revision + 1), placed))
    conditions: tuple[Condition, ...] = (
        Condition(PINNED, pinned, "AsPlaced" if pinned else "Elsewhere", f"revision {revision}"),
    )
    if relocated is not None:
        changed = (NOW - relocated).isoformat()
        conditions = (*conditions, Condition(RELOCATED, True, "Relocated", "it moved", changed))
    pod = PodRecord(
        "shop",
        "virt-launcher-db",
        UID,
        node=HERE,
        phase="Running",
        request=write_request(PodRequest(request, vmi="shop/db", movable=True, may_migrate=True)),
        placement=placed.to_json(),
        vmi="db",
        vmi_uid="vmi-db",
        conditions=conditions,
        created=created,
    )
    if plain_pod is not None:
        asked = PodRequest(request, movable=True, may_migrate=True)
        pod = replace(pod, request=write_request(asked), vmi="", vmi_uid="", asking=dict(plain_pod))
        claim = replace(claim, vmi="")
    pods = [pod, replace(pod, uid=PodUid("target"), node=THERE, placement="")] if twice else [pod]
    report = PodReport(UID, revision=reported, pinned=pinned, running=True)
    topologies = [
        TopologyRecord(HERE, TWO, enforcement=enforcement, pods={UID: report}),
        TopologyRecord(THERE, TWO, enforcement=Enforcement.NRI),
        TopologyRecord(BARE, TWO),
    ]
    ledger = Ledger().after(LedgerChange(claims=(claim,)))
    nodes = [NodeRecord(name, name) for name in (HERE, THERE, BARE)]
    view = cluster_view(nodes, topologies, [LedgerRecord(HERE, ledger, "1")], pods)
    planning = planning_cluster(view, [schedulable(name) for name in (HERE, THERE, BARE)])
    return movable_cluster(view, planning, [asking], migrations, NOW)


def test_a_vm_moves_inside_its_node_with_true_and_to_nodes_with_an_agent_with_nodes() -> None:
    inside = movable(vmi({MOVABLE: "true"}))
    assert inside.inside == {"shop/db"}
    assert not inside.between
    assert not inside.stay
    both = movable(vmi({MOVABLE: "nodes"}))
    assert both.inside == {"shop/db"}
    closed = both.between["shop/db"]
    assert "no agent" in closed[BARE].message
    assert THERE not in closed
    assert both.vms["shop/db"].pod.uid == UID


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"asking": vmi({})}, "have not agreed"),
        ({"asking": vmi({MOVABLE: "sometimes"})}, "cannot be read"),
        ({"asking": vmi({MOVABLE: "nodes", "kvplace.io/cpu-policy": "share"})}, "were edited"),
        ({"asking": vmi({}, opted_in={})}, "were removed"),
        ({"asking": vmi({MOVABLE: "false"}, opted_in={})}, "were removed"),
        ({"asking": vmi({MOVABLE: "nodes"}, opted_in={})}, "were removed"),
        ({"enforcement": Enforcement.NONE}, "no agent"),
        ({"pinned": False}, "not pinned"),
        ({"reported": 1, "revision": 2}, "not pinned"),
        ({"relocating": True}, "not pinned"),
        ({"twice": True}, "migrate"),
        ({"migrations": (MigrationRecord("shop", "m", "db", "Scheduling"),)}, "migrate"),
        ({"relocated": timedelta(seconds=PEACE_S - 1)}, "lately"),
        ({"request": Request(4, devices={ResourceName("intel.com/vf"): 1})}, "devices"),
    ],
)
def test_a_vm_stays_with_the_reason(state: dict[str, Any], reason: str) -> None:
    found = movable(**{"asking": vmi({MOVABLE: "nodes"}), **state})
    assert not found.vms
    assert not found.inside
    assert not found.between
    ((said, count),) = found.stay.items()
    assert reason in said
    assert count == 1


def test_a_plain_pod_moves_inside_its_node_unless_its_annotations_were_edited() -> None:
    request = Request(4, PinningOptions(Scope.ONE_SOCKET).of_plain_pod())
    agreed = {"cpu-set": "one-socket", MOVABLE: "true"}
    assert movable(vmi({}), request=request, plain_pod=agreed).inside == {"shop/virt-launcher-db"}
    edited = movable(vmi({}), request=request, plain_pod={**agreed, "cpu-set": "one-numa"})
    assert not edited.inside
    assert "were edited" in next(iter(edited.stay))


def test_a_vm_with_fixed_cores_stays() -> None:
    options = PinningOptions(Scope.ONE_SOCKET, policy=Policy.IMMOVABLE)
    asking = vmi({MOVABLE: "nodes", "kvplace.io/cpu-policy": "immovable"})
    found = movable(asking, request=Request(4, options))
    assert not found.inside
    assert "fix their cores" in next(iter(found.stay))


def test_a_vm_that_kubevirt_does_not_migrate_or_that_has_just_come_moves_only_inside_its_node() -> None:
    stays = {"type": "LiveMigratable", "status": "False", "reason": "DisksNotLiveMigratable"}
    for found in (
        movable(vmi({MOVABLE: "nodes"}, [stays])),
        movable(vmi({MOVABLE: "nodes"}), created="2026-01-02T11:45:00Z"),
    ):
        assert found.inside == {"shop/db"}
        assert not found.between


def test_a_vm_moves_again_after_its_time_of_peace_and_after_a_migration_that_has_ended() -> None:
    ended = (MigrationRecord("shop", "m", "db", "Failed"),)
    found = movable(vmi({MOVABLE: "nodes"}), relocated=timedelta(seconds=PEACE_S + 1), migrations=ended)
    assert found.inside == set(found.between) == {"shop/db"}
