"""VMs that come and go: the load under which allocators are compared.

A load is made from a seed alone, in virtual time whose unit is a mean lifetime. It is closed: as soon as
the next VM of the seed's order would bring the use around `fill` of the capacity it arrives, and it stays for
its own lifetime, so that the machine (or cluster) hovers there and is never asked for more than it has.
Who takes every VM sees the same events as everybody else who does; who refuses one says so with `refused`,
and the next VM arrives in its place: the load is equal all the same.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Mix:
    """Which VMs come how often: every entry is as likely as every other, so repeat what is usual."""

    name: str
    cpus: tuple[int, ...]
    """Sizes, in CPUs of whole cores."""
    memory_per_cpu: tuple[int, ...] = (2 * GIB, 4 * GIB, 4 * GIB, 8 * GIB)
    """Bytes for each vCPU."""

    def up_to(self, most: int) -> Mix:
        """Leave out the VMs of more than `most` CPUs, for small machines."""
        return Mix(self.name, tuple(size for size in self.cpus if size <= most), self.memory_per_cpu)


EVEN = Mix("even", (2, 4, 4, 8, 8, 16, 16, 32))
"""Every size carries its share: half of the VMs have 8 CPUs or more."""
SMALL_AND_LARGE = Mix("small and large", (2,) * 12 + (4,) * 5 + (8, 32, 64))
"""Many small VMs that nibble, and few large ones, of which two thirds of the load consist."""
MIXES = (EVEN, SMALL_AND_LARGE)


@dataclass(frozen=True, slots=True)
class Vm:
    """One VM of a load."""

    number: int
    cpus: int
    memory: int
    """Bytes."""
    lifetime: float
    """In mean lifetimes."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A VM wants to start."""

    at: float
    vm: Vm


@dataclass(frozen=True, slots=True)
class Departure:
    """A VM ends."""

    at: float
    vm: Vm


Event = Arrival | Departure


def vms(mix: Mix, seed: int) -> Iterator[Vm]:
    """Make VMs without end, each with its size, memory and lifetime; equal seeds make equal ones."""
    chance = random.Random(f"{mix.name} {mix.cpus} {seed}")
    number = 0
    while True:
        cpus = chance.choice(mix.cpus)
        memory = cpus * chance.choice(mix.memory_per_cpu)
        yield Vm(number, cpus, memory, chance.expovariate(1.0))
        number += 1


class Arrivals:
    """The events of one load, in order of time, until `count` VMs have arrived."""

    def __init__(
        self, mix: Mix, seed: int, *, cpus: int, memory: int | None = None, count: int, fill: float = 0.85
    ) -> None:
        """Load a machine, or a cluster, of so many CPUs and bytes; without `memory` only CPUs are counted.

        Raises ValueError when a VM of the mix is larger than all of it.
        """
        if max(mix.cpus) > cpus:
            raise ValueError(f"the mix {mix.name!r} has VMs of {max(mix.cpus)} CPUs, the capacity is {cpus}")
        if memory is not None and max(mix.cpus) * max(mix.memory_per_cpu) > memory:
            raise ValueError(f"the mix {mix.name!r} has VMs of more memory than the capacity")
        self._vms = vms(mix, seed)
        self._cpus = cpus
        self._memory = memory
        self._count = count
        self._fill = fill
        self._used_cpus = 0
        self._used_memory = 0
        self._running: dict[int, Vm] = {}
        self._ends: list[tuple[float, int]] = []
        self._now = 0.0

    @property
    def now(self) -> float:
        """The time of the last event."""
        return self._now

    @property
    def used_cpus(self) -> int:
        """CPUs of the VMs that run now."""
        return self._used_cpus

    def refused(self, vm: Vm) -> None:
        """Say that the VM that arrived last was not taken: no departure of it follows."""
        if self._running.pop(vm.number, None) is not None:
            self._used_cpus -= vm.cpus
            self._used_memory -= vm.memory

    def __iter__(self) -> Iterator[Event]:
        """Yield the events; arrivals wait for departures when the next VM would not fit the capacity."""
        for _ in range(self._count):
            vm = next(self._vms)
            while not self._takes(vm):
                yield self._departure()
            self._running[vm.number] = vm
            self._used_cpus += vm.cpus
            self._used_memory += vm.memory
            heapq.heappush(self._ends, (self._now + vm.lifetime, vm.number))
            yield Arrival(self._now, vm)

    def _takes(self, vm: Vm) -> bool:
        if not self._running:
            return True
        # Half above and half below: whatever the sizes, the mean use is `fill`.
        if self._used_cpus + vm.cpus / 2 > self._fill * self._cpus or self._used_cpus + vm.cpus > self._cpus:
            return False
        if self._memory is None:
            return True
        return self._used_memory + vm.memory <= self._memory

    def _departure(self) -> Departure:
        while True:
            at, number = heapq.heappop(self._ends)
            vm = self._running.pop(number, None)
            if vm is not None:
                self._now = at
                self._used_cpus -= vm.cpus
                self._used_memory -= vm.memory
                return Departure(at, vm)
