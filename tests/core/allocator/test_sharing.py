"""VMs that share CPUs: their effect on each other, and the CPUs that they leave to exclusive VMs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from kvplace.core.allocator.allocate import place, try_place
from kvplace.core.cluster.node_choice import Candidate, Fit, Strategy, best_candidate
from kvplace.core.cpuset import mask_of
from kvplace.core.free_resources import free_of
from kvplace.core.ledger import Ledger, LedgerChange
from kvplace.core.placement import Placement
from kvplace.core.request import EmulatorThreads, PinningOptions, Policy, Request, Scope
from kvplace.core.scalars import NodeName, NumaId, PodUid
from kvplace.machines.server_types import read_machine
from tests.core.allocator.random_cases import random_case
from tests.core.example_ledgers import with_vm
from tests.profiles import rounds

MACHINE = read_machine("2x-epyc-7763-nps4")
"""Eight NUMA nodes with 30 CPUs each to give out."""
DESKTOP = Request(4, PinningOptions(scope=Scope.ONE_NUMA, policy=Policy.NUMA))


def placed(ledger: Ledger, request: Request) -> Placement:
    answer = place(MACHINE, free_of(MACHINE, ledger), request)
    assert isinstance(answer, Placement), answer
    return answer


def desktops(count: int) -> tuple[Ledger, list[int]]:
    """So many VMs of policy `numa`, one after the other, and the node of each."""
    ledger = Ledger()
    nodes: list[int] = []
    for number in range(count):
        nodes += placed(ledger, DESKTOP).numa_nodes
        ledger = with_vm(MACHINE, ledger, f"desktop-{number}", DESKTOP)
    return ledger, nodes


def test_vms_of_policy_numa_fill_a_pool_before_they_take_another_node_from_exclusive_vms() -> None:
    ledger, nodes = desktops(16)
    assert nodes == [0] * 7 + [1] * 7 + [2] * 2
    assert free_of(MACHINE, ledger).cpus.bit_count() == 5 * 30


def test_a_crowded_machine_has_its_vms_of_policy_numa_evenly_on_all_nodes() -> None:
    _, nodes = desktops(8 * 9)
    assert set(Counter(nodes).values()) == {9}


def test_a_pool_is_opened_where_exclusive_vms_have_left_no_whole_node_anyway() -> None:
    ledger = with_vm(MACHINE, Ledger(), "owner", Request(14, PinningOptions(scope=Scope.ONE_NUMA)))
    pool = placed(ledger, DESKTOP)
    assert pool.numa_nodes == (0,)
    assert not pool.cpus & ledger.owned


def test_a_pool_counts_the_vcpus_of_vms_that_name_its_cpus() -> None:
    ledger, nodes = desktops(5)
    assert nodes == [0] * 5
    naming = Request(8, PinningOptions(scope=Scope.ONE_NUMA, policy=Policy.SHARE))
    on_the_pool = free_of(MACHINE, ledger).within(MACHINE.node_by_id[NumaId(0)].cpus)
    claim = ledger.claims[PodUid("uid-desktop-0")]
    named = place(MACHINE, on_the_pool, naming)
    assert isinstance(named, Placement)
    claims = (replace(claim, uid=PodUid("uid-named"), policy=Policy.SHARE, cpus=named.cpus),)
    assert placed(ledger, DESKTOP).numa_nodes == (0,)
    assert placed(ledger.after(LedgerChange(claims)), DESKTOP).numa_nodes == (1,)


def test_cpus_that_are_released_join_no_pool_that_is_there_but_the_next_vm_s() -> None:
    ledger = with_vm(MACHINE, Ledger(), "owner", Request(14, PinningOptions(scope=Scope.ONE_NUMA)))
    ledger = with_vm(MACHINE, ledger, "first", DESKTOP)
    ledger = ledger.after(LedgerChange(releases=(PodUid("uid-owner"),)))
    assert ledger.claims[PodUid("uid-first")].cpus.bit_count() == 16
    assert placed(ledger, DESKTOP).cpus.bit_count() == 30


@pytest.mark.parametrize("policy", [Policy.SHARE, Policy.IMMOVABLE])
def test_vms_that_name_shared_cpus_are_dealt_over_the_least_used(policy: Policy) -> None:
    ledger, scope = Ledger(), Scope.ONE_SOCKET
    for number in range(90):  # on 120 CPUs of each socket
        ledger = with_vm(
            MACHINE, ledger, f"vm-{number}", Request(8, PinningOptions(scope=scope, policy=policy))
        )
    used = ledger.shared_use
    allocatable = MACHINE.allocatable
    assert mask_of(used) == allocatable
    assert set(used.values()) <= {2, 3, 4}  # whole cores behind one L3 cache come first


def test_an_exclusive_vm_never_gets_cpus_that_a_sharing_one_names() -> None:
    ledger = with_vm(MACHINE, Ledger(), "shares", Request(5, PinningOptions(policy=Policy.SHARE)))
    owner = placed(ledger, Request(20, PinningOptions(scope=Scope.ONE_NUMA)))
    assert not owner.owned & ledger.claims[PodUid("uid-shares")].cpus


@pytest.mark.parametrize(
    ("policy", "strategy"),
    [
        (policy, strategy)
        for policy in (Policy.SHARE, Policy.NUMA)
        for strategy in Strategy
        if (policy, strategy) != (Policy.SHARE, Strategy.PACK)
    ],
)
def test_a_node_is_not_crowded_with_sharing_vms_while_another_has_cpus_that_nothing_uses(
    policy: Policy, strategy: Strategy
) -> None:
    request = Request(4, PinningOptions(scope=Scope.ONE_NUMA, policy=policy))
    nodes = {"a": Ledger(), "b": Ledger()}
    chosen: Counter[str] = Counter()
    for number in range(2 * 56):  # on 240 CPUs of each: 7 VMs in each of 8 pools have a CPU for each vCPU
        found = [
            Candidate(
                NodeName(name),
                Fit(MACHINE, placed(ledger, request), free_of(MACHINE, ledger), request.vcpus),
            )
            for name, ledger in nodes.items()
        ]
        best = best_candidate(found, strategy)
        assert best is not None
        chosen[best.node] += 1
        nodes[best.node] = with_vm(MACHINE, nodes[best.node], f"vm-{number}", request)
        assert max(chosen.values()) <= 60
    assert min(chosen.values()) >= 52


def test_pack_puts_two_sharing_vms_to_a_cpu_before_it_takes_cpus_of_another_node() -> None:
    request = Request(4, PinningOptions(policy=Policy.SHARE))
    nodes = {"a": Ledger(), "b": Ledger()}
    for number in range(130):  # 120 of them are two to each of the 240 CPUs of a node
        found = [
            Candidate(
                NodeName(name),
                Fit(MACHINE, placed(ledger, request), free_of(MACHINE, ledger), request.vcpus),
            )
            for name, ledger in nodes.items()
        ]
        best = best_candidate(found, Strategy.PACK)
        assert best is not None
        nodes[best.node] = with_vm(MACHINE, nodes[best.node], f"vm-{number}", request)
    assert [len(ledger.claims) for ledger in nodes.values()] == [120, 10]


def test_where_no_vm_shares_a_sharing_one_gets_the_cpus_of_an_exclusive_one() -> None:
    compared = 0
    for seed in range(rounds(2500, quick=600)):
        topology, free, request = random_case(seed, 20)
        free = replace(free, uses=(), pool=free.cpus)
        options = replace(request.options, emulator_threads=EmulatorThreads.WITH_VCPUS)
        exclusive, sharing = (
            try_place(topology, free, replace(request, options=replace(options, policy=policy)))
            for policy in (Policy.EXCLUSIVE, Policy.SHARE)
        )
        if exclusive is not None and sharing is not None:
            assert exclusive.vcpus == sharing.vcpus, seed
            compared += 1
    assert compared > rounds(2500, quick=600) // 4
