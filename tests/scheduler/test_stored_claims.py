"""The placement behind a stored claim is the one that was claimed, core for core and byte for byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvplace.core.allocator.allocate import place
from kvplace.core.annotations import contradiction_in
from kvplace.core.claim_changes import reserve, reserve_for_migration, reserved_for_target
from kvplace.core.free_resources import free_of
from kvplace.core.ledger import Claim, Ledger, LedgerChange, claim_of
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import GuestNuma, OnFailure, PinningOptions, Policy, Request, Scope, Smt
from kvplace.core.scalars import NO_CPUS, Bytes, CpuMask, NodeName, PodUid
from kvplace.core.topology import Topology
from kvplace.kube.object_records import PodRecord
from kvplace.scheduler.stored_claims import is_bound_with, placement_of_claim
from tests.core.machines import frees, requests, topologies
from tests.nodes.machines import TWO

EVERY_POLICY = tuple(policy for policy in Policy if policy is not Policy.NONE)


Case = tuple[Topology, Request, Placement]


@st.composite
def seated(draw: st.DrawFn, policies: Sequence[Policy] = EVERY_POLICY) -> Case:
    """A machine, and a VM that sits on it: as wished if it can, else what is left of the wish.

    It becomes smaller, then the machine empty, then the wish a plain one.
    """
    machine = draw(topologies(most_cpus=16))
    wish = draw(requests(most_vcpus=6, scopes=tuple(Scope), policies=policies))
    mirrored = replace(wish, options=replace(wish.options, guest_numa=draw(st.sampled_from(GuestNuma))))
    wish = next(
        (one for one in (mirrored, wish) if contradiction_in(one.options) is None), Request(wish.vcpus)
    )
    empty = free_of(machine, Ledger())
    smaller = [replace(wish, vcpus=vcpus) for vcpus in range(wish.vcpus, 0, -1)]
    chances = [*product([draw(frees(machine)), empty], smaller), (empty, Request(1))]
    placements = [(place(machine, free, request), request) for free, request in chances]
    found = next(((one, request) for one, request in placements if isinstance(one, Placement)), None)
    assume(found is not None)  # a machine may have no CPU to give
    assert found is not None
    return machine, found[1], found[0]


def claimed(placement: Placement) -> Claim:
    return claim_of(
        PodUid("u"),
        placement,
        namespace="ns",
        pod="virt-launcher-db",
        vmi="db",
        since="2026-01-02T03:04:05Z",
    )


@given(seated())
def test_a_placement_is_found_again_behind_its_claim(case: Case) -> None:
    machine, request, placement = case
    found = placement_of_claim(machine, request, claimed(placement))
    if found is None:  # more NUMA nodes give memory than CPUs: rare, and then it is decided anew
        assert len(placement.numa_nodes) > len(machine.nodes_of(placement.cpus | placement.owned))
    elif request.owns_cpus or request.options.policy is Policy.NUMA:
        assert found == placement
    else:  # which of its CPUs the emulator gets depends on how many others used each, which a claim forgets
        kept = replace(found, vcpus=placement.vcpus, emulator_cpus=placement.emulator_cpus)
        assert replace(kept, guest_cells=placement.guest_cells) == placement


@pytest.mark.parametrize("smt", Smt)
def test_a_reservation_is_bound_with_the_cores_that_it_has(smt: Smt) -> None:
    request = Request(2, PinningOptions(scope=Scope.ONE_NUMA, smt=smt))
    placement = place(TWO, free_of(TWO, Ledger()), request)
    assert isinstance(placement, Placement)
    whole = claimed(placement)
    reserved = reserve(Ledger(), whole, but=NO_CPUS, until="2026-01-01T00:00:00Z")
    target = replace(reserve_for_migration(whole, "move", until=""), uid=PodUid("vmi"))
    kept = reserved_for_target(Ledger().after(LedgerChange(claims=(target,))), "vmi", "move")
    assert kept is not None
    for one in (reserved, kept):
        assert placement_of_claim(TWO, request, one) == placement


def test_the_memory_and_huge_pages_of_a_claim_are_found_again_too() -> None:
    nodes = [replace(node, huge_pages={Bytes(2 << 20): 512}) for node in TWO.numa_nodes]
    machine = replace(TWO, numa_nodes=tuple(nodes))
    for huge_pages in ({Bytes(2 << 20): 512}, {}):
        request = Request(
            4, PinningOptions(scope=Scope.ONE_NUMA), memory=Bytes(1 << 30), huge_pages=huge_pages
        )
        placement = place(machine, free_of(machine, Ledger()), request)
        assert isinstance(placement, Placement)
        assert placement.memory == {0: 1 << 30}
        assert placement_of_claim(machine, request, claimed(placement)) == placement


# The claim of a VM of policy numa may hold more vCPUs than it was made for.
@given(seated([policy for policy in EVERY_POLICY if policy is not Policy.NUMA]))
def test_a_claim_that_the_machine_no_longer_serves_has_no_placement_behind_it(case: Case) -> None:
    machine, request, placement = case
    claim = claimed(placement)
    larger = replace(request, vcpus=claim.cpus.bit_count() + 1)
    assert placement_of_claim(machine, larger, claim) is None


def bound_pod(placement: PodPlacement) -> PodRecord:
    return PodRecord("ns", "p", PodUid("u"), node=NodeName("n"), placement=placement.to_json())


def test_an_unpinned_pod_is_bound_as_decided_only_with_its_own_uid_and_node() -> None:
    pod = bound_pod(PodPlacement.floating(pod_uid=PodUid("u"), node=NodeName("n")))
    assert is_bound_with(pod, None, uid=PodUid("u"), node=NodeName("n"))
    assert not is_bound_with(None, None, uid=PodUid("u"), node=NodeName("n"))
    assert not is_bound_with(pod, None, uid=PodUid("other"), node=NodeName("n"))
    assert not is_bound_with(pod, None, uid=PodUid("u"), node=NodeName("other"))
    assert not is_bound_with(replace(pod, placement=""), None, uid=PodUid("u"), node=NodeName("n"))
    inherited = PodPlacement.floating(pod_uid=PodUid("source"), node=NodeName("n")).to_json()
    assert not is_bound_with(replace(pod, placement=inherited), None, uid=PodUid("u"), node=NodeName("n"))


@given(seated())
def test_a_pod_is_bound_with_its_claim_only_if_it_has_just_its_cpus_or_was_relocated(case: Case) -> None:
    _, _, placement = case
    bound = PodPlacement(PodUid("u"), NodeName("n"), "", OnFailure.WAIT, placement)
    claim = claimed(placement)
    others = CpuMask(placement.cpus << 1)
    for unlike in (replace(claim, cpus=others), replace(claim, owned=CpuMask(claim.owned ^ others)), None):
        assert not is_bound_with(bound_pod(bound), unlike, uid=PodUid("u"), node=NodeName("n"))
        relocated = bound_pod(replace(bound, revision=2))
        assert is_bound_with(relocated, unlike, uid=PodUid("u"), node=NodeName("n"))
        assert not is_bound_with(relocated, unlike, uid=PodUid("other"), node=NodeName("n"))
    assert is_bound_with(bound_pod(bound), claim, uid=PodUid("u"), node=NodeName("n"))
