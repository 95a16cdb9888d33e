"""Bind claims cores, then binds the pod with them in one write; once, however often it is asked."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.errors import Forbidden
from kvplace.core.ledger import Ledger
from kvplace.core.node_topology import Enforcement
from kvplace.core.request import OnFailure, Policy, Request
from kvplace.core.request_json import PodRequest, write_request
from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.events import EventReason, EventRecorder, vmi_reference
from kvplace.kube.object_records import PodRecord
from kvplace.kube.watches import PODS
from kvplace.nodes.node_cache import NodeCache
from kvplace.scheduler.extender import Extender
from kvplace.scheduler.extender_protocol import BindingArgs
from tests.controller.replicas import asking_pod, replica
from tests.kube.faults import Operation
from tests.nodes.machines import EIGHT, TWO
from tests.scheduler.counting import Counting


@pytest.fixture
def cluster() -> Counting:
    """Two nodes of eight CPUs."""
    made = Counting()
    for name in ("a", "b"):
        made.create_node(name, topology=EIGHT)
    return made


async def test_a_bound_pod_has_node_cores_and_claim(cluster: Counting) -> None:
    async with replica(cluster, controller=False) as one:
        pod = asking_pod(cluster, "vm", 3)
        assert await one.bind(pod, "a") == ""
        claim = cluster.ledger("a").claims[pod.uid]
        placement = cluster.placement("vm")
        assert cluster.pod("vm").node == "a"
        assert cluster.pod("vm").cpu_map == '{"socket0":["0","1","2"]}'
        assert (placement.pod_uid, placement.node, placement.placement.vcpus) == (pod.uid, "a", (0, 1, 2))
        assert placement.topology == EIGHT.fingerprint
        assert (claim.owned, claim.cpus) == (0b111, 0b111)
        assert (claim.namespace, claim.pod, claim.vmi) == ("default", "vm", "vm")
        cluster.ledger("a").check()


@pytest.mark.parametrize(
    ("enforcement", "enforced"),
    [(Enforcement.NONE, False), (Enforcement.NRI, True), (Enforcement.CGROUP, True)],
)
async def test_a_placement_states_whether_the_nodes_agent_guards_its_cpus(
    cluster: Counting, enforcement: Enforcement, enforced: bool
) -> None:
    cluster.put_topology("a", EIGHT, enforcement=enforcement)
    async with replica(cluster, controller=False) as one:
        assert await one.bind(asking_pod(cluster, "vm", 3), "a") == ""
    assert cluster.placement("vm").enforced is enforced


async def test_the_claim_is_stored_first_and_then_node_and_cores_in_one_write(cluster: Counting) -> None:
    async with replica(cluster, controller=False) as one:
        pod = asking_pod(cluster, "vm", 3)
        sending = cluster.faults.hold(Operation.BIND)
        binding = asyncio.create_task(one.bind(pod, "a"))
        await sending.reached.wait()
        stored = cluster.ledger("a").claims[pod.uid]
        assert (stored.cpus, stored.owned) == (0b111, 0b111)
        assert cluster.pod("vm").node == ""
        sending.release()
        assert await binding == ""
        assert cluster.pod("vm").node == "a"
        assert cluster.placement("vm").placement.cpus == 0b111
        assert cluster.pod("vm").cpu_map == '{"socket0":["0","1","2"]}'


async def test_a_bind_that_was_done_already_succeeds_and_writes_nothing(cluster: Counting) -> None:
    async with replica(cluster, controller=False) as one:
        pod = asking_pod(cluster, "vm")
        assert await one.bind(pod, "a") == ""
        await one.until(lambda: one.cache.pods.records[pod.uid].node)
        assert await one.bind(pod, "a") == ""
        assert cluster.bindings == [("vm", "a")]
        assert one.cache.ledgers.writes == 1


async def test_a_bind_that_was_done_already_succeeds_although_the_watch_is_behind(
    cluster: Counting,
) -> None:
    async with replica(cluster, controller=False) as one, replica(cluster, controller=False) as other:
        pod = asking_pod(cluster, "vm")
        cluster.pause_watches(PODS)
        for binder in (one, one, other):
            assert await binder.bind(pod, "a") == ""
        assert cluster.claimed_on(pod.uid) == ["a"]
        assert cluster.placement("vm").placement.cpus == cluster.ledger("a").claims[pod.uid].cpus
        cluster.resume_watches(PODS)


async def test_a_second_call_waits_for_the_one_under_way(cluster: Counting) -> None:
    async with replica(cluster, controller=False) as one:
        pod = asking_pod(cluster, "vm")
        assert await asyncio.gather(*(one.bind(pod, "a") for _ in range(5))) == [""] * 5
        assert cluster.bindings == [("vm", "a")]


async def test_a_second_call_for_another_node_is_refused_while_one_is_under_way(cluster: Counting) -> None:
    async with replica(cluster, controller=False) as one:
        pod = asking_pod(cluster, "vm")
        first, second = await asyncio.gather(one.bind(pod, "a"), one.bind(pod, "b"))
        assert (first, second) == ("", "a bind of this pod to node a is under way")
        assert cluster.claimed_on(pod.uid) == ["a"]


async def test_a_caller_that_gives_up_does_not_stop_the_bind(cluster: Counting) -> None:
    async with replica(cluster, controller=False) as one:
        hold = cluster.faults.hold(Operation.BIND)
        pod = asking_pod(cluster, "vm")
        calling = asyncio.create_task(one.bind(pod, "a"))
        await hold.reached.wait()
        calling.cancel()
        hold.release()
        await one.until(lambda: cluster.pod("vm").node == "a")
        assert cluster.claimed_on(pod.uid) == ["a"]


async def test_a_bind_that_fails_after_its_caller_gave_up_is_in_the_log(
    cluster: Counting, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with replica(cluster, controller=False) as one:
            hold = cluster.faults.hold(Operation.BIND)
            pod = asking_pod(cluster, "vm")
            calling = asyncio.create_task(one.bind(pod, "a"))
            await hold.reached.wait()
            calling.cancel()
            cluster.delete_pod("default", "vm")
            hold.release()
            await one.until(lambda: not one.extender.binder.under_way)
    assert "bind refused: pod default/vm is gone" in caplog.text
    assert "never retrieved" not in caplog.text


# What cannot be bound.


async def test_the_controller_releases_the_claim_of_a_pod_that_is_gone(cluster: Counting) -> None:
    async with replica(cluster) as one:
        pod = asking_pod(cluster, "vm")
        await one.filter(pod)
        cluster.pause_watches(PODS)
        cluster.delete_pod("default", "vm")
        assert await one.bind(pod, "a") == "pod default/vm is gone"
        assert cluster.claimed_on(pod.uid) == ["a"]
        cluster.resume_watches(PODS)
        await one.until(lambda: pod.uid not in one.cache.pods.records)
        await one.until(lambda: not cluster.claimed_on(pod.uid))
        assert await one.bind(pod, "a") == f"pod default/vm with UID {pod.uid} is gone"


async def test_a_pod_that_was_made_anew_under_the_same_name_is_another_one(cluster: Counting) -> None:
    async with replica(cluster) as one:
        old = asking_pod(cluster, "vm")
        await one.filter(old)
        cluster.pause_watches(PODS)
        cluster.delete_pod("default", "vm")
        new = asking_pod(cluster, "vm")
        assert "it was created again" in await one.bind(old, "a")
        assert cluster.claimed_on(old.uid) == ["a"]
        unheard = replace(old, uid=PodUid("uid-nobody-has"))
        assert await one.bind(unheard, "a") == "pod default/vm with UID uid-nobody-has is gone"
        assert await one.bind(new, "a") == ""
        cluster.resume_watches(PODS)
        await one.until(lambda: not cluster.claimed_on(old.uid))


async def test_a_pod_that_is_being_deleted_leaves_no_claim(cluster: Counting) -> None:
    async with replica(cluster, controller=False) as one:
        pod = asking_pod(cluster, "vm")
        cluster._put_pod(replace(cluster.pod("vm"), deleting=True))
        assert await one.bind(pod, "a") == (
            "pod default/vm cannot be bound to a: pod default/vm is being deleted and cannot be bound"
        )
        assert cluster.claimed_on(pod.uid) == []


async def test_a_gated_pod_leaves_no_claim_and_is_bound_once_its_gate_is_open(cluster: Counting) -> None:
    async with replica(cluster, controller=False) as one:
        pod = asking_pod(cluster, "vm")
        cluster.change_pod("default", "vm", gated=True)
        assert "has non-empty .spec.schedulingGates" in await one.bind(pod, "a")
        assert cluster.claimed_on(pod.uid) == []
        cluster.change_pod("default", "vm", gated=False)
        assert await one.bind(pod, "a") == ""


async def test_a_pod_that_is_bound_elsewhere_keeps_its_cores_there_and_gets_none_here(
    cluster: Counting,
) -> None:
    async with replica(cluster, controller=False) as one, replica(cluster, controller=False) as other:
        pod = asking_pod(cluster, "vm")
        cluster.pause_watches(PODS)
        assert await one.bind(pod, "a") == ""
        assert "is already " in await other.bind(pod, "b")
        assert cluster.claimed_on(pod.uid) == ["a"]
        cluster.resume_watches(PODS)
        await other.until(lambda: other.cache.pods.get(pod.uid))
        written = other.cache.ledgers.writes
        assert await other.bind(pod, "b") == "pod default/vm is already bound to a"
        assert other.cache.ledgers.writes == written


async def test_a_pod_that_a_user_bound_without_cores_is_not_given_any(cluster: Counting) -> None:
    async with replica(cluster, controller=False) as one:
        pod = asking_pod(cluster, "vm")
        await cluster.bind("default", "vm", pod.uid, NodeName("a"), {})
        assert "is already " in await one.bind(pod, "a")
        assert cluster.claimed_on(pod.uid) == []


async def test_a_pod_without_a_request_is_refused(cluster: Counting) -> None:
    async with replica(cluster, controller=False) as one:
        pod = cluster.create_pod("plain")
        assert await one.bind(pod, "a") == "pod default/plain carries no kvplace.io/request"


async def test_a_node_that_cannot_be_used_is_refused_with_its_reason(cluster: Counting) -> None:
    cluster.create_node("bare")
    cluster.create_node("odd")
    cluster.put_topology_document("odd", {"cores": "x"})
    cluster.create_node("torn", topology=EIGHT)
    made = cluster.put_ledger("torn", Ledger())
    cluster._ledgers.put("torn", replace(made, problem="the claim of pod x cannot be read"))
    async with replica(cluster, controller=False) as one:
        pod = asking_pod(cluster, "vm")
        assert await one.bind(pod, "ghost") == "node ghost is not known to the API server"
        assert await one.bind(pod, "bare") == (
            "node bare: neither a NodeTopology object nor a cpu-map annotation describes the node"
        )
        assert "node odd: its NodeTopology cannot be read: packages is missing" in await one.bind(pod, "odd")
        assert await one.bind(pod, "torn") == (
            "node torn: its ledger cannot be read: the claim of pod x cannot be read"
        )


async def test_a_full_node_is_refused_with_the_shortfall(cluster: Counting) -> None:
    async with replica(cluster, controller=False) as one:
        assert await one.bind(asking_pod(cluster, "first", 6), "a") == ""
        late = asking_pod(cluster, "late", 3)
        assert await one.bind(late, "a") == "node a: no socket with 3 free CPUs, best 2 on socket 0"
        assert cluster.claimed_on(late.uid) == []


async def test_a_right_that_is_missing_is_reported_and_logged_and_no_claim_is_left(
    cluster: Counting, caplog: pytest.LogCaptureFixture
) -> None:
    denied = "the API server denies us create on pods/binding"
    with caplog.at_level(logging.WARNING):
        async with replica(cluster, controller=False) as one:
            pod = asking_pod(cluster, "vm")
            cluster.faults.fail(Operation.BIND, Forbidden(denied))
            assert await one.bind(pod, "a") == denied
            assert cluster.claimed_on(pod.uid) == []
    assert f"bind refused: {denied}" in caplog.messages


async def test_before_the_caches_have_synced_nothing_is_bound() -> None:
    cluster = Counting()
    cluster.create_node("a", topology=EIGHT)
    pod = asking_pod(cluster, "vm")
    extender = Extender(cluster, NodeCache(cluster), EventRecorder(cluster))
    result = await extender.bind(BindingArgs("vm", "default", pod.uid, NodeName("a")))
    assert result.error == "kvplace has not read the cluster yet; it will in a moment"
    assert cluster.claimed_on(pod.uid) == []


# Cores.


async def test_a_bind_takes_the_cores_that_filter_held_and_leaves_those_of_others(
    cluster: Counting,
) -> None:
    async with replica(cluster, controller=False) as one:
        promised, other = asking_pod(cluster, "promised", 4), asking_pod(cluster, "other", 2)
        await one.filter(promised, "a")
        await one.filter(other, "a")
        assert await one.bind(other, "a") == ""
        assert await one.bind(promised, "a") == ""
        assert cluster.placement("promised").placement.cpus == mask_of(range(4))
        assert cluster.placement("other").placement.cpus == mask_of([4, 5])
        assert one.held() == 0


async def test_a_hold_of_another_pod_does_not_stop_a_bind_that_comes_first(cluster: Counting) -> None:
    async with replica(cluster, controller=False) as one:
        await one.filter(asking_pod(cluster, "slow", 8), "a")
        assert await one.bind(asking_pod(cluster, "quick", 8), "a") == ""


async def test_many_binds_on_one_node_go_together_and_never_overlap(cluster: Counting) -> None:
    async with replica(cluster, controller=False) as one:
        pods = [asking_pod(cluster, f"vm-{number}", 1) for number in range(10)]
        answers = await asyncio.gather(*(one.bind(pod, "a") for pod in pods))
        assert answers.count("") == 8
        taken = [cluster.placement(pod.name).placement.cpus for pod in pods if cluster.pod(pod.name).node]
        assert sorted(taken) == [1 << cpu for cpu in range(8)]
        assert one.cache.ledgers.writes <= 2


async def test_replicas_that_bind_different_pods_to_one_node_never_share_a_core(cluster: Counting) -> None:
    async with (
        replica(cluster, controller=False) as one,
        replica(cluster, controller=False) as two,
        replica(cluster, controller=False) as three,
    ):
        pods = [asking_pod(cluster, f"vm-{number}", 2) for number in range(6)]
        binders = (one, two, three) * 2
        answers = await asyncio.gather(
            *(binder.bind(pod, "a") for binder, pod in zip(binders, pods, strict=True))
        )
        assert answers.count("") == 4
        cpus = [cpu for pod in pods if cluster.pod(pod.name).node for cpu in _cpus(cluster, pod)]
        assert sorted(cpus) == list(range(8))
        cluster.ledger("a").check()
        assert cluster.ledger("a").claims.keys() == {pod.uid for pod in pods if cluster.pod(pod.name).node}


async def test_replicas_that_bind_one_pod_to_one_node_both_answer_yes(cluster: Counting) -> None:
    async with replica(cluster, controller=False) as one, replica(cluster, controller=False) as other:
        pod = asking_pod(cluster, "vm", 3)
        assert set(await asyncio.gather(one.bind(pod, "a"), other.bind(pod, "a"))) == {""}
        assert cluster.placement("vm").placement.cpus == cluster.ledger("a").claims[pod.uid].cpus


async def test_replicas_that_bind_one_pod_to_two_nodes_leave_it_on_one_with_one_claim(
    cluster: Counting,
) -> None:
    async with replica(cluster) as one, replica(cluster) as other:
        pod = asking_pod(cluster, "vm", 3)
        answers = await asyncio.gather(one.bind(pod, "a"), other.bind(pod, "b"))
        assert sorted(bool(answer) for answer in answers) == [False, True]
        await one.until(lambda: cluster.claimed_on(pod.uid) == [cluster.pod("vm").node])


async def test_sharing_vms_claim_named_cpus_and_own_none(cluster: Counting) -> None:
    async with replica(cluster, controller=False) as one:
        for name in ("s", "t"):
            assert await one.bind(asking_pod(cluster, name, 5, policy=Policy.SHARE), "a") == ""
        assert cluster.ledger("a").owners == {}
        assert sum(cluster.ledger("a").shared_use.values()) == 10
        assert "no socket with 2 free CPUs" in await one.bind(asking_pod(cluster, "x", 2), "a")


async def test_a_request_in_cranes_spelling_is_answered_in_cranes_spelling_too(cluster: Counting) -> None:
    cluster.create_node("two", topology=TWO)
    async with replica(cluster, controller=False) as one:
        asked = PodRequest(Request(6), crane_result=True)
        pod = cluster.create_pod("vm", request=write_request(asked))
        assert await one.bind(pod, "two") == ""
        assert cluster.pod_annotations("default", "vm")["topology.crane.io/topology-result"] == (
            '[{"name":"node0","type":"Node","resources":{"capacity":{"cpu":"6"}}}]'
        )


# Floating.


async def test_a_vm_that_may_float_is_pinned_where_it_fits(cluster: Counting) -> None:
    async with replica(cluster, controller=False) as one:
        assert await one.bind(asking_pod(cluster, "vm", 8, on_failure=OnFailure.FLOAT), "a") == ""
        assert cluster.placement("vm").placement.cpus == mask_of(range(8))


async def test_a_vm_that_may_float_runs_unpinned_where_nothing_fits_and_reports_it(cluster: Counting) -> None:
    async with replica(cluster, controller=False) as one:
        pod = asking_pod(cluster, "vm", 9, on_failure=OnFailure.FLOAT)
        for _ in range(2):
            assert await one.bind(pod, "b") == ""
        assert cluster.placement("vm").placement.floats
        assert cluster.pod("vm").cpu_map == ""
        assert cluster.claimed_on(pod.uid) == []
        await one.events.finish()
        assert {(event.reason, event.regarding) for event in cluster.events} == {
            (EventReason.FLOATING, vmi_reference("default", "vm", "vmi-vm"))
        }


async def test_a_vm_that_may_float_is_refused_where_filter_had_found_cores_that_are_gone_by_now(
    cluster: Counting,
) -> None:
    """Another node may have cores for it; it floats when Filter has found none."""
    async with replica(cluster, controller=False) as one, replica(cluster, controller=False) as other:
        pod = asking_pod(cluster, "vm", 8, on_failure=OnFailure.FLOAT)
        assert (await one.filter(pod)).names == ["a"]
        assert await other.bind(asking_pod(cluster, "foreign", 8), "a") == ""
        assert "no socket with 8 free CPUs" in await one.bind(pod, "a")
        assert (await one.filter(pod)).names == ["b"]
        assert await other.bind(asking_pod(cluster, "also-foreign", 8), "b") == ""
        assert "no socket with 8 free CPUs" in await one.bind(pod, "b")
        assert (await one.filter(pod, "a", "b")).names == ["a", "b"]
        assert await one.bind(pod, "b") == ""
        assert cluster.placement("vm").placement.floats


async def test_a_vm_that_may_float_runs_unpinned_on_a_node_that_nothing_describes(cluster: Counting) -> None:
    cluster.create_node("bare")
    cluster.create_node("torn", topology=EIGHT)
    made = cluster.put_ledger("torn", Ledger())
    cluster._ledgers.put("torn", replace(made, problem="cannot be read"))
    async with replica(cluster, controller=False) as one:
        for node in ("bare", "torn"):
            pod = asking_pod(cluster, f"on-{node}", 1, on_failure=OnFailure.FLOAT)
            assert await one.bind(pod, node) == ""
            assert cluster.placement(f"on-{node}").placement.floats


def _cpus(cluster: Counting, pod: PodRecord) -> list[int]:
    return list(cpus_of(cluster.placement(pod.name).placement.cpus))
