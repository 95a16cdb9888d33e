"""The VMs of a simulation as they come and go: drawn from a mix by a seed, or given one by one.

Drawn VMs keep the cluster at a load: as long as less than that share of its CPUs, or of its memory, is in
use the next VM arrives, else the next one ends. A VM that is refused does not come again, and one VM ends
before the next arrives: time goes on. Time has the unit of a mean lifetime.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvplace.core.request import Request


@dataclass(frozen=True, slots=True)
class Vm:
    """One VM: what it asks for, and how long it runs; None is without end."""

    id: str
    request: Request
    lifetime: float | None = None
    arrives: float = 0.0


@dataclass(frozen=True, slots=True)
class Kind:
    """One entry of a mix: what is asked for, and how often, as compared with the other entries."""

    share: float
    request: Request


@dataclass(frozen=True, slots=True)
class Mix:
    """What is ordered on a cluster."""

    kinds: tuple[Kind, ...]
    requests: int
    """How many VMs arrive."""
    load: float | None
    """Share of the CPUs or the memory around which the cluster hovers; None: no VM ends, it only fills."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A VM wants to start."""

    vm: Vm


@dataclass(frozen=True, slots=True)
class Departure:
    """A VM that was placed ends."""

    vm: Vm


Event = Arrival | Departure


class Drawn:
    """The events of a mix on a cluster of so many CPUs and bytes; equal seeds draw equal VMs."""

    def __init__(self, mix: Mix, seed: int, *, cpus: int, memory: int) -> None:
        self._mix = mix
        self._capacity = (cpus, memory)
        self._used = [0, 0]
        self._chance = random.Random(f"kvplace {seed}")
        self._running: dict[str, Vm] = {}
        self._ends: list[tuple[float, str]] = []
        self._now = 0.0
        self._refused = False

    def refused(self, vm: Vm) -> None:
        """Say that the VM that arrived last was not taken: it will not end."""
        self._count(self._running.pop(vm.id), -1)
        self._refused = True

    def __iter__(self) -> Iterator[Event]:
        """Yield arrivals, and departures of those that were taken."""
        for vm in self._vms():
            while self._ends and (self._refused or self._is_loaded):
                yield from self._next_end()
            self._running[vm.id] = vm
            self._count(vm, 1)
            if vm.lifetime is not None:
                heapq.heappush(self._ends, (self._now + vm.lifetime, vm.id))
            yield Arrival(vm)

    @property
    def _is_loaded(self) -> bool:
        load = self._mix.load
        return load is not None and any(
            used >= load * whole for used, whole in zip(self._used, self._capacity, strict=True) if whole
        )

    def _vms(self) -> Iterator[Vm]:
        kinds = self._mix.kinds
        shares = list(accumulate(kind.share for kind in kinds))
        for number in range(self._mix.requests):
            (kind,) = self._chance.choices(kinds, cum_weights=shares)
            lifetime = self._chance.expovariate(1.0)
            yield Vm(
                f"vm-{number + 1}",
                kind.request,
                None if self._mix.load is None else lifetime,
                arrives=self._now,
            )

    def _next_end(self) -> Iterator[Departure]:
        at, name = heapq.heappop(self._ends)
        vm = self._running.pop(name, None)
        if vm is not None:
            self._now = at
            self._refused = False
            self._count(vm, -1)
            yield Departure(vm)
        elif not self._ends:
            self._refused = False

    def _count(self, vm: Vm, sign: int) -> None:
        self._used[0] += sign * vm.request.vcpus
        self._used[1] += sign * vm.request.memory


def traced(vms: Sequence[Vm]) -> Iterator[Event]:
    """Yield the events of given VMs in the order of time; at equal times those that end go first.

    Departures are those of all VMs, the refused ones too.
    """
    events: list[tuple[float, bool, int, Event]] = []
    for number, vm in enumerate(vms):
        events.append((vm.arrives, True, number, Arrival(vm)))
        if vm.lifetime is not None:
            events.append((vm.arrives + vm.lifetime, False, number, Departure(vm)))
    for _, _, _, event in sorted(events, key=lambda event: event[:3]):
        yield event
