"""The resources of a pod with options: CPU requests as kube-scheduler must count them, and the marker."""

from __future__ import annotations

from typing import Any

from kvplace.admission.objects import Container, Pod, read_quantity
from kvplace.admission.pod_size import PodSize
from kvplace.admission.sidecar import fields_of
from kvplace.admission.vm_size import VmSize
from kvplace.admission.vmi import owned_cpus
from kvplace.core.marks import MARKER_RESOURCE
from kvplace.core.request import PinningOptions, Policy

_COMPUTE = "compute"


def request_marker(spec: dict[str, Any]) -> None:
    """Add the marker resource, for which kube-scheduler calls the extender, to the first container."""
    resources = fields_of(spec["containers"][0], "resources")
    for kind in ("requests", "limits"):
        fields_of(resources, kind)[MARKER_RESOURCE] = "1"


def raise_cpu_requests(
    spec: dict[str, Any], pod: Pod, options: PinningOptions, size: VmSize | PodSize, what: str
) -> tuple[str, ...]:
    """Raise the CPU requests in a copied pod spec to the CPUs that will be owned; returns warnings.

    No request is lowered or raised above its limit, so a Guaranteed pod stays Guaranteed. Policies that own
    no CPUs change nothing.
    """
    if options.policy is not Policy.EXCLUSIVE:
        return ()
    containers = pod.spec.containers
    if isinstance(size, VmSize):
        compute = next((entry for entry in containers if entry.name == _COMPUTE), containers[0])
        owned = {compute.name: owned_cpus(options, size.vcpus)}
    else:
        owned = dict(size.cpus_of)
    warnings: list[str] = []
    for raw, container in zip(spec["containers"], containers, strict=True):
        if container.name in owned:
            warnings += _raise_request(raw, container, owned[container.name], what)
    return tuple(warnings)


def _raise_request(raw: dict[str, Any], container: Container, owned: int, what: str) -> list[str]:
    where = f"{what}: container {container.name}: CPU"
    limit = container.limited.get("cpu")
    most = read_quantity(limit, where) if limit is not None else None
    # Where there is only a limit, the API server sets the request to it.
    requested = read_quantity(container.requested.get("cpu", limit or 0), where)
    if most is not None and most < owned:
        if requested < most:
            fields_of(raw["resources"], "requests")["cpu"] = limit
        return [f"the CPU limit {limit} of container {container.name} throttles the {owned} CPUs it will own"]
    if requested < owned:
        fields_of(fields_of(raw, "resources"), "requests")["cpu"] = str(owned)
    return []
