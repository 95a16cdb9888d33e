"""The size of a plain pod: the CPU limits of its containers, which must be whole numbers.

Memory may have any or no limit. Containers without a CPU limit are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kvplace.admission.objects import Container, Quantity, read_bytes, read_quantity, whole_pages
from kvplace.core.errors import Misconfigured
from kvplace.core.fields import MAX_BYTES
from kvplace.core.request import MAX_VCPUS
from kvplace.core.scalars import Bytes

_HUGE_PAGES = "hugepages-"


@dataclass(frozen=True, slots=True)
class PodSize:
    """The CPUs and memory that a plain pod takes on a machine."""

    cpus_of: Mapping[str, int]
    """Whole CPUs by the name of the container that is limited to them."""
    memory: Bytes
    """Huge pages included."""
    huge_pages: Mapping[Bytes, int]
    """Pages by page size."""

    @property
    def cpus(self) -> int:
        return sum(self.cpus_of.values())


def size_of_pod(containers: Sequence[Container], what: str) -> PodSize:
    """Read a plain pod's size; raises Misconfigured that begins with `what` for an unsuitable CPU limit."""
    cpus_of = {
        container.name: _whole_cpus(container, what) for container in containers if "cpu" in container.limited
    }
    if not sum(cpus_of.values()):
        raise Misconfigured(
            f"{what} asks for CPUs of its own, but no container has a CPU limit; set "
            "spec.containers[].resources.limits.cpu to the number of CPUs"
        )
    if sum(cpus_of.values()) > MAX_VCPUS:
        raise Misconfigured(
            f"{what} is limited to {sum(cpus_of.values())} CPUs; kvplace gives at most {MAX_VCPUS}"
        )
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
                huge_pages[size] = huge_pages.get(size, 0) + pages
                memory += count
    if memory > MAX_BYTES:
        raise Misconfigured(f"{what}: its containers have {memory} bytes of memory, more than 1Ei")
    return PodSize(
        MappingProxyType(cpus_of), Bytes(memory), {size: count for size, count in huge_pages.items() if count}
    )


def _whole_cpus(container: Container, what: str) -> int:
    value = container.limited["cpu"]
    place = f"{what}: container {container.name}: CPU limit {value!r}"
    cpus = read_quantity(value, place)
    if cpus.denominator != 1 or cpus < 0:
        raise Misconfigured(
            f"{place} must be a whole number, because the pod asks for CPUs of its own; "
            f"write {max(1, -(-cpus.numerator // cpus.denominator))}, or remove the limit"
        )
    return int(cpus)


def _bytes(value: Quantity, what: str, container: Container, resource: str) -> Bytes:
    return read_bytes(value, f"{what}: container {container.name}: {resource}")
