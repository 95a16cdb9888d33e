"""The resources of a pod that asks: what kube-scheduler must count, and the marker by which it calls us."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from kvplace.admission.objects import Container, Pod, Quantity
from kvplace.admission.pod_size import PodSize
from kvplace.admission.sidecar import fields_of
from kvplace.admission.vm_size import VmSize
from kvplace.admission.vmi import owned_cpus
from kvplace.core.errors import Misconfigured
from kvplace.core.marks import MARKER_RESOURCE
from kvplace.core.quantity import parse_quantity
from kvplace.core.request import PinningOptions, Policy

_COMPUTE = "compute"


def mark(spec: dict[str, Any]) -> None:
    """Ask for the marker resource in the first container of a copied pod spec."""
    resources = fields_of(spec["containers"][0], "resources")
    for kind in ("requests", "limits"):
        fields_of(resources, kind)[MARKER_RESOURCE] = "1"


def raise_cpu_requests(
    spec: dict[str, Any], pod: Pod, options: PinningOptions, size: VmSize | PodSize, what: str
) -> tuple[str, ...]:
    """Raise the CPU requests in a copied pod spec to the CPUs that will be owned; answers warnings.

    Nothing is ever lowered, and no request passes its limit, so a Guaranteed pod stays one. Policies that
    own no CPUs leave all requests alone.
    """
    if options.policy is not Policy.EXCLUSIVE:
        return ()
    containers = pod.spec.containers
    if isinstance(size, VmSize):
        compute = next((entry for entry in containers if entry.name == _COMPUTE), containers[0])
        wanted = {compute.name: owned_cpus(options, size.vcpus)}
    else:
        wanted = dict(size.cpus_of)
    warnings: list[str] = []
    for raw, container in zip(spec["containers"], containers, strict=True):
        if container.name in wanted:
            warnings += _raise(raw, container, wanted[container.name], what)
    return tuple(warnings)


def _raise(raw: dict[str, Any], container: Container, wanted: int, what: str) -> list[str]:
    where = f"{what}: container {container.name}: CPU"
    limit = container.limited.get("cpu")
    most = _cpus(limit, where) if limit is not None else None
    # Where only a limit is given the API server requests as much.
    given = _cpus(container.requested.get("cpu", limit or 0), where)
    if most is not None and most < wanted:
        if given < most:
            fields_of(raw["resources"], "requests")["cpu"] = limit
        return [
            f"the CPU limit {limit} of container {container.name} throttles the {wanted} CPUs it will own"
        ]
    if given < wanted:
        fields_of(fields_of(raw, "resources"), "requests")["cpu"] = str(wanted)
    return []


def _cpus(value: Quantity, where: str) -> Fraction:
    try:
        return parse_quantity(value)
    except ValueError as error:
        raise Misconfigured(f"{where}: {error}") from None
