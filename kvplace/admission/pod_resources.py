"""The resources of a pod with options: CPU requests as kube-scheduler must count them, and the marker.

The pod of a VM requests in all what the VM will own: a node whose CPUs are all owned must be exactly full for
kube-scheduler, too. So its compute container requests that, less what the other containers request. Its CPU
weight becomes a little smaller than its share; that decides nothing, since nobody competes for owned CPUs,
and the weight of the pod as a whole comes from the sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from math import ceil

from kvplace.admission.edits import EditedObject
from kvplace.admission.objects import Container, Pod, PodSpec, Quantity, Resources, read_quantity, typed
from kvplace.admission.pod_size import PodSize
from kvplace.admission.sidecar import compute_of
from kvplace.admission.vm_size import VmSize
from kvplace.admission.vmi import owned_cpus
from kvplace.core.errors import Misconfigured
from kvplace.core.marks import MARKER_RESOURCE
from kvplace.core.quantity import counted
from kvplace.core.request import PinningOptions, Policy

_LEAST_OF_OWNED = Fraction(1, 10)
"""What compute requests at least of each owned CPU: KubeVirt's own default for a vCPU."""


def request_marker(spec: EditedObject) -> None:
    """Add the marker resource, for which kube-scheduler calls the extender, to the first container.

    None of it: its name is all that matters to the extender's configuration, and kube-scheduler looks at what
    a pod requests of an extended resource on every node, slowly, even where it is told to ignore it.
    """
    resources = spec.list("containers").object(0).object("resources")
    for kind in ("requests", "limits"):
        resources.object(kind).put(MARKER_RESOURCE, "0")


def request_cpus(
    after: EditedObject, options: PinningOptions, size: VmSize | PodSize, what: str
) -> tuple[str, ...]:
    """Write the CPU requests of a pod that is complete but for them; returns warnings.

    No request is raised above its limit, and none of a Guaranteed pod or of a plain pod is lowered. A VM
    whose compute container requests more than it will own keeps that. Policies that own no CPUs change
    nothing.
    """
    if options.policy is not Policy.EXCLUSIVE:
        return ()
    pod = typed(after.values, Pod)
    containers = after.object("spec").list("containers")
    if isinstance(size, VmSize):
        index = compute_of(pod.spec.containers)
        owned = owned_cpus(options, size.vcpus)
        warnings = _request_rest(containers.object(index), pod.spec.containers[index], pod.spec, owned, what)
    else:
        warnings = [
            warning
            for index, container in enumerate(pod.spec.containers)
            if container.name in size.cpus_of
            for warning in _raise_request(
                containers.object(index), container, size.cpus_of[container.name], what
            )
        ]
    if pod.spec.resources is not None:
        _raise_request_of_all(after, what)
    return tuple(warnings)


def _raise_request_of_all(after: EditedObject, what: str) -> None:
    """Let the pod as a whole request no less than its containers, as the API server wants it.

    The API server has set this request itself, from what the containers requested before.
    """
    spec = typed(after.values, Pod).spec
    whole = spec.resources or Resources()
    place = f"{what}: spec.resources"
    together = _together(_running(spec), what)
    limit = whole.limited.get("cpu")
    if limit is not None and read_quantity(limit, f"{place}.limits.cpu") < together:
        raise Misconfigured(
            f"{place}.limits.cpu is {limit}, but the containers request {_written(together)} CPUs, because "
            f"the pod asks for CPUs of its own; set it to {_written(together)}, or remove it"
        )
    requested = whole.requested.get("cpu")
    if requested is not None and read_quantity(requested, f"{place}.requests.cpu") < together:
        after.object("spec").object("resources").object("requests").put("cpu", _written(together))


def _request_rest(
    edited: EditedObject, compute: Container, spec: PodSpec, owned: int, what: str
) -> list[str]:
    """Let compute request the owned CPUs less what all other containers request."""
    if _is_guaranteed(spec, what):
        return _raise_request(edited, compute, owned, what)
    overhead = read_quantity((spec.overhead or {}).get("cpu", 0), f"{what}: spec.overhead.cpu")
    beside = _together((each for each in _running(spec) if each is not compute), what) + _rounded(overhead)
    rest = max(owned - beside, owned * _LEAST_OF_OWNED)
    limit = compute.limited.get("cpu")
    most = _cpus(limit, compute, what) if limit is not None else Fraction(owned)
    requested, wanted = _requested(compute, what), min(rest, most)
    if requested <= owned and requested != wanted:
        edited.object("resources").object("requests").put("cpu", _written(wanted))
    return [_throttled(compute, owned)] if most < owned else []


def _raise_request(edited: EditedObject, container: Container, owned: int, what: str) -> list[str]:
    limit = container.limited.get("cpu")
    most = _cpus(limit, container, what) if limit is not None else None
    requested = _requested(container, what)
    if most is not None and most < owned:
        if requested < most:
            edited.object("resources").object("requests").put("cpu", limit)
        return [_throttled(container, owned)]
    if requested < owned:
        edited.object("resources").object("requests").put("cpu", str(owned))
    return []


def _throttled(container: Container, owned: int) -> str:
    limit = container.limited["cpu"]
    cpus = counted(owned, "CPU")
    return f"the CPU limit {limit} of container {container.name} throttles the {cpus} it will own"


def _running(spec: PodSpec) -> list[Container]:
    """List the containers that run side by side.

    Ordinary init containers end before the others start: they count only where they request more than all
    of these together.
    """
    return [
        *spec.containers,
        *(each for each in spec.init_containers or [] if each.restart_policy == "Always"),
    ]


def _together(containers: Iterable[Container], what: str) -> Fraction:
    # kube-scheduler rounds each up to whole millicores.
    return sum((_rounded(_requested(each, what)) for each in containers), start=Fraction(0))


def _is_guaranteed(spec: PodSpec, what: str) -> bool:
    """Whether Kubernetes would put the pod into QoS class Guaranteed."""
    for container in [*spec.containers, *(spec.init_containers or [])]:
        for key, resource in (("cpu", "CPU"), ("memory", "memory")):
            limit = container.limited.get(key)
            if limit is None:
                return False
            where = f"{what}: container {container.name}: {resource}"
            if read_quantity(container.requested.get(key, limit), where) != read_quantity(limit, where):
                return False
    return True


def _requested(container: Container, what: str) -> Fraction:
    """Read a CPU request; where there is only a limit, the API server sets the request to it."""
    return _cpus(container.requested.get("cpu", container.limited.get("cpu", 0)), container, what)


def _cpus(value: Quantity, container: Container, what: str) -> Fraction:
    return read_quantity(value, f"{what}: container {container.name}: CPU")


def _rounded(cpus: Fraction) -> Fraction:
    return Fraction(ceil(cpus * 1000), 1000)


def _written(cpus: Fraction) -> str:
    millicores = ceil(cpus * 1000)
    return f"{millicores}m" if millicores % 1000 else str(millicores // 1000)
