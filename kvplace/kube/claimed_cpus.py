"""CPUs in the allocation of a ResourceClaim of dra-driver-cpu (experimental).

With `--group-by=machine` the driver has one device for all CPUs of a node and leaves their choice to
another program, which writes them into the allocation as an opaque configuration. An allocation cannot
be changed in place. So it is cleared, and written again with the CPUs, as kube-scheduler made it.

The scheduler imports these rules also offline, where no HTTP client is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvplace.core.cpuset import format_cpu_list
from kvplace.core.errors import Conflict, Refused
from kvplace.core.quantity import counted, parse_quantity
from kvplace.core.scalars import CpuMask, PodUid
from kvplace.kube.object_records import CPU_DRIVER, ResourceClaimRecord

CAPACITY = f"{CPU_DRIVER}/cpu"
"""Name of the number of CPUs in requests and results."""
CLEARED: Mapping[str, Any] = {"allocation": None, "reservedFor": None}
"""The status of a ResourceClaim without an allocation."""
_API_VERSION = "v1alpha1"
"""The version of the driver's configuration."""


def stated_cpus(capacity: Mapping[str, str] | None) -> int | None:
    """Return the number of CPUs in the capacity of a request or result; None where there is none."""
    try:
        count = parse_quantity((capacity or {})[CAPACITY])
    except (KeyError, ValueError):
        return None
    return int(count) if count.denominator == 1 else None


def has_cpus(claim: ResourceClaimRecord) -> bool:
    """Whether dra-driver-cpu has a device in the allocation of a ResourceClaim."""
    return any(driver == CPU_DRIVER for driver, _, _ in claim.allocated or ())


def requests_cpus(claim: ResourceClaimRecord) -> bool:
    """Whether a ResourceClaim requests a number of CPUs of dra-driver-cpu."""
    return any(one.cpus is not None for one in claim.requests)


def requested_cpus(claim: ResourceClaimRecord) -> int:
    """Return how many CPUs a ResourceClaim requests; raises Refused for a claim that cannot be written."""
    requests = [one for one in claim.requests if one.cpus is not None]
    _check_devices(claim, sum(one.count for one in requests))
    (request,) = requests
    return request.cpus or 0


def allocated_cpus(claim: ResourceClaimRecord, pod: PodUid) -> int:
    """Return how many CPUs are allocated to a pod; raises Refused for a claim that cannot be written."""
    what = name_of(claim)
    results = claim.allocated or ()
    if foreign := sorted({driver for driver, _, _ in results} - {CPU_DRIVER}):
        raise Refused(
            f"{what} has devices of {', '.join(foreign)}, too: request CPUs in a ResourceClaim of their own"
        )
    _check_devices(claim, len(results))
    users = {user.get("uid") for user in claim.status.get("reservedFor") or ()}
    if users - {pod}:
        raise Refused(
            f"{what} is in use by another pod: give each pod its own by a resourceClaimTemplateName"
        )
    if not users:
        raise Conflict(f"{what} is not reserved for this pod")
    (result,) = claim.status["allocation"]["devices"]["results"]
    count = stated_cpus(result.get("consumedCapacity"))
    if count is None:
        raise Refused(
            f"{what} has a device of {CPU_DRIVER} without {CAPACITY}: run the driver with --group-by=machine"
        )
    return count


def _check_devices(claim: ResourceClaimRecord, count: int) -> None:
    if count != 1:
        raise Refused(
            f"{name_of(claim)} has {counted(count, 'device')} of {CPU_DRIVER}: request one, for all CPUs"
        )


def with_cpus(claim: ResourceClaimRecord, cpus: CpuMask, at: str) -> Mapping[str, Any] | None:
    """Return the status of an allocated ResourceClaim with these CPUs; None if it has them already.

    `at` is the time of the new allocation. Only the driver's configuration changes beside it.
    """
    allocation = claim.status["allocation"]
    devices = allocation["devices"]
    ours = {
        "source": "FromClaim",
        "requests": [devices["results"][0]["request"]],
        "opaque": {
            "driver": CPU_DRIVER,
            "parameters": {"apiVersion": _API_VERSION, "cpuConfig": {"cpuset": format_cpu_list(cpus)}},
        },
    }
    there = devices.get("config") or []
    config = [one for one in there if (one.get("opaque") or {}).get("driver") != CPU_DRIVER] + [ours]
    if there == config:
        return None
    return {
        "allocation": {
            **allocation,
            "allocationTimestamp": at,
            "devices": {**devices, "config": config},
        },
        "reservedFor": claim.status["reservedFor"],
    }


def name_of(claim: ResourceClaimRecord) -> str:
    """Name a ResourceClaim in a sentence."""
    return f"ResourceClaim {claim.namespace}/{claim.name}"
