"""Answers about one VM in the JSON form that every command writes: a stable interface for programs."""

from __future__ import annotations

import json

from kvplace.core.cpu_map import write_cpu_map
from kvplace.core.cpuset import cpus_of
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.refusal import Refusal
from kvplace.core.request import OnFailure
from kvplace.core.request_json import Json
from kvplace.core.topology import Topology


def placement_document(machine: str, topology: Topology, placement: Placement, *, uid: str = "") -> Json:
    """Write a placement: the annotation `kvplace.io/placement` of a pod of that UID, and where it lies."""
    bound = PodPlacement.of(
        placement, pod_uid=uid, node=machine, topology=topology.fingerprint, on_failure=OnFailure.WAIT
    )
    document: Json = json.loads(bound.to_json())
    document["sockets"] = list(placement.packages)
    document["l3"] = list(placement.l3_groups)
    document["cpuMap"] = json.loads(
        write_cpu_map(topology, placement.vcpus or tuple(cpus_of(placement.cpus)))
    )
    return document


def refusal_document(refusal: Refusal) -> Json:
    """Write a refusal with its numbers."""
    return {
        "reason": refusal.reason.value,
        "message": refusal.message,
        "shortfall": dict(refusal.shortfall),
        "never": refusal.never,
    }
