"""The size and devices of a VM and of a plain pod, and the CPU requests that follow from a size.

The pod of a VM does not show the VM's size: KubeVirt requests a tenth of a CPU per vCPU, and memory with
QEMU's overhead. So the size is read from the VMI exactly as KubeVirt reads it. Sources in KubeVirt:
GetCPUTopology and GetVirtualMemory (converter/vcpu), GetIOThreadsCountType (converter/iothreads).

The size of a plain pod is the sum of its containers' CPU limits, which must be whole numbers. Memory may have
any or no limit. Containers without a CPU limit are not counted.

Devices are counted by the resource of their device plugin. A pod states all of them: virt-controller adds the
devices of the VM to its compute container, also the devices of an SR-IOV network's
NetworkAttachmentDefinition. A VMI states GPUs and host devices only.

The containers of a VM's pod together request the CPUs that the VM will own: a node without an unowned CPU
must be exactly full for kube-scheduler, too. So the compute container requests these CPUs less the requests
of the other containers. Its CPU weight becomes a little smaller than its share; that decides nothing, since
nothing competes for owned CPUs, and the weight of the pod as a whole comes from the sum. The pod of a VM that
shares CPUs requests at least a tenth of them: exclusive VMs do not get these CPUs, so they must have a price.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from math import ceil
from typing import Annotated

import msgspec

from kvplace.admission.edits import EditedObject
from kvplace.admission.objects import (
    AdmittedContainer,
    AdmittedPodSpec,
    AdmittedResources,
    Pod,
    Quantity,
    VmiDomain,
    is_guaranteed,
    read_bytes,
    read_quantity,
    typed,
    whole_pages,
)
from kvplace.admission.sidecar import compute_index
from kvplace.core.errors import Misconfigured
from kvplace.core.json_fields import MAX_BYTES
from kvplace.core.node_devices import is_device, read_device_counts
from kvplace.core.request import MAX_VCPUS, Request
from kvplace.core.request_json import MAX_IO_THREADS
from kvplace.core.scalars import NO_BYTES, Bytes, ResourceName
from kvplace.core.well_known_names import MARKER_RESOURCE

_AUTO = "auto"
_SUPPLEMENTAL_POOL = "supplementalPool"

_HUGE_PAGES = "hugepages-"
_MOST_PAGE_SIZES = 16
"""As many as a claim can have (policy ledger-claims); no kernel has more."""


class Size(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True):
    """The CPUs and memory that a VM or a plain pod takes on a machine."""

    vcpus: Annotated[int, msgspec.Meta(ge=1, le=MAX_VCPUS)]
    """Of a plain pod the CPUs that its containers are limited to."""
    memory: Annotated[Bytes, msgspec.Meta(ge=0, le=MAX_BYTES)] = NO_BYTES
    """Memory of the guest or of the containers, huge pages included; 0 when it is not specified."""
    huge_pages: dict[Bytes, Annotated[int, msgspec.Meta(ge=0)]] = {}
    """Pages by page size."""
    io_threads: Annotated[int, msgspec.Meta(ge=0, le=MAX_IO_THREADS)] = 0


def write_size(size: Size) -> str:
    """Write a size as one line for an annotation."""
    return msgspec.json.encode(size).decode()


def read_size(text: str) -> Size | None:
    """Read the line again; None for anything that `write_size` does not write."""
    try:
        return msgspec.json.decode(text, type=Size)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def size_of_vm(domain: VmiDomain, what: str) -> Size:
    """Read a VM's size; raises Misconfigured that begins with `what`, for example `VMI default/db: spec`."""
    at = f"{what}.domain"
    memory = _memory(domain, at)
    vcpus = _vcpus(domain, at)
    if not 1 <= vcpus <= MAX_VCPUS:
        raise Misconfigured(f"{at} has {vcpus} vCPUs; kvplace places VMs with 1 to {MAX_VCPUS}")
    io_threads = _io_threads(domain, at)
    if io_threads > MAX_IO_THREADS:
        raise Misconfigured(f"{at} has {io_threads} I/O threads; kvplace places at most {MAX_IO_THREADS}")
    return Size(vcpus, memory, _huge_pages(domain, memory, at), io_threads)


def _vcpus(domain: VmiDomain, at: str) -> int:
    """Multiply the topology, where unset means 1; without one take the CPU limit, then the request."""
    cpu = domain.cpu
    if cpu is not None and (cpu.sockets or cpu.cores or cpu.threads):
        return (cpu.sockets or 1) * (cpu.cores or 1) * (cpu.threads or 1)
    # KubeVirt does not start a VM with a limit of 0.
    return max(1, _cpus(domain, at, ("limits", "requests")) or 1)


def _cpus(domain: VmiDomain, at: str, order: tuple[str, str]) -> int | None:
    """Read the CPUs from the first of requests and limits that has them, rounded up as Kubernetes does."""
    if domain.resources is None:
        return None
    sources = {"limits": domain.resources.limited, "requests": domain.resources.requested}
    for source in order:
        if "cpu" in sources[source]:
            place = f"{at}.resources.{source}.cpu"
            value = sources[source]["cpu"]
            cpus = ceil(read_quantity(value, place))
            if cpus < 0:
                raise Misconfigured(f"{place}: {value!r} is negative; write the number of CPUs")
            return cpus
    return None


def _memory(domain: VmiDomain, at: str) -> Bytes:
    """Read the guest's memory, else the request, else the limit, else one huge page."""
    if domain.memory is not None and domain.memory.guest is not None:
        return read_bytes(domain.memory.guest, f"{at}.memory.guest")
    if domain.resources is not None:
        for source, quantities in (
            ("requests", domain.resources.requested),
            ("limits", domain.resources.limited),
        ):
            if "memory" in quantities:
                return read_bytes(quantities["memory"], f"{at}.resources.{source}.memory")
    return _page_size(domain, at) or NO_BYTES


def _huge_pages(domain: VmiDomain, memory: Bytes, at: str) -> dict[Bytes, int]:
    size = _page_size(domain, at)
    if not size or not memory:
        return {}
    return {size: whole_pages(memory, size, f"{at}.memory.hugepages.pageSize")}


def _page_size(domain: VmiDomain, at: str) -> Bytes | None:
    hugepages = domain.memory.hugepages if domain.memory is not None else None
    if hugepages is None or not hugepages.page_size:
        return None
    size = read_bytes(hugepages.page_size, f"{at}.memory.hugepages.pageSize")
    if size == 0:
        raise Misconfigured(f"{at}.memory.hugepages.pageSize is 0; write 2Mi or 1Gi")
    return size


def _io_threads(domain: VmiDomain, at: str) -> int:
    """Count QEMU's I/O threads: dedicated threads, and threads that other disks share by the policy."""
    policy = domain.io_threads_policy
    disks = (domain.devices.disks if domain.devices else None) or []
    dedicated = sum(1 for disk in disks if disk.dedicated_io_thread)
    if policy is None and not dedicated:
        return 0
    if policy == _SUPPLEMENTAL_POOL:
        pool = domain.io_threads.supplemental_pool_thread_count if domain.io_threads else None
        return pool or 0
    limit = 1
    if policy == _AUTO:
        isolated = domain.cpu is not None and (
            bool(domain.cpu.dedicated_cpu_placement) and bool(domain.cpu.isolate_emulator_thread)
        )
        requested = _cpus(domain, at, ("requests", "limits"))
        limit = 1 if isolated else 2 * (1 if requested is None else requested)
    shared = len(disks) - dedicated
    if len(disks) > limit:
        # Disks without a dedicated thread share at least one.
        shared = max(1, limit - dedicated)
    return shared + dedicated


def size_of_pod(containers: Sequence[AdmittedContainer], what: str) -> Size:
    """Read a plain pod's size; raises Misconfigured that begins with `what` for an unsuitable CPU limit."""
    cpus = sum(_whole_cpus(container, what) for container in containers)
    if not cpus:
        raise Misconfigured(
            f"{what} requests CPUs of its own, but no container has a CPU limit; set "
            "spec.containers[].resources.limits.cpu to the number of CPUs"
        )
    if cpus > MAX_VCPUS:
        raise Misconfigured(f"{what} is limited to {cpus} CPUs; kvplace gives at most {MAX_VCPUS}")
    memory = 0
    huge_pages: dict[Bytes, int] = {}
    for container in containers:
        given = {**container.requested, **container.limited}
        memory += _bytes(given.get("memory", 0), what, container, "memory")
        for name, value in given.items():
            if name.startswith(_HUGE_PAGES):
                size = _bytes(name.removeprefix(_HUGE_PAGES), what, container, name)
                if not size:
                    raise Misconfigured(
                        f"{what}: container {container.name}: {name}: the page size must not be 0"
                    )
                count = _bytes(value, what, container, name)
                pages = whole_pages(count, size, f"{what}: container {container.name}: {name}")
                if size not in huge_pages and len(huge_pages) == _MOST_PAGE_SIZES:
                    raise Misconfigured(
                        f"{what}: container {container.name} has a {_MOST_PAGE_SIZES + 1}th size of huge "
                        f"pages; at most {_MOST_PAGE_SIZES} count"
                    )
                huge_pages[size] = huge_pages.get(size, 0) + pages
                memory += count
    if memory > MAX_BYTES:
        raise Misconfigured(f"{what}: its containers have {memory} bytes of memory, more than 1Ei")
    return Size(cpus, Bytes(memory), {size: count for size, count in huge_pages.items() if count})


def _whole_cpus(container: AdmittedContainer, what: str) -> int:
    """Read the CPU limit of a container; 0 without one."""
    value = container.limited.get("cpu", 0)
    place = f"{what}: container {container.name}: CPU limit {value!r}"
    cpus = read_quantity(value, place)
    if cpus.denominator != 1 or cpus < 0:
        raise Misconfigured(
            f"{place} must be a whole number, because the pod requests CPUs of its own; "
            f"write {max(1, -(-cpus.numerator // cpus.denominator))}, or remove the limit"
        )
    return int(cpus)


def _bytes(value: Quantity, what: str, container: AdmittedContainer, resource: str) -> Bytes:
    return read_bytes(value, f"{what}: container {container.name}: {resource}")


def devices_of_containers(containers: Iterable[AdmittedContainer], what: str) -> dict[ResourceName, int]:
    """Count the devices of containers; raises Misconfigured that begins with `what` for a strange number."""
    counts: Counter[str] = Counter()
    for container in containers:
        # Limits, as the API server sets the requests of extended resources to them.
        for resource, value in {**container.requested, **container.limited}.items():
            if is_device(resource):
                place = f"{what}: container {container.name}: {resource}"
                count = read_quantity(value, place)
                if count.denominator != 1 or count < 0:
                    raise Misconfigured(f"{place} is {value!r}; write a whole number of devices")
                counts[resource] += int(count)
    return _checked(counts, what)


def devices_of_domain(domain: VmiDomain, what: str) -> dict[ResourceName, int]:
    """Count the devices that a VMI names, without the devices of SR-IOV networks and ResourceClaims."""
    if domain.devices is None:
        return {}
    named = [*(domain.devices.gpus or ()), *(domain.devices.host_devices or ())]
    return _checked(Counter(device.device_name for device in named if device.device_name), what)


def has_devices(domain: VmiDomain) -> bool:
    """Whether a VMI gets any device of the host, however it is named."""
    devices = domain.devices
    return devices is not None and bool(devices.gpus or devices.host_devices or sriov_interfaces(domain))


def sriov_interfaces(domain: VmiDomain) -> int:
    """Count the interfaces with a device that only the NetworkAttachmentDefinition of their network names."""
    interfaces = (domain.devices.interfaces if domain.devices else None) or ()
    return sum(interface.sriov is not None for interface in interfaces)


def claimed_devices(domain: VmiDomain) -> int:
    """Count the GPUs and host devices that come from a ResourceClaim."""
    devices = domain.devices
    if devices is None:
        return 0
    return sum(not one.device_name for one in [*(devices.gpus or ()), *(devices.host_devices or ())])


def _checked(counts: Mapping[str, int], what: str) -> dict[ResourceName, int]:
    try:
        return read_device_counts(counts, f"{what}: devices")
    except ValueError as error:
        raise Misconfigured(str(error)) from None


_LEAST = Fraction(1, 10)
"""The least request of a container for each CPU of the pod: KubeVirt's own default for a vCPU."""


def request_marker(spec: EditedObject) -> None:
    """Add the marker resource to the first container, so that kube-scheduler calls the extender.

    The amount is 0: the extender's configuration needs only the name, and kube-scheduler checks each request
    of an extended resource on every node, slowly, even where it is configured to ignore the resource.
    """
    resources = spec.list("containers").object(0).object("resources")
    for kind in ("requests", "limits"):
        resources.object(kind).put(MARKER_RESOURCE, "0")


def request_cpus(after: EditedObject, request: Request, what: str, *, is_vm: bool) -> tuple[str, ...]:
    """Write the CPU requests of a pod that is complete but for them; returns warnings.

    A lower limit is raised, too. No request of a Guaranteed pod, of a plain pod or of a VM that will own no
    CPUs is lowered. A compute container that requests more than its VM will own keeps that.
    """
    pod = typed(after.values, Pod)
    containers = after.object("spec").list("containers")
    if is_vm:
        index = compute_index(pod.spec.containers)
        compute = pod.spec.containers[index]
        warnings = _request_rest(containers.object(index), compute, pod.spec, request, what)
    else:
        warnings = []
        of_each = Fraction(1) if request.owns_cpus else _LEAST
        for index, container in enumerate(pod.spec.containers):
            least = _whole_cpus(container, what) * of_each
            if _requested(container, what) < least:
                containers.object(index).object("resources").object("requests").put("cpu", _written(least))
    if pod.spec.resources is not None:
        _raise_request_of_all(after, what)
    return tuple(warnings)


def _raise_request_of_all(after: EditedObject, what: str) -> None:
    """Let the pod as a whole request no less than its containers, as the API server wants it.

    The API server has set this request itself, from the former requests of the containers.
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
    """Let compute request the CPUs of the whole pod, less the requests of all other containers."""
    least = Fraction(request.least_millicores, 1000)
    resources = edited.object("resources")
    limit = compute.limited.get("cpu")
    is_limited = limit is not None and _container_cpus(limit, compute, what) < least
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
    return _container_cpus(container.requested.get("cpu", container.limited.get("cpu", 0)), container, what)


def _container_cpus(value: Quantity, container: AdmittedContainer, what: str) -> Fraction:
    return read_quantity(value, f"{what}: container {container.name}: CPU")


def _rounded(cpus: Fraction) -> Fraction:
    return Fraction(ceil(cpus * 1000), 1000)


def _written(cpus: Fraction) -> str:
    millicores = ceil(cpus * 1000)
    return f"{millicores}m" if millicores % 1000 else str(millicores // 1000)
