"""Victims against every set of victims on small machines, and on larger ones against the rules."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from random import Random

from kvplace.core.allocator.allocate import try_place
from kvplace.core.cluster.victim_search import VictimSearch
from kvplace.core.cluster.victims import (
    Cost,
    DisruptionBudget,
    OccupiedMachine,
    Question,
    Tenant,
    Victims,
    eviction_cost,
    violated_by,
)
from kvplace.core.cpuset import cpus_of
from kvplace.core.label_terms import LabelTerm, Operator
from kvplace.core.ledger import Claim, claim_of
from kvplace.core.occupant import Occupant, locality_of
from kvplace.core.request import PinningOptions, Request, Scope
from kvplace.core.scalars import PodUid
from kvplace.core.topology import Topology
from tests.core.example_ledgers import ledger_of
from tests.core.machines import make_numa_node, make_package, make_topology
from tests.core.moves.fragmented import MIXED, Case, fragmented
from tests.profiles import rounds

PRIORITIES = (-(1 << 31), -5, 0, 0, 0, 10)
OURS = 1000


def finished(search: VictimSearch) -> Victims | None:
    """Carry out a search without a pause."""
    for _ in search.run():
        pass
    return search.answer


def machine_of(topology: Topology, occupants: list[Occupant]) -> OccupiedMachine:
    return OccupiedMachine(
        topology, ledger_of(*(claim_of(PodUid(one.id), one.placement) for one in occupants))
    )


def question_of(chance: Random, case: Case) -> Question:
    """Give the VMs of a case priorities, budgets and resources; some leave, some are certain to go."""
    budgets = [
        DisruptionBudget("default", f"budget-{number}", (ANY_LABEL,), chance.choice([0, 0, 1, 2]))
        for number in range(chance.choice([0, 0, 1, 2]))
    ]
    tenants, leaving, certain = [], [], []
    for one in case.occupants:
        tenant = Tenant(
            PodUid(one.id),
            chance.choice(PRIORITIES),
            since=f"2026-01-0{chance.randint(1, 9)}T00:00:00Z",
            budgets=tuple(budget for budget in budgets if chance.random() < 0.6),
            resources={"cpu": one.placement.owned.bit_count() * 1000},
        )
        match chance.randrange(12):
            case 0:
                leaving.append(tenant.uid)
            case 1:
                certain.append(tenant)
            case 2:
                pass  # of a priority that is not lower
            case _:
                tenants.append(tenant)
    return Question(
        machine_of(case.topology, case.occupants),
        case.request,
        tuple(tenants),
        frozenset(leaving),
        tuple(certain),
        {"cpu": chance.choice([0, 0, 1000, 3000])},
    )


ANY_LABEL = LabelTerm("any", Operator.ABSENT)


def fits(question: Question, chosen: tuple[Tenant, ...]) -> bool:
    gone = {one.uid for one in (*chosen, *question.certain)}
    requested = sum(one.resources["cpu"] for one in (*chosen, *question.certain))
    free = question.machine.free_without(gone | question.leaving)
    return (
        requested >= question.needed["cpu"]
        and try_place(question.machine.topology, free, question.request) is not None
    )


def best_of_all(question: Question) -> tuple[Cost, tuple[int, ...]] | None:
    """Try every set of victims."""
    best: tuple[Cost, tuple[int, ...]] | None = None
    for count in range(len(question.tenants) + 1):
        for chosen in combinations(question.tenants, count):
            everybody = (*question.certain, *chosen)
            cost = eviction_cost(everybody, violated_by(everybody))
            if (best is not None and cost > best[0]) or not fits(question, chosen):
                continue
            gone = {one.uid for one in everybody}
            free = question.machine.free_without(gone | question.leaving)
            placement = try_place(question.machine.topology, free, question.request)
            assert placement is not None
            quality = (
                *locality_of(question.machine.topology, placement),
                len(placement.l3_groups),
            )
            if best is None or (cost, quality) < best:
                best = (cost, quality)
            if count == 0:
                return best  # no client has to go
    return best


def in_vain(question: Question, victims: Victims) -> list[Tenant]:
    """The victims without whose eviction the VM fits, too."""
    chosen = tuple(one for one in victims.tenants if one not in question.certain)
    return [one for one in chosen if fits(question, tuple(other for other in chosen if other is not one))]


def test_victims_are_those_of_least_cost_and_give_the_best_placement_of_all_sets() -> None:
    counts: Counter[int | None] = Counter()
    for seed in range(rounds(700, quick=100)):
        chance = Random(seed)
        question = question_of(
            chance, fragmented(chance, most_cpus=chance.choice([6, 8, 12]), policies=MIXED)
        )
        found = finished(VictimSearch(question))
        truth = best_of_all(question)
        assert (found and (found.cost, found.quality)) == truth, seed
        if found is not None:
            assert found.exact, seed
            assert VictimSearch(question).least_cost <= found.cost or not found.tenants, seed
            assert in_vain(question, found) == [], seed
        counts[None if found is None else len(found.tenants)] += 1
    assert counts[None] >= rounds(20, quick=1)
    assert counts[1] >= rounds(100, quick=10)
    assert counts[2] >= rounds(50, quick=4)
    assert counts[3] >= rounds(10, quick=1)


def test_a_search_that_stops_at_its_bound_offers_no_victim_in_vain() -> None:
    stopped = 0
    for seed in range(rounds(300, quick=50)):
        chance = Random(seed)
        question = question_of(chance, fragmented(chance, most_cpus=16, policies=MIXED))
        bound = chance.choice([(2, 30_000), (5, 30_000), (300, 3), (300, 10)])
        found = finished(VictimSearch(question, max_placements=bound[0], max_steps=bound[1]))
        assert (found is None) == (best_of_all(question) is None), seed
        if found is not None:
            chosen = tuple(one for one in found.tenants if one not in question.certain)
            assert fits(question, chosen), seed
            assert in_vain(question, found) == [], seed
            stopped += not found.exact
    assert stopped >= rounds(50, quick=5)


def test_a_large_machine_full_of_small_vms_is_answered_exactly_and_soon() -> None:
    topology = server(nodes=8, cpus=32)
    tenants: list[Tenant] = []
    claims: list[Claim] = []
    for number in range(128):
        uid = PodUid(f"small-{number:03d}")
        tenants.append(Tenant(uid, priority=number % 3, since=f"{number:04d}"))
        request = Request(2, PinningOptions(Scope.ONE_NUMA))
        free = OccupiedMachine(topology, ledger_of(*claims)).free_without(())
        placement = try_place(topology, free, request)
        assert placement is not None
        claims.append(claim_of(uid, placement))
    wide = Request(16, PinningOptions(Scope.ONE_NUMA))
    question = Question(OccupiedMachine(topology, ledger_of(*claims)), wide, tuple(tenants))
    search = VictimSearch(question)
    found = finished(search)
    assert found is not None
    assert found.exact
    assert found.cost[:2] == (0, 1)  # eight of each NUMA node have priority 0 or 1 with their neighbours
    assert len(found.tenants) == 8
    cpus = [cpu for one in found.tenants for cpu in cpus_of(question.machine.ledger.claims[one.uid].owned)]
    assert len(topology.nodes_of(found.placement.cpus)) == 1
    assert sorted(cpus) == list(cpus_of(found.placement.owned))


def server(nodes: int, cpus: int) -> Topology:
    """A machine of so many NUMA nodes of so many CPUs, two to a core."""
    each = [((1 << cpus) - 1) << number * cpus for number in range(nodes)]
    half = nodes // 2
    return make_topology(
        packages=(make_package(0, sum(each[:half])), make_package(1, sum(each[half:]))),
        numa_nodes=(make_numa_node(number, mask) for number, mask in enumerate(each)),
        l3_groups=each,
        cores=(3 << first for first in range(0, nodes * cpus, 2)),
    )
