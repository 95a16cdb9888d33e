"""A VM on its cores, and the moment at which doctor looks."""

from __future__ import annotations

from datetime import UTC, datetime

from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.marks import PINNED
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import OnFailure, Policy
from kvplace.core.scalars import CpuId, NodeName, PodUid
from kvplace.kube.conditions import Condition
from kvplace.kube.records import PodRecord
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
