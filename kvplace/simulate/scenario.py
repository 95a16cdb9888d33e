"""The input of one `kvplace simulate`: the nodes and the load of a scenario document.

The load is VMs that arrive and end, drawn at random or given one by one. The unit of time is a mean lifetime.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from kvplace.core.cluster.node_choice import Strategy
from kvplace.core.errors import BadBody
from kvplace.core.occupant import ClusterNode
from kvplace.core.quantity import plain_bytes
from kvplace.core.request import Request
from kvplace.documents.cluster import MOST_REQUESTS, MixEntry, ScenarioDocument, VmEntry
from kvplace.documents.model import numbered, read_model
from kvplace.documents.reading import load_document, source_name
from kvplace.machines.cluster import nodes_of


@dataclass(frozen=True, slots=True)
class SimulatedVm:
    """One VM: its request, and how long it runs; None is without end."""

    id: str
    request: Request
    lifetime: float | None = None
    arrives: float = 0.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A VM wants to start."""

    vm: SimulatedVm


@dataclass(frozen=True, slots=True)
class Departure:
    """A VM ends."""

    vm: SimulatedVm


LoadEvent = Arrival | Departure


class ActiveVms:
    """The running VMs of a load, the resources that they use together, and the VM that ends next."""

    def __init__(self) -> None:
        self.now = 0.0
        """The time of the last departure."""
        self.cpus = 0
        self.memory = 0
        self._running: dict[str, SimulatedVm] = {}
        self._ends: list[tuple[float, str]] = []

    def start(self, vm: SimulatedVm) -> None:
        """Add a VM."""
        self._running[vm.id] = vm
        self._count(vm, 1)
        if vm.lifetime is not None:
            heapq.heappush(self._ends, (self.now + vm.lifetime, vm.id))

    def drop(self, vm: SimulatedVm) -> None:
        """Remove a VM that was refused: no departure of it follows."""
        if self._running.pop(vm.id, None) is not None:
            self._count(vm, -1)

    def end_next(self) -> Departure | None:
        """Let the next VM end; None when none will end."""
        while self._ends:
            at, name = heapq.heappop(self._ends)
            vm = self._running.pop(name, None)
            if vm is not None:
                self.now = at
                self._count(vm, -1)
                return Departure(vm)
        return None

    def _count(self, vm: SimulatedVm, sign: int) -> None:
        self.cpus += sign * vm.request.vcpus
        self.memory += sign * vm.request.memory


@dataclass(frozen=True, slots=True)
class Mix:
    """VMs that are drawn at random."""

    kinds: tuple[MixEntry, ...]
    requests: int
    """How many VMs arrive."""
    load: float | None
    """Share of the CPUs or memory in use around which the cluster stays; None: no VM ends."""


class RandomLoad:
    """The events of a mix on a cluster of so many CPUs and bytes; equal seeds draw equal VMs.

    While less than the load of the mix is in use the next VM arrives, else the next one ends. A refused VM
    does not come again, and one VM ends before the next arrives, so that time advances.
    """

    def __init__(self, mix: Mix, seed: int, *, cpus: int, memory: int) -> None:
        self._mix = mix
        self._cpus = cpus
        self._memory = memory
        self._random = random.Random(f"kvplace {seed}")
        self._running = ActiveVms()
        self._refused = False

    def refused(self, vm: SimulatedVm) -> None:
        """Report that the VM that arrived last was refused."""
        self._running.drop(vm)
        self._refused = True

    def __iter__(self) -> Iterator[LoadEvent]:
        """Yield arrivals, and the departures of VMs that were placed."""
        for vm in self._vms():
            while self._refused or self._is_loaded:
                self._refused = False
                departure = self._running.end_next()
                if departure is None:
                    break
                yield departure
            self._running.start(vm)
            yield Arrival(vm)

    @property
    def _is_loaded(self) -> bool:
        load, running = self._mix.load, self._running
        if load is None:
            return False
        return running.cpus >= load * self._cpus > 0 or running.memory >= load * self._memory > 0

    def _vms(self) -> Iterator[SimulatedVm]:
        kinds = self._mix.kinds
        shares = list(accumulate(kind.share for kind in kinds))
        for number in range(self._mix.requests):
            (kind,) = self._random.choices(kinds, cum_weights=shares)
            lifetime = self._random.expovariate(1.0)
            yield SimulatedVm(f"vm-{number + 1}", kind.request, None if self._mix.load is None else lifetime)


def trace(vms: Sequence[SimulatedVm]) -> Iterator[LoadEvent]:
    """Yield the events of given VMs in the order of time; at equal times departures go first.

    Refused VMs have departures, too.
    """
    events: list[tuple[float, bool, int, LoadEvent]] = []
    for number, vm in enumerate(vms):
        events.append((vm.arrives, True, number, Arrival(vm)))
        if vm.lifetime is not None:
            events.append((vm.arrives + vm.lifetime, False, number, Departure(vm)))
    for _, _, _, event in sorted(events, key=lambda event: event[:3]):
        yield event


@dataclass(frozen=True)
class Scenario:
    """A whole scenario; its load is either `mix` or `vms`."""

    nodes: tuple[ClusterNode, ...]
    mix: Mix | None
    vms: tuple[SimulatedVm, ...]
    strategies: tuple[Strategy, ...]
    seeds: tuple[int, ...]
    moves: int = 0
    """How many running VMs may move for one that does not fit well."""

    @property
    def arrivals(self) -> int:
        """VMs that arrive in one simulation."""
        return len(self.vms) if self.mix is None else self.mix.requests

    @cached_property
    def memory_per_cpu(self) -> float:
        """Bytes outside huge pages that the VMs request for each vCPU, on average."""
        shares = (
            [(kind.share, kind.request) for kind in self.mix.kinds]
            if self.mix is not None
            else [(1.0, vm.request) for vm in self.vms]
        )
        cpus = sum(share * request.vcpus for share, request in shares)
        memory = sum(share * plain_bytes(one.memory, one.huge_pages) for share, one in shares)
        return memory / cpus


def load_scenario(path: Path) -> Scenario:
    """Read a scenario document, from stdin for `-`; raises BadBody that names the file and the key's path."""
    what = source_name(str(path))
    document = read_model(ScenarioDocument, load_document(path), what)
    try:
        return scenario_of(document, path.parent)
    except BadBody as error:
        raise BadBody(f"{what}: {error}") from None


def scenario_of(document: ScenarioDocument, folder: Path) -> Scenario:
    """Read the machines that a document in a folder names; raises BadBody."""
    mix = None
    if document.mix is not None:
        mix = Mix(document.mix, document.requests, document.load)
    return Scenario(
        nodes=nodes_of(document, folder),
        mix=mix,
        vms=_vms(document.vms or ()),
        strategies=tuple(dict.fromkeys(document.strategies)),
        seeds=tuple(dict.fromkeys(document.seeds)),
        moves=document.moves,
    )


def _vms(entries: tuple[VmEntry, ...]) -> tuple[SimulatedVm, ...]:
    found: dict[str, SimulatedVm] = {}
    for number, entry in enumerate(entries):
        for name in numbered(entry.id or f"vm-{len(found) + 1}", entry.count):
            if name in found:
                raise BadBody(f"vms[{number}].id: duplicate VM id {name!r}")
            found[name] = SimulatedVm(name, entry.request, entry.lifetime, entry.arrives)
        if len(found) > MOST_REQUESTS:
            raise BadBody(f"vms[{number}]: there are more than {MOST_REQUESTS} VMs")
    return tuple(found.values())
