"""The choice of a node for a VM, and the grouped refusals of the other nodes.

Every replica and every offline command ranks nodes by the same key, so that equal states give equal nodes.
The key is a `Standing`, then the name. Locality comes first, then what other VMs lose: the use of shared
CPUs, the balance of CPUs and memory (either is stranded without the other), huge pages that the VM does not
want, and by strategy the fullness of the NUMA nodes and of the node, and fragmentation.

docs/benchmarks.md measures the gain of each part.

kube-scheduler counts nodes with equal texts ("412 no NUMA node with 8 free CPUs, best 6 on worker-17 numa
1"). So all nodes that refuse for one reason get one text, which names the best of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Annotated, NamedTuple, Protocol, TypeVar, get_type_hints

from kvplace.core.allocator.allocate import try_place
from kvplace.core.allocator.device_choices import far_devices
from kvplace.core.allocator.objectives import slots_lost
from kvplace.core.cpuset import cpus_of
from kvplace.core.free_resources import Free, crowd
from kvplace.core.occupant import locality_of
from kvplace.core.placement import THE_MACHINE, Placement, Refusal
from kvplace.core.quantity import bytes_in_pages, counted
from kvplace.core.request import Request
from kvplace.core.scalars import NodeName
from kvplace.core.topology import Topology

MAX_SCORE = 10
"""Highest score an extender may give (MaxExtenderPriority in k8s.io/kube-scheduler)."""

_STEPS = 32
"""A difference between shares is rounded to so many steps."""

_TWO_TO_A_CPU = 1000
"""The most contention that `pack` accepts: each CPU that is newly shared is lost to exclusive VMs."""


class Strategy(Enum):
    """How VMs are distributed over nodes (`serve --strategy`)."""

    PACK = "pack"
    """Fill one node after the other."""
    SPREAD = "spread"
    """Go to the node with the most free CPUs."""
    BALANCE = "balance"
    """Keep the free shares of CPUs and memory of each node even, rather than fill nodes."""


class Standing(NamedTuple):
    """The objectives that compare nodes, the smaller the better, each with why it makes a node better.

    Each decides only where all before it are equal. 0 where a strategy leaves an objective out.
    """

    sockets: Annotated[int, "on fewer sockets"]
    numa_nodes: Annotated[int, "on fewer NUMA nodes"]
    far_devices: Annotated[int, "beside more of its devices"]
    distance: Annotated[int, "on NUMA nodes closer to each other"]
    contention: Annotated[int, "its shared CPUs are used less"]
    imbalance: Annotated[int, "CPUs and memory are used more evenly"]
    added_imbalance: Annotated[int, "CPUs and memory are used more evenly"]
    idle_pages: Annotated[int, "its huge pages are left for VMs that need them"]
    l3_groups: Annotated[int, "on fewer L3 groups"]
    free_beside: Annotated[int, "its NUMA nodes are fuller"]
    free: Annotated[int, "the node is fuller"]
    in_use: Annotated[int, "the node is emptier"]
    fragmentation: Annotated[int, "less fragmentation"]


_REASONS = tuple([hint.__metadata__[0] for hint in get_type_hints(Standing, include_extras=True).values()])
_NAME = "first by name"
_TOGETHER = "it gets other VMs that are planned together with this one"


def standing(
    strategy: Strategy,
    locality: tuple[int, int, int],
    contention: int,
    balance: Balance,
    idle_pages: bool,
    free_beside: int,
    free: int,
    *,
    far_devices: int = 0,
    l3_groups: int = 1,
    fragmentation: int = 0,
) -> Standing:
    """Give the standing by a strategy.

    `contention` is as `effective` gives it. `free_beside` counts the CPUs that stay free on the NUMA nodes of
    the VM, `free` the free CPUs of the node. The defaults are the best that there is.
    """
    sockets, numa_nodes, distance = locality
    packs = strategy is Strategy.PACK
    return Standing(
        sockets,
        numa_nodes,
        far_devices,
        distance,
        contention,
        round(_STEPS // 2 * balance.after) if strategy is Strategy.BALANCE else 0,
        round(_STEPS * (balance.after - balance.before)),
        int(idle_pages),
        l3_groups,
        free_beside if packs else 0,
        free if packs else 0,
        -free if strategy is Strategy.SPREAD else 0,
        0 if packs else fragmentation,
    )


class Balance(NamedTuple):
    """How far apart the free shares of CPUs and memory of a node are, before and with the VM.

    The change counts, as in kube-scheduler's NodeResourcesBalancedAllocation, rounded to coarse steps: the
    strategy decides among nodes where the VM makes no difference.
    """

    before: float
    after: float


def effective(strategy: Strategy, contention: int, *, names_cpus: bool) -> int:
    """How much contention counts: `pack` stays on a node until the CPUs that a VM names are used twice."""
    if strategy is Strategy.PACK and names_cpus:
        return max(0, contention - _TWO_TO_A_CPU)
    return contention


@dataclass(frozen=True)
class Fit:
    """The offer of a node in some state to a VM, with its rank; equal for all nodes in this state."""

    topology: Topology
    placement: Placement
    free: Free
    """The free resources before the placement."""
    vcpus: int
    """vCPUs of the VM: a placement in a shared pool does not name them."""
    far_devices: int = 0
    """NUMA nodes with devices of the VM where it would have no CPU."""

    @classmethod
    def of(cls, topology: Topology, free: Free, request: Request, placement: Placement) -> Fit:
        """Rate the placement of a request."""
        far = far_devices(topology, free.devices, request, placement.cpus)
        return cls(topology, placement, free, request.vcpus, far)

    # A fit lives until its nodes change, and is compared for every VM that comes meanwhile.

    @cached_property
    def pack(self) -> Standing:
        """The standing for `Strategy.PACK`."""
        return self._standing(Strategy.PACK)

    @cached_property
    def spread(self) -> Standing:
        """The standing for `Strategy.SPREAD`."""
        return self._standing(Strategy.SPREAD)

    @cached_property
    def balance(self) -> Standing:
        """The standing for `Strategy.BALANCE`."""
        return self._standing(Strategy.BALANCE)

    def standing(self, strategy: Strategy) -> Standing:
        """The key that compares nodes, without the name; the smallest is the best."""
        found: Standing = getattr(self, strategy.value)
        return found

    def _standing(self, strategy: Strategy) -> Standing:
        packages, nodes, distance, l3_groups = quality(self.topology, self.placement)
        wants_pages = any(self.placement.huge_pages.values())
        return standing(
            strategy,
            (packages, nodes, distance),
            effective(strategy, self._contention, names_cpus=bool(self.placement.vcpus)),
            self._balance,
            not wants_pages and has_pages(self.free),
            sum((cpus & ~self._taken).bit_count() for cpus in self._free_on_its_nodes),
            self.free.cpus.bit_count(),
            far_devices=self.far_devices,
            l3_groups=l3_groups,
            fragmentation=self._fragmentation,
        )

    @cached_property
    def _contention(self) -> int:
        """How much others use the CPUs that the VM would share with them; 0 for a VM that owns its CPUs."""
        if self.placement.owned:
            return 0
        uses = dict(self.free.uses)
        found = [uses.get(cpu, 0) for cpu in cpus_of(self.placement.cpus)]
        return sum(found) * 1000 // len(found) if self.placement.vcpus else crowd(found, self.vcpus)

    @property
    def _taken(self) -> int:
        return self.placement.cpus | self.placement.owned

    @cached_property
    def _plain_memory(self) -> int:
        placement = self.placement
        pages = sum(map(bytes_in_pages, placement.huge_pages.values()))
        return sum(placement.memory.values()) - pages

    @cached_property
    def _balance(self) -> Balance:
        whole = plain_memory_of(self.topology)
        if not self.free.memory or not whole or not self.placement.memory:
            return Balance(0.0, 0.0)
        every = max(1, self.topology.allocatable.bit_count())
        left = (self.free.cpus & ~self._taken).bit_count()
        memory = sum(max(0, count) for _, count in self.free.memory)
        return Balance(
            abs(self.free.cpus.bit_count() / every - memory / whole),
            abs(left / every - (memory - self._plain_memory) / whole),
        )

    @cached_property
    def _free_on_its_nodes(self) -> tuple[int, ...]:
        """The free CPUs of each NUMA node where the VM takes some."""
        nodes = self.topology.numa_nodes
        return tuple(node.cpus & self.free.cpus for node in nodes if node.cpus & self._taken)

    @cached_property
    def _fragmentation(self) -> int:
        before = self._free_on_its_nodes
        return sum(slots_lost(cpus.bit_count(), (cpus & ~self._taken).bit_count()) for cpus in before)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that can hold the VM, and the placement there."""

    node: NodeName
    fit: Fit

    @property
    def placement(self) -> Placement:
        """The VM's placement there."""
        return self.fit.placement

    def rank(self, strategy: Strategy) -> tuple[Standing, NodeName]:
        """The key that compares nodes; the smallest is the best."""
        return self.fit.standing(strategy), self.node


def candidate_on(node: NodeName, topology: Topology, free: Free, request: Request) -> Candidate | None:
    """Place a VM on a node; None if it does not fit."""
    placement = try_place(topology, free, request)
    return Candidate(node, Fit.of(topology, free, request, placement)) if placement is not None else None


def has_pages(free: Free) -> bool:
    """Whether any huge pages are free."""
    return any(count > 0 for _, _, count in free.huge_pages)


def plain_memory_of(topology: Topology) -> int:
    """The bytes outside huge pages that a machine has."""
    return sum(topology.plain_memory.values())


def quality(topology: Topology, placement: Placement) -> tuple[int, int, int, int]:
    """Rate a placement: sockets, NUMA nodes, largest distance between them, L3 groups; smaller is better."""
    packages, nodes, distance, _ = locality_of(topology, placement)
    return packages, nodes, distance, len(placement.l3_groups)


def best_candidate(candidates: Iterable[Candidate], strategy: Strategy) -> Candidate | None:
    """Choose the best node; None without candidates."""
    return min(candidates, key=lambda one: one.rank(strategy), default=None)


_EXTRA_CPUS = 4
"""A node is near enough if it keeps at most so many more CPUs free beside the VM than the best one."""


def near_enough(best: Standing, strategy: Strategy) -> Standing:
    """Return the limit: standings below it are near enough to the best one, for VMs planned together.

    One write of a ledger claims for all of them on one node. `pack` sends them to different nodes: each takes
    the NUMA node where it leaves the fewest CPUs. If it leaves none, no other node is near enough, or more
    VMs are refused later.
    """
    if strategy is not Strategy.PACK or not best.free_beside:
        return best
    return best._replace(free_beside=best.free_beside + _EXTRA_CPUS + 1, free=0)


def why(best: Candidate, other: Candidate, strategy: Strategy) -> str:
    """Give the reason why the chosen node was preferred to another one."""
    if other.rank(strategy) < best.rank(strategy):
        return _TOGETHER
    parts = (best.fit.standing(strategy), other.fit.standing(strategy))
    places = zip(_REASONS, *parts, strict=True)
    return next((reason for reason, ours, theirs in places if ours != theirs), _NAME)


def scores(candidates: Iterable[Candidate], strategy: Strategy) -> dict[NodeName, int]:
    """Score nodes from 0 to 10 by their rank: the best gets 10, equal ranks get equal scores."""
    ranked = sorted((candidate.fit.standing(strategy), candidate.node) for candidate in candidates)
    places = {rank: place for place, rank in enumerate(dict.fromkeys(rank for rank, _ in ranked))}
    steps = max(1, len(places) - 1)
    return {node: MAX_SCORE - (places[rank] * MAX_SCORE) // steps for rank, node in ranked}


class Grouped(Protocol):
    """The key that groups refusals."""

    @property
    def group(self) -> tuple[str, bool, str]:
        """Equal for refusals for one reason."""
        ...

    @property
    def missing(self) -> int:
        """How much is missing; the best node is the one with the least."""
        ...


R = TypeVar("R", bound=Grouped)


@dataclass(frozen=True, slots=True)
class RefusalGroup:
    """Nodes that refuse for one reason."""

    nodes: tuple[NodeName, ...]
    best: NodeName
    """The node where least is missing."""
    refusal: Refusal
    """The refusal of that node."""

    @property
    def text(self) -> str:
        """The refusal with the name of the node in it."""
        where = self.refusal.shortfall.get("where")
        if not isinstance(where, str):
            return self.refusal.message
        place = self.best if where == THE_MACHINE else f"{self.best} {where}"
        return self.refusal.message.replace(f" on {where}", f" on {place}")


@dataclass(frozen=True, slots=True)
class GroupedRefusals:
    """All groups, the largest first."""

    groups: tuple[RefusalGroup, ...]

    @property
    def texts(self) -> dict[NodeName, str]:
        """The texts by node."""
        found: dict[NodeName, str] = {}
        for group in self.groups:
            found |= dict.fromkeys(group.nodes, group.text)
        return found

    @property
    def curable(self) -> list[NodeName]:
        """The nodes where the VM would fit if others left."""
        return [node for group in self.groups if not group.refusal.never for node in group.nodes]

    @property
    def summary(self) -> str:
        """All groups in one sentence."""
        return "; ".join(f"{counted(len(group.nodes), 'node')}: {group.text}" for group in self.groups)


def grouped(refusals: Mapping[NodeName, Refusal]) -> GroupedRefusals:
    """Group nodes by the reason of their refusal."""
    return grouped_by(refusals, lambda refusal: refusal)


def grouped_by(refusals: Mapping[NodeName, R], in_full: Callable[[R], Refusal]) -> GroupedRefusals:
    """Group nodes by the reason of refusal; only the best node of each group is needed in full."""
    by_reason: defaultdict[tuple[str, bool, str], list[tuple[int, NodeName]]] = defaultdict(list)
    for node, refusal in refusals.items():
        by_reason[refusal.group].append((refusal.missing, node))
    groups = []
    for entries in by_reason.values():
        _, best = min(entries)
        groups.append(RefusalGroup(tuple([node for _, node in entries]), best, in_full(refusals[best])))
    return GroupedRefusals(tuple(sorted(groups, key=lambda group: (-len(group.nodes), group.text))))
