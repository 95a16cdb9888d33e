"""What is found again behind a stored claim is what was claimed, core for core and byte for byte."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from kvplace.core.allocator.allocate import place
from kvplace.core.contradictions import contradiction_in
from kvplace.core.free import Free
from kvplace.core.ledger import Claim
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import GuestNuma, OnFailure, Policy, Request, Scope
from kvplace.core.request_document import PodRequest
from kvplace.core.topology import Topology
from kvplace.kube.records import PodRecord
from kvplace.scheduler.claims import claim_of, is_bound_as_meant, placed_again
from tests.core.machines import frees, requests, topologies

EVERY_POLICY = tuple(policy for policy in Policy if policy is not Policy.NONE)


@st.composite
def wishes(draw: st.DrawFn) -> Request:
    """Any words that do not exclude each other."""
    request = draw(requests(most_vcpus=6, scopes=tuple(Scope), policies=EVERY_POLICY))
    request = replace(request, guest_numa=draw(st.sampled_from(GuestNuma)))
    assume(contradiction_in(request) is None)
    return request


cases = topologies(most_cpus=16).flatmap(
    lambda machine: st.tuples(st.just(machine), frees(machine), wishes())
)
Case = tuple[Topology, Free, Request]


def fitting(case: Case) -> tuple[Request, Placement]:
    """The largest VM that is no larger than the wished one and fits; most wishes do at some size."""
    machine, free, request = case
    for vcpus in range(request.vcpus, 0, -1):
        smaller = replace(request, vcpus=vcpus)
        placement = place(machine, free, smaller)
        if isinstance(placement, Placement):
            return smaller, placement
    assume(False)
    raise AssertionError


def claimed(placement: Placement, request: Request) -> Claim:
    return claim_of(
        placement,
        PodRequest(request, vmi="ns/db"),
        uid="u",
        namespace="ns",
        pod="virt-launcher-db",
        since="2026-01-02T03:04:05Z",
    )


@given(cases)
def test_a_placement_is_found_again_behind_its_claim(case: Case) -> None:
    machine = case[0]
    request, placement = fitting(case)
    found = placed_again(machine, request, claimed(placement, request))
    if found is None:  # more NUMA nodes give memory than CPUs: rare, and then it is decided anew
        assert len(placement.numa_nodes) > len(machine.nodes_of(placement.cpus | placement.owned))
    elif request.owns_cpus or request.policy is Policy.NUMA:
        assert found == placement
    else:  # which of its CPUs the emulator gets depends on how many others used each, which a claim forgets
        kept = replace(found, vcpus=placement.vcpus, emulator_cpus=placement.emulator_cpus)
        assert replace(kept, guest_cells=placement.guest_cells) == placement


@given(cases)
def test_a_claim_that_the_machine_no_longer_serves_has_no_placement_behind_it(case: Case) -> None:
    machine = case[0]
    assume(case[2].policy is not Policy.NUMA)  # its claim may hold more vCPUs than it was made for
    request, placement = fitting(case)
    claim = claimed(placement, request)
    assert placed_again(machine, replace(request, vcpus=request.vcpus + 5), claim) is None


def test_a_pod_is_bound_as_meant_only_with_its_own_uid_node_and_cpus() -> None:
    floating = PodPlacement.floating(pod_uid="u", node="n")
    pod = PodRecord("ns", "p", "u", node="n", placement=floating.to_json())
    assert is_bound_as_meant(pod, uid="u", node="n", claim=None)
    assert not is_bound_as_meant(None, uid="u", node="n", claim=None)
    assert not is_bound_as_meant(pod, uid="other", node="n", claim=None)
    assert not is_bound_as_meant(pod, uid="u", node="other", claim=None)
    assert not is_bound_as_meant(replace(pod, placement=""), uid="u", node="n", claim=None)
    inherited = PodPlacement.floating(pod_uid="source", node="n").to_json()
    assert not is_bound_as_meant(replace(pod, placement=inherited), uid="u", node="n", claim=None)
    assert floating.on_failure is OnFailure.FLOAT
