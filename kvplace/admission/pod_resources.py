"""The resources of a pod with options: CPU requests as kube-scheduler must count them, and the marker.

The pod of a VM requests in all what the VM will own: a node without an unowned CPU must be exactly full for
kube-scheduler, too. So its compute container requests that, less what the other containers request. Its CPU
weight becomes a little smaller than its share; that decides nothing, since nothing competes for owned CPUs,
and the weight of the pod as a whole comes from the sum. The pod of a VM that shares CPUs requests a tenth of
them at least: exclusive VMs do not get these, so they must not be had for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from math import ceil

from kvplace.admission.edits import EditedObject
from kvplace.admission.objects import (
    AdmittedContainer,
    AdmittedPodSpec,
    AdmittedResources,
    Pod,
    Quantity,
    is_guaranteed,
    read_quantity,
    typed,
)
from kvplace.admission.sidecar import compute_of
from kvplace.admission.size import PodSize, VmSize
from kvplace.core.errors import Misconfigured
from kvplace.core.request import Request
from kvplace.core.well_known_names import MARKER_RESOURCE

_LEAST = Fraction(1, 10)
"""What a container requests at least of each CPU that the pod requests: KubeVirt's own default for a vCPU."""


def request_marker(spec: EditedObject) -> None:
    """Add the marker resource to the first container, so that kube-scheduler calls the extender.

    None of it: its name is all that matters to the extender's configuration, and kube-scheduler checks what
    a pod requests of an extended resource on every node, slowly, even where it is configured to ignore it.
    """
    resources = spec.list("containers").object(0).object("resources")
    for kind in ("requests", "limits"):
        resources.object(kind).put(MARKER_RESOURCE, "0")


def request_cpus(after: EditedObject, request: Request, size: VmSize | PodSize, what: str) -> tuple[str, ...]:
    """Write the CPU requests of a pod that is complete but for them; returns warnings.

    A lower limit is raised, too. No request of a Guaranteed pod, of a plain pod or of a VM that will own no
    CPUs is lowered. A compute container that requests more than its VM will own keeps that.
    """
    pod = typed(after.values, Pod)
    containers = after.object("spec").list("containers")
    if isinstance(size, VmSize):
        index = compute_of(pod.spec.containers)
        compute = pod.spec.containers[index]
        warnings = _request_rest(containers.object(index), compute, pod.spec, request, what)
    else:
        warnings = []
        of_each = Fraction(1) if request.owns_cpus else _LEAST
        for index, container in enumerate(pod.spec.containers):
            least = size.cpus_of.get(container.name, 0) * of_each
            if _requested(container, what) < least:
                containers.object(index).object("resources").object("requests").put("cpu", _written(least))
    if pod.spec.resources is not None:
        _raise_request_of_all(after, what)
    return tuple(warnings)


def _raise_request_of_all(after: EditedObject, what: str) -> None:
    """Let the pod as a whole request no less than its containers, as the API server wants it.

    The API server has set this request itself, from what the containers requested before.
    """
    spec = typed(after.values, Pod).spec
    whole = spec.resources or AdmittedResources()
    place = f"{what}: spec.resources"
    together = _together(_running(spec), what)
    limit = whole.limited.get("cpu")
    if limit is not None and read_quantity(limit, f"{place}.limits.cpu") < together:
        raise Misconfigured(
            f"{place}.limits.cpu is {limit}, but the containers request {_written(together)} CPUs, because "
            f"the pod requests CPUs of its own; set it to {_written(together)}, or remove it"
        )
    requested = whole.requested.get("cpu")
    if requested is not None and read_quantity(requested, f"{place}.requests.cpu") < together:
        after.object("spec").object("resources").object("requests").put("cpu", _written(together))


def _request_rest(
    edited: EditedObject, compute: AdmittedContainer, spec: AdmittedPodSpec, request: Request, what: str
) -> list[str]:
    """Let compute request what the whole pod must, less what all other containers request."""
    least = Fraction(request.least_millicores, 1000)
    resources = edited.object("resources")
    limit = compute.limited.get("cpu")
    is_limited = limit is not None and _cpus(limit, compute, what) < least
    if is_guaranteed(spec, what):
        if is_limited:
            resources.object("requests").put("cpu", _written(least))
    else:
        overhead = read_quantity((spec.overhead or {}).get("cpu", 0), f"{what}: spec.overhead.cpu")
        others = (each for each in _running(spec) if each is not compute)
        beside = _together(others, what) + _rounded(overhead)
        rest = max(least - beside, least * _LEAST)
        requested = _requested(compute, what)
        if requested < rest or (request.owns_cpus and rest < requested <= least):
            resources.object("requests").put("cpu", _written(rest))
    if not is_limited:
        return []
    resources.object("limits").put("cpu", _written(least))
    place = f"the CPU limit {limit} of container {compute.name}"
    return [f"{place} is raised to {_written(least)}: the pod must request as much for its CPUs"]


def _running(spec: AdmittedPodSpec) -> list[AdmittedContainer]:
    """List the containers that run side by side.

    Ordinary init containers end before the others start: they count only where they request more than all
    of these together.
    """
    return [
        *spec.containers,
        *(each for each in spec.init_containers or [] if each.restart_policy == "Always"),
    ]


def _together(containers: Iterable[AdmittedContainer], what: str) -> Fraction:
    # kube-scheduler rounds each up to whole millicores.
    return sum((_rounded(_requested(each, what)) for each in containers), start=Fraction(0))


def _requested(container: AdmittedContainer, what: str) -> Fraction:
    """Read a CPU request; where there is only a limit, the API server sets the request to it."""
    return _cpus(container.requested.get("cpu", container.limited.get("cpu", 0)), container, what)


def _cpus(value: Quantity, container: AdmittedContainer, what: str) -> Fraction:
    return read_quantity(value, f"{what}: container {container.name}: CPU")


def _rounded(cpus: Fraction) -> Fraction:
    return Fraction(ceil(cpus * 1000), 1000)


def _written(cpus: Fraction) -> str:
    millicores = ceil(cpus * 1000)
    return f"{millicores}m" if millicores % 1000 else str(millicores // 1000)
