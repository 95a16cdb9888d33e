"""Types of the plain numbers and texts that kvplace passes around, so that mypy distinguishes them.

A CPU id, a NUMA node's id and its index in a topology are all small integers, and a mask of CPUs is an
integer, too: taken for each other they give a wrong answer and no error. At run time each is the `int` or
`str` that it wraps, at no cost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NewType

CpuId = NewType("CpuId", int)
"""A CPU (a hardware thread) as Linux numbers it."""
NumaId = NewType("NumaId", int)
"""A NUMA node as Linux numbers it; ids may have gaps."""
NumaIndex = NewType("NumaIndex", int)
"""The position of a NUMA node in `Topology.numa_nodes`; positions have no gaps."""
PackageId = NewType("PackageId", int)
"""A package (socket) as Linux numbers it."""
NodeName = NewType("NodeName", str)
"""The name of a Kubernetes Node."""
PodUid = NewType("PodUid", str)
"""The UID of a pod."""
ResourceName = NewType("ResourceName", str)
"""The extended resource of a device plugin: `intel.com/vf`."""
PciAddress = NewType("PciAddress", str)
"""A PCI function of a host as sysfs writes it: `0000:c1:00.1`."""
ContainerId = NewType("ContainerId", str)
"""The id that the container runtime gives a container."""

if TYPE_CHECKING:

    class CpuMask(int):
        """A set of CPUs: bit *n* stands for the CPU that Linux numbers *n*.

        mypy knows that set operations on masks give masks; a NewType of `int` would turn into `int` at each.
        """

        def __and__(self, other: int) -> CpuMask: ...
        def __rand__(self, other: int) -> CpuMask: ...
        def __or__(self, other: int) -> CpuMask: ...
        def __ror__(self, other: int) -> CpuMask: ...
        def __xor__(self, other: int) -> CpuMask: ...
        def __invert__(self) -> CpuMask: ...

    class Bytes(int):
        """An amount of memory, or the size of a huge page; sums and multiples of amounts are amounts."""

        def __add__(self, other: int) -> Bytes: ...
        def __radd__(self, other: int) -> Bytes: ...
        def __sub__(self, other: int) -> Bytes: ...
        def __mul__(self, other: int) -> Bytes: ...
        def __rmul__(self, other: int) -> Bytes: ...

else:
    CpuMask = NewType("CpuMask", int)
    Bytes = NewType("Bytes", int)

NO_CPUS = CpuMask(0)
"""The empty set of CPUs."""
NO_BYTES = Bytes(0)
"""No memory, or an amount that is not known."""
