"""Which CPUs and memory one VM gets on one machine.

`place` is the one question that Filter, Bind, the simulator and the offline commands ask; its answer depends
on its arguments alone. Among all placements that the request allows it takes the smallest by `NodeRank`; then
by the same without the nodes that give memory alone, and by what these give; then by `CoreRank`, and by ids.
It goes from coarse to fine:

 1. `available_units` counts what is free, in the request's own unit: CPUs, or whole free cores.
 2. `layout.Layout` gives the scope's domains: each socket, NUMA node or L3 group that a `one-*` scope names,
    the whole machine for the others. All CPUs lie in one of them.
 3. `numa_sets.best_numa_sets` finds the sets of NUMA nodes in a domain that have the CPUs, the memory and the
    huge pages, with the fewest sockets and nodes and the smallest distances. It counts and chooses no core.
    A set of nodes that are far apart is not searched (branch and bound, `nearest_nodes`). When that search
    reaches its bound, `feasibility` builds a set that serves, if there is any. Where memory needs more nodes
    than the CPUs do, `giving_cpus` states which of them give CPUs.
 4. `group_knapsack.GroupKnapsack.bound` states for each set, cheaply, how many L3 groups and cores it takes
    at least.
 5. `GroupKnapsack.serve` chooses the cores in the sets, best bound first, until no other set can be better:
    L3 groups (`set_cover`), then cores (`core_choice`), in equal shares where the scope spreads.
 6. The cheapest choice becomes a `Placement`: `assignment` orders the vCPUs and splits the memory.
 7. If there is none, `refusing` names the first constraint that fails and what is missing.

Every search has a bound in steps (`search_budget`); docs/reference/bounds.md lists them with their cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from kvplace.core.allocator.assignment import ChosenCores, placement_of
from kvplace.core.allocator.available_units import AvailableUnits
from kvplace.core.allocator.core_choice import CoreChoice
from kvplace.core.allocator.device_choices import ANYWHERE
from kvplace.core.allocator.feasibility import fits, near_set
from kvplace.core.allocator.group_knapsack import GroupKnapsack, fragmentation
from kvplace.core.allocator.numa_sets import NumaSet, best_numa_sets, giving_cpus, rank_of
from kvplace.core.allocator.objectives import CoreRank
from kvplace.core.allocator.refusing import refuse, refuse_devices
from kvplace.core.free_resources import Free, free_of
from kvplace.core.ledger import Ledger
from kvplace.core.placement import Placement, Refusal
from kvplace.core.request import Request, Smt
from kvplace.core.scalars import NO_CPUS, CpuMask
from kvplace.core.topology import Topology

_MOST_EQUALS = 8
"""NUMA sets with equally few L3 groups and cores that are searched for the least used CPUs and the least
cost."""


def place(topology: Topology, free: Free, request: Request) -> Placement | Refusal:
    """Choose CPUs and memory for one VM, or state the shortfall."""
    available = AvailableUnits(topology, free, request)
    chosen = _best_cores(available)
    if chosen is not None:
        return placement_of(available, chosen)
    if available.device_choices is not ANYWHERE:
        available = available.without_devices()
        if _best_cores(available) is not None:
            return refuse_devices(AvailableUnits(topology, free, request))
    return refuse(
        available,
        never=not _fits_empty(topology, request),
        fits=lambda other: fits(AvailableUnits(topology, free, other).without_devices()),
    )


def try_place(topology: Topology, free: Free, request: Request) -> Placement | None:
    """Choose as `place` does; None instead of a refusal, since its reasons may cost more than the search."""
    available = AvailableUnits(topology, free, request)
    chosen = _best_cores(available)
    return None if chosen is None else placement_of(available, chosen)


def may_fit(topology: Topology, free: Free, request: Request) -> bool:
    """Whether a placement exists; counting is much cheaper than the choice of cores."""
    available = AvailableUnits(topology, free, request)
    return bool(available.device_choices) and fits(available)


@lru_cache(maxsize=4096)
def _fits_empty(topology: Topology, request: Request) -> bool:
    return fits(AvailableUnits(topology, free_of(topology, Ledger()), request).without_devices())


def _best_cores(available: AvailableUnits) -> ChosenCores | None:
    domains = available.layout.domains[available.request.options.scope.within]
    if not available.device_choices or all(available.units_in(domain) < available.need for domain in domains):
        return None
    numa_sets = _unlike(available, giving_cpus(available, _numa_sets(available)))
    knapsack = GroupKnapsack(available)
    if len(numa_sets) > 1:
        bounded = sorted(_bounds(knapsack, numa_sets), key=lambda pair: pair[0])
    else:
        bounded = [(CoreRank(0, 0, 0, 0, 0), numa_set) for numa_set in numa_sets]
    best: _Weighed | None = None
    for number, (bound, numa_set) in enumerate(bounded):
        if best is not None and (
            bound > best.key
            or knapsack.budget.is_spent
            or (number >= _MOST_EQUALS and bound[:3] >= best.key[:3])
        ):
            break
        choice = knapsack.serve(numa_set)
        if choice is not None:
            found = _weighed(available, numa_set, choice)
            if best is None or found.is_better_than(best):
                best = found
    return best.chosen if best is not None else None


def _numa_sets(available: AvailableUnits) -> list[NumaSet]:
    found = best_numa_sets(available)
    if available.budget.is_spent:
        built = near_set(available)
        if built is not None and (not found or rank_of(available, built) < rank_of(available, found[0])):
            return [built]
    return found


def _bounds(knapsack: GroupKnapsack, numa_sets: list[NumaSet]) -> list[tuple[CoreRank, NumaSet]]:
    """The NUMA sets after their bounds; further sets without a step left are not searched."""
    bounded: list[tuple[CoreRank, NumaSet]] = []
    for numa_set in numa_sets:
        if bounded and knapsack.budget.is_spent:
            break
        segments = sum([len(part.segments) for part in numa_set.parts])
        knapsack.budget.spend(8 * segments if numa_set.domain.shares_l3 else segments)
        bounded.append((knapsack.bound(numa_set), numa_set))
    return bounded


@dataclass(frozen=True, slots=True)
class _Weighed:
    key: CoreRank
    cpus: CpuMask
    chosen: ChosenCores

    def is_better_than(self, other: _Weighed) -> bool:
        if self.key != other.key:
            return self.key < other.key
        unlike = self.cpus ^ other.cpus
        return bool(self.cpus & unlike & -unlike)


def _weighed(available: AvailableUnits, numa_set: NumaSet, choice: CoreChoice) -> _Weighed:
    cpus = owned = NO_CPUS
    for taken in choice.taken:
        cpus |= taken.cpus
        owned |= taken.core if available.smt is not Smt.PREFER else taken.cpus
    cost = fragmentation(available, numa_set.parts, owned)
    uses = 0 if available.request.owns_cpus else choice.cost
    nodes = dict.fromkeys([part.node for part in numa_set.parts if part.cpus & cpus])
    chosen = ChosenCores(tuple(nodes), tuple(sorted(numa_set.nodes)), choice.taken)
    return _Weighed(CoreRank(choice.l3_groups, choice.kinds, choice.cores, uses, cost), cpus, chosen)


def _unlike(available: AvailableUnits, numa_sets: list[NumaSet]) -> list[NumaSet]:
    """Leave out NUMA sets that differ from an earlier one in nothing but ids."""
    if len(numa_sets) == 1 or available.uses:
        return numa_sets
    unlike: dict[object, NumaSet] = {}
    for numa_set in numa_sets:
        if numa_set.domain.shares_l3 and len(numa_set.parts) > 1:
            return numa_sets
        kinds = [
            (
                available.count(part).kind,
                (available.free.cpus & part.cpus).bit_count(),
                available.devices_at(part.node),
            )
            for part in numa_set.parts
        ]
        unlike.setdefault(tuple(sorted(kinds)), numa_set)
    return list(unlike.values())
