"""The load for comparing allocators: random VMs that keep one machine at a constant use.

A load is made from a seed alone. As soon as the next VM of the seed's order would bring the use around
`fill` of the capacity it arrives, and it runs for its own lifetime, so that the machine is never asked for
more than it has. Every allocator that takes all VMs sees the same events; a VM that is refused is replaced
by the next one at once, so that the load stays the same all the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvplace.core.request import PinningOptions, Request, Scope
from kvplace.core.scalars import Bytes
from kvplace.simulate.scenario import ActiveVms, Arrival, LoadEvent, SimulatedVm

GIB = Bytes(1 << 30)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of VMs: every entry is as likely as every other, so usual ones are repeated."""

    name: str
    cpus: tuple[int, ...]
    """In CPUs of whole cores."""
    memory_per_cpu: tuple[int, ...] = (2 * GIB, 4 * GIB, 4 * GIB, 8 * GIB)
    """Bytes for each vCPU."""

    def up_to(self, most: int) -> Sizes:
        """Leave out the VMs of more than `most` CPUs, for small machines."""
        return replace(self, cpus=tuple(size for size in self.cpus if size <= most))


EVEN = Sizes("even", (2, 4, 4, 8, 8, 16, 16, 32))
"""Every size carries its share: half of the VMs have 8 CPUs or more."""
SMALL_AND_LARGE = Sizes("small and large", (2,) * 12 + (4,) * 5 + (8, 32, 64))
"""Many small VMs, and few large ones that carry two thirds of the load."""
MIXES = (EVEN, SMALL_AND_LARGE)


def vm_of(number: int, cpus: int, memory: int = 0, lifetime: float = 1.0) -> SimulatedVm:
    """Make a VM that may take its CPUs anywhere."""
    return SimulatedVm(
        str(number), Request(cpus, PinningOptions(scope=Scope.ANY), memory=Bytes(memory)), lifetime
    )


def vms(sizes: Sizes, seed: int) -> Iterator[SimulatedVm]:
    """Make VMs without end; equal seeds make equal ones."""
    chance = random.Random(f"{sizes.name} {sizes.cpus} {seed}")
    number = 0
    while True:
        cpus = chance.choice(sizes.cpus)
        memory = cpus * chance.choice(sizes.memory_per_cpu)
        yield vm_of(number, cpus, memory, chance.expovariate(1.0))
        number += 1


class ConstantLoad:
    """The events of one load, in order of time, until `count` VMs have arrived."""

    def __init__(
        self, sizes: Sizes, seed: int, *, cpus: int, memory: int | None = None, count: int, fill: float = 0.85
    ) -> None:
        """Load a machine of so many CPUs and bytes; without `memory` only CPUs are counted.

        Raises ValueError when a VM is larger than the machine.
        """
        if max(sizes.cpus) > cpus:
            raise ValueError(
                f"the mix {sizes.name!r} has VMs of {max(sizes.cpus)} CPUs, the capacity is {cpus}"
            )
        if memory is not None and max(sizes.cpus) * max(sizes.memory_per_cpu) > memory:
            raise ValueError(f"the mix {sizes.name!r} has VMs of more memory than the capacity")
        self._vms = vms(sizes, seed)
        self._cpus = cpus
        self._memory = memory
        self._count = count
        self._fill = fill
        self._running = ActiveVms()

    @property
    def used_cpus(self) -> int:
        """CPUs of the VMs that run now."""
        return self._running.cpus

    def refused(self, vm: SimulatedVm) -> None:
        """Report that the VM that arrived last was refused: no departure of it follows."""
        self._running.drop(vm)

    def __iter__(self) -> Iterator[LoadEvent]:
        """Yield the events; arrivals wait for departures when the next VM would not fit the capacity."""
        for _ in range(self._count):
            vm = next(self._vms)
            while not self._fits(vm) and (departure := self._running.end_next()) is not None:
                yield departure
            vm = replace(vm, arrives=self._running.now)
            self._running.start(vm)
            yield Arrival(vm)

    def _fits(self, vm: SimulatedVm) -> bool:
        used, cpus = self._running.cpus, vm.request.vcpus
        if not used:
            return True
        # Half above and half below: with all sizes, the mean use is `fill`.
        if used + cpus / 2 > self._fill * self._cpus or used + cpus > self._cpus:
            return False
        return self._memory is None or self._running.memory + vm.request.memory <= self._memory
