"""A VM on its cores, what doctor reads of a cluster with it, and the moment of the check."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.ledger import Ledger
from kvplace.core.node_topology import Enforcement
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import OnFailure, Policy
from kvplace.core.scalars import CpuId, NodeName, PodUid
from kvplace.core.well_known_names import PINNED
from kvplace.doctor.installation import Checking, Installation
from kvplace.kube.node_filters import SchedulableNode
from kvplace.kube.object_parts import Metadata
from kvplace.kube.object_records import Condition, LedgerRecord, NodeRecord, PodRecord, TopologyRecord
from kvplace.nodes.cluster_view import cluster_view
from tests.nodes.machines import TWO

NOW = datetime(2026, 6, 1, tzinfo=UTC)
WORKER = NodeName("worker")


def pod(uid: str, *, pinned: bool | None = None, cpus: str = "0,8") -> PodRecord:
    mask = parse_cpu_list(cpus)
    placement = Placement(Policy.EXCLUSIVE, (CpuId(0), CpuId(8)), mask, mask)
    bound = PodPlacement(PodUid(uid), WORKER, TWO.fingerprint, OnFailure.WAIT, placement)
    condition = () if pinned is None else (Condition(PINNED, pinned, "Said", "so"),)
    return PodRecord(
        "default",
        f"pod-{uid}",
        PodUid(uid),
        WORKER,
        "Running",
        request='{"version":1,"vcpus":2}',
        placement=bound.to_json(),
        conditions=condition,
    )


def view(*pods: PodRecord, ledger: Ledger | None = None, **topology: Any) -> dict[str, Any]:
    described = {"topology": TWO, "by_agent": True, "enforcement": "nri", **topology}
    described["enforcement"] = Enforcement(described["enforcement"])
    return {
        "view": cluster_view(
            [NodeRecord(WORKER, "uid")],
            [TopologyRecord(WORKER, **described)],
            [] if ledger is None else [LedgerRecord(WORKER, ledger, "1")],
            pods,
        ),
        "nodes": (SchedulableNode(metadata=Metadata("worker")),),
    }


def installation(**fields: Any) -> Installation:
    given = {"now": NOW, "client_version": "0.1.0", "objects": {}, "server_version": "v1.36.3", **fields}
    return Installation(**given)


def problems(check: Checking, **fields: Any) -> list[str]:
    found = list(check(installation(**fields)))
    assert all(one.fix and one.about for one in found)
    return [f"{one.level.value}: {one.about}: {one.problem}" for one in found]


def named(
    name: str, *, component: str = "", namespace: str = "kvplace-system", **content: Any
) -> dict[str, Any]:
    labels = {"app.kubernetes.io/component": component}
    return {"metadata": {"name": name, "namespace": namespace, "labels": labels}, **content}
