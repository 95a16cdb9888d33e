"""Holds for tests, of a pod that would own one CPU."""

from __future__ import annotations

from kvplace.core.cpuset import mask_of
from kvplace.core.placement import Placement
from kvplace.core.request import Policy
from kvplace.core.scalars import CpuId, NodeName
from kvplace.scheduler.holds import Hold
from tests.kube.claims import claim


def hold(node: str, uid: str, cpu: int) -> Hold:
    placement = Placement(Policy.EXCLUSIVE, (CpuId(cpu),), mask_of([cpu]))
    return Hold(NodeName(node), claim(uid, cpu), placement, fingerprint="of another machine")
