"""Placements on one machine, in the forms in which kvplace and kubectl print them."""

from __future__ import annotations

import json
from typing import Any

from kvplace.core.cpuset import mask_of
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import NumaMemory, OnFailure, Policy
from kvplace.core.scalars import NO_CPUS, CpuId, NodeName, NumaId, PodUid
from kvplace.core.well_known_names import PLACED_LABEL, PLACEMENT
from kvplace.machines.server_types import read_machine

NAME = "epyc-7502p"
MACHINE = read_machine(NAME)


def placement(
    cpus: tuple[int, ...], *, uid: str = "", node: str = "", policy: Policy = Policy.EXCLUSIVE
) -> PodPlacement:
    return PodPlacement(
        pod_uid=PodUid(uid),
        node=NodeName(node),
        topology="",
        on_failure=OnFailure.WAIT,
        placement=Placement(
            policy=policy,
            vcpus=tuple(map(CpuId, cpus)),
            cpus=mask_of(cpus),
            emulator_cpus=mask_of(cpus),
            io_thread_cpus=(),
            numa_nodes=(NumaId(0),),
            numa_memory=NumaMemory.OFF,
            memory={},
            owned=mask_of(cpus) if policy is Policy.EXCLUSIVE else NO_CPUS,
        ),
    )


def answer(uid: str, *cpus: int) -> dict[str, Any]:
    return {"id": uid, "placement": json.loads(placement(cpus).to_json())}


def pod(
    name: str, *cpus: int, node: str = NAME, phase: str = "Running", **annotations: str
) -> dict[str, Any]:
    uid = f"uid-{name}"
    return {
        "kind": "Pod",
        "metadata": {
            "name": f"virt-launcher-{name}",
            "namespace": "shop",
            "uid": uid,
            "labels": {PLACED_LABEL: "true"},
            "annotations": annotations or {PLACEMENT: placement(cpus, uid=uid, node=node).to_json()},
            "ownerReferences": [
                {
                    "apiVersion": "kubevirt.io/v1",
                    "kind": "VirtualMachineInstance",
                    "name": name,
                    "controller": True,
                }
            ],
        },
        "spec": {"nodeName": node},
        "status": {"phase": phase},
    }


def lines(*documents: object) -> str:
    return "".join(json.dumps(document) + "\n" for document in documents)
