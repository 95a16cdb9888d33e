"""One simulation: VMs arrive at a cluster and end, each decided as the extender decides.

Equal scenarios give equal outcomes, except for the measured seconds. Outcomes are reported as JSON for
programs, and as means for people.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from kvplace.core.allocator.allocate import try_place
from kvplace.core.cluster.node_choice import Candidate, Strategy
from kvplace.core.free_resources import free_of
from kvplace.core.ledger import Ledger
from kvplace.core.node_topology import API_VERSION
from kvplace.core.placement import Placement, Reason, Refusal
from kvplace.core.quantity import plain_bytes
from kvplace.core.request import Request
from kvplace.core.scalars import NodeName
from kvplace.core.topology import Topology
from kvplace.core.vm_stages import Percentiles
from kvplace.simulate.scenario import Arrival, LoadEvent, RandomLoad, Scenario, SimulatedVm, trace
from kvplace.simulate.simulated_cluster import ClusterState, SimulatedCluster, cluster_state, empty_amounts

KIND = "SimulationReport"


@dataclass(frozen=True, slots=True)
class Splits:
    """VMs over more parts of a machine than they need there when it is empty."""

    forced: int = 0
    """No node could hold them in fewer parts."""
    avoidable: int = 0
    """Another node could."""

    def after(self, used: int, needed: int, fewest: int) -> Splits:
        """Count one more VM."""
        if used <= needed:
            return self
        if fewest < used:
            return replace(self, avoidable=self.avoidable + 1)
        return replace(self, forced=self.forced + 1)


@dataclass
class SimulationOutcome:
    """The counts of one simulation."""

    strategy: Strategy
    seed: int | None
    """None for VMs that the scenario lists one by one."""
    complete: bool = True
    """False when the simulation was ended before its last event."""
    arrived: int = 0
    placed: int = 0
    refused: int = 0
    refused_cpus: int = 0
    refused_while_cluster_free: int = 0
    """The nodes together had the CPUs free."""
    refused_while_node_free: int = 0
    """One node had the CPUs free, and the memory outside huge pages."""
    reasons: Counter[Reason] = field(default_factory=Counter)
    """Of each refused VM, the reason of most nodes."""
    numa: Splits = Splits()
    l3: Splits = Splits()
    first_refusal: ClusterState | None = None
    placed_before_refusal: int = 0
    end: ClusterState = field(default_factory=lambda: ClusterState(0.0, 0.0, 0.0, 0.0))
    made_room: int = 0
    """VMs that fitted well only after moves of others."""
    moves: int = 0
    bytes_moved: int = 0
    """Memory that moves copied to other NUMA nodes."""
    seconds: list[float] = field(default_factory=list)
    """Of every decision: the answers of all nodes, and the choice."""


def simulate(
    scenario: Scenario, strategy: Strategy, seed: int | None, goes_on: Callable[[int], bool] = lambda _: True
) -> SimulationOutcome:
    """Run one simulation; a mix needs a seed.

    It asks with the number of VMs that have arrived whether it `goes_on`, and else ends incomplete.
    """
    return _Run(scenario, strategy, seed).run(goes_on)


class _Run:
    def __init__(self, scenario: Scenario, strategy: Strategy, seed: int | None) -> None:
        self._scenario = scenario
        self._cluster = SimulatedCluster(scenario.nodes, strategy)
        self._outcome = SimulationOutcome(strategy, seed)
        self._random: RandomLoad | None = None
        self._alone: dict[tuple[object, ...], Placement | None] = {}
        if scenario.mix is not None:
            amounts = [empty_amounts(node.topology) for node in scenario.nodes]
            self._random = RandomLoad(
                scenario.mix,
                seed or 0,
                cpus=sum(cpus for cpus, _ in amounts),
                memory=sum(numa.memory for node in scenario.nodes for numa in node.topology.numa_nodes),
            )

    def run(self, goes_on: Callable[[int], bool]) -> SimulationOutcome:
        events: Iterable[LoadEvent] = self._random if self._random is not None else trace(self._scenario.vms)
        for event in events:
            if not goes_on(self._outcome.arrived):
                self._outcome.complete = False
                break
            if isinstance(event, Arrival):
                self._arrive(event.vm)
            else:
                self._cluster.end(event.vm)
        self._outcome.end = self._state()
        return self._outcome

    def _arrive(self, vm: SimulatedVm) -> None:
        outcome, request = self._outcome, vm.request
        began = time.perf_counter()
        answers = self._cluster.answers(request)
        best = self._cluster.best(answers)
        outcome.seconds.append(time.perf_counter() - began)
        outcome.arrived += 1
        if self._makes_room(vm, best):
            return
        if best is None:
            self._refuse(vm, answers)
            return
        outcome.placed += 1
        self._count_splits(best, request, answers)
        self._cluster.start(best.node, vm, best.placement)

    def _makes_room(self, vm: SimulatedVm, best: Candidate | None) -> bool:
        """Place a VM with moves of others where it would be refused or split without."""
        most = self._scenario.moves
        if not most or (best is not None and not self._is_split(best, vm.request)):
            return False
        found = self._cluster.find_moves(vm.request, most, None if best is None else best.node)
        if found is None:
            return False
        node, plan = found
        self._cluster.move(node, plan)
        self._cluster.start(node, vm, plan.placement)
        self._outcome.placed += 1
        self._outcome.made_room += bool(plan.moves)
        self._outcome.moves += len(plan.moves)
        self._outcome.bytes_moved += plan.bytes_moved
        return True

    def _refuse(self, vm: SimulatedVm, answers: dict[NodeName, Candidate | Refusal]) -> None:
        outcome, request = self._outcome, vm.request
        if not outcome.refused:
            outcome.first_refusal = self._state()
            outcome.placed_before_refusal = outcome.placed
        outcome.refused += 1
        outcome.refused_cpus += request.vcpus
        frees = [free for _, free in self._cluster.states]
        cpus = [(free.cpus if request.owns_cpus else free.pool).bit_count() for free in frees]
        plain = plain_bytes(request.memory, request.huge_pages)
        outcome.refused_while_cluster_free += sum(cpus) >= request.vcpus
        outcome.refused_while_node_free += any(
            count >= request.vcpus
            and (not free.memory or sum(max(0, left) for _, left in free.memory) >= plain)
            for count, free in zip(cpus, frees, strict=True)
        )
        given = Counter(answer.reason for answer in answers.values() if isinstance(answer, Refusal))
        outcome.reasons[max(given, key=lambda reason: (given[reason], reason.value))] += 1
        if self._random is not None:
            self._random.refused(vm)

    def _alone_on(self, topology: Topology, request: Request) -> Placement | None:
        """Where a VM is placed on an empty machine, wherever its devices are."""
        key = (topology.fingerprint, request.key)
        if key not in self._alone:
            self._alone[key] = try_place(topology, free_of(topology, Ledger()), request.without_devices)
        return self._alone[key]

    def _is_split(self, best: Candidate, request: Request) -> bool:
        alone = self._alone_on(best.fit.topology, request)
        return alone is not None and len(best.placement.numa_nodes) > len(alone.numa_nodes)

    def _count_splits(
        self, best: Candidate, request: Request, answers: dict[NodeName, Candidate | Refusal]
    ) -> None:
        used, needed = best.placement, self._alone_on(best.fit.topology, request)
        if needed is None:
            return
        if len(used.numa_nodes) > len(needed.numa_nodes) or len(used.l3_groups) > len(needed.l3_groups):
            fitting = [answer.placement for answer in answers.values() if isinstance(answer, Candidate)]
            self._outcome.numa = self._outcome.numa.after(
                len(used.numa_nodes),
                len(needed.numa_nodes),
                min(len(placement.numa_nodes) for placement in fitting),
            )
            self._outcome.l3 = self._outcome.l3.after(
                len(used.l3_groups),
                len(needed.l3_groups),
                min(len(placement.l3_groups) for placement in fitting),
            )

    def _state(self) -> ClusterState:
        return cluster_state(self._cluster.states, self._scenario.memory_per_cpu)


def simulation_document(
    scenario: Scenario, outcomes: Sequence[SimulationOutcome], *, interrupted: bool = False
) -> dict[str, Any]:
    """Write the outcomes as JSON; everything but the seconds is the same for equal scenarios."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "nodes": len(scenario.nodes),
        "memoryPerCpu": round(scenario.memory_per_cpu),
        **({"interrupted": "not all simulations were run to their end"} if interrupted else {}),
        "runs": [_run_document(outcome) for outcome in outcomes],
    }


def _run_document(outcome: SimulationOutcome) -> dict[str, Any]:
    taken = Percentiles.of(outcome.seconds)
    document: dict[str, Any] = {"strategy": outcome.strategy.value}
    if outcome.seed is not None:
        document["seed"] = outcome.seed
    if not outcome.complete:
        document["complete"] = False
    first = outcome.first_refusal
    return document | {
        "arrived": outcome.arrived,
        "placed": outcome.placed,
        "refused": outcome.refused,
        "refusedCpus": outcome.refused_cpus,
        "refusedWhileFree": {
            "node": outcome.refused_while_node_free,
            "cluster": outcome.refused_while_cluster_free,
        },
        "reasons": {reason.value: count for reason, count in _ordered(outcome.reasons)},
        "numaSplits": _splits_document(outcome.numa),
        "l3Splits": _splits_document(outcome.l3),
        "moves": {"vms": outcome.made_room, "moves": outcome.moves, "bytes": outcome.bytes_moved},
        "firstRefusal": None
        if first is None
        else {"placedBefore": outcome.placed_before_refusal} | _state_document(first),
        "end": _state_document(outcome.end),
        "secondsPerDecision": {"median": taken.p50, "p99": taken.p99},
    }


def _splits_document(splits: Splits) -> dict[str, int]:
    return {"forced": splits.forced, "avoidable": splits.avoidable}


def _state_document(state: ClusterState) -> dict[str, float]:
    return {
        "cpusUsed": round(state.cpus_used, 6),
        "memoryUsed": round(state.memory_used, 6),
        "cpusStranded": round(state.cpus_stranded, 6),
        "memoryStranded": round(state.memory_stranded, 6),
    }


def _ordered(reasons: Counter[Reason]) -> list[tuple[Reason, int]]:
    return sorted(reasons.items(), key=lambda pair: (-pair[1], pair[0].value))


def simulation_summary(outcomes: Sequence[SimulationOutcome]) -> Mapping[str, str]:
    """Give the means over the seeds of one strategy, by their titles."""
    refusals = [outcome.first_refusal for outcome in outcomes if outcome.first_refusal is not None]
    ends = [outcome.end for outcome in outcomes]
    reasons = sum((outcome.reasons for outcome in outcomes), Counter[Reason]())
    taken = Percentiles.of([second for outcome in outcomes for second in outcome.seconds])

    def mean(number: Callable[[SimulationOutcome], int]) -> str:
        return f"{fmean(map(number, outcomes)):.1f}".removesuffix(".0")

    return {
        "VMs placed / refused": f"{mean(lambda o: o.placed)} / {mean(lambda o: o.refused)}",
        "vCPUs of refused VMs": mean(lambda o: o.refused_cpus),
        "most frequent reason": _ordered(reasons)[0][0].value if reasons else "-",
        "refused while a node had CPUs and memory free": mean(lambda o: o.refused_while_node_free),
        "refused while the cluster had CPUs free": mean(lambda o: o.refused_while_cluster_free),
        "split over NUMA nodes, forced / avoidable": (
            f"{mean(lambda o: o.numa.forced)} / {mean(lambda o: o.numa.avoidable)}"
        ),
        "split over L3 groups, forced / avoidable": (
            f"{mean(lambda o: o.l3.forced)} / {mean(lambda o: o.l3.avoidable)}"
        ),
        "moves / VMs placed by them": f"{mean(lambda o: o.moves)} / {mean(lambda o: o.made_room)}",
        "used at the first refusal, CPUs / memory": _used(refusals),
        "stranded at the first refusal, CPUs / memory": _stranded(refusals),
        "used at the end, CPUs / memory": _used(ends),
        "stranded at the end, CPUs / memory": _stranded(ends),
        "decision, median / p99": f"{taken.p50 * 1e3:.2f} / {taken.p99 * 1e3:.2f} ms",
    }


def _used(states: Sequence[ClusterState]) -> str:
    return _shares([state.cpus_used for state in states], [state.memory_used for state in states])


def _stranded(states: Sequence[ClusterState]) -> str:
    return _shares([state.cpus_stranded for state in states], [state.memory_stranded for state in states])


def _shares(cpus: Sequence[float], memory: Sequence[float]) -> str:
    return f"{fmean(cpus):.1%} / {fmean(memory):.1%}" if cpus else "-"
