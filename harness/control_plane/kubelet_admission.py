"""A kubelet's decision about a pod: whether its CPU requests still fit.

kube-schedulers that do not know of each other's pods give a node more than it has; the kubelet is the last
judge, and a pod that it rejects is never started nor scheduled again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Json = dict[str, Any]
OUT_OF_CPU = "OutOfcpu"


def has_ended(pod: Json) -> bool:
    """Whether a pod uses nothing any more."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def cpu_request(pod: Json) -> int:
    """Return the CPUs that a pod requests, in thousandths; init containers are not counted."""
    return sum(
        _thousandths(str(container.get("resources", {}).get("requests", {}).get("cpu", "0")))
        for container in pod["spec"]["containers"]
    )


def rejection(pod: Json, others: Iterable[Json], allocatable_cpus: int) -> Json | None:
    """Return the status of a pod that does not fit beside the others on its node; None if it fits."""
    used = sum(cpu_request(other) for other in others if not has_ended(other))
    asked = cpu_request(pod)
    if used + asked <= allocatable_cpus * 1000:
        return None
    message = (
        f"Pod was rejected: Node didn't have enough resource: cpu, requested: {asked}, used: {used}, "
        f"capacity: {allocatable_cpus * 1000}"
    )
    return {"phase": "Failed", "reason": OUT_OF_CPU, "message": message}


def _thousandths(quantity: str) -> int:
    if quantity.endswith("m"):
        return int(quantity[:-1])
    return round(float(quantity) * 1000)
