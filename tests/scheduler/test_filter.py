"""Filter answers with the one best node and holds its cores, or gives the shortfall of each node."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.errors import Unavailable
from kvplace.core.ledger import Ledger, LedgerChange
from kvplace.core.node_topology import topology_document
from kvplace.core.placement import Reason
from kvplace.core.request import GuestNuma, OnFailure, Policy, Scope, Smt
from kvplace.core.scalars import Bytes, CpuMask, NodeName
from kvplace.core.well_known_names import REQUEST
from kvplace.kube.events import EventReason, EventRecorder
from kvplace.kube.watches import LEDGERS, PODS
from kvplace.nodes.node_cache import NodeCache
from kvplace.scheduler.extender import Extender, ExtenderSettings, Mode
from kvplace.scheduler.extender_protocol import read_extender_args
from kvplace.scheduler.metrics import REFUSALS
from tests.controller.replicas import Replica, asking_args, asking_pod, replica
from tests.kube.faults import FaultScript, Operation
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import EIGHT, TWO

GIB = Bytes(1 << 30)
# Two sockets of four cores with two threads; CPU 8 is the sibling of CPU 0.
ADVISING = ExtenderSettings(mode=Mode.ADVISE)


@pytest.fixture
def cluster() -> FaultyCluster:
    return FaultyCluster()


async def test_decide_answers_with_the_one_best_node(cluster: FaultyCluster) -> None:
    cluster.create_node("big", topology=TWO)
    cluster.create_node("small", topology=EIGHT)
    async with replica(cluster) as one:
        answer = await one.filter(asking_pod(cluster, "vm"))
        assert (answer.names, answer.error) == (["small"], "")
        crossing = asking_pod(cluster, "wide", 12, scope=Scope.ANY)
        assert (await one.filter(crossing)).names == ["big"]


async def test_advise_answers_with_every_node_that_fits_and_holds_nothing(cluster: FaultyCluster) -> None:
    for name in ("a", "b"):
        cluster.create_node(name, topology=EIGHT)
    cluster.create_node("two", topology=TWO)
    async with replica(cluster, extending=ADVISING) as one:
        answer = await one.filter(asking_pod(cluster, "vm", 8))
        assert answer.names == ["a", "b", "two"]
        assert one.held() == 0
        assert (await one.filter(asking_pod(cluster, "other", 8))).names == ["a", "b", "two"]


async def test_only_nodes_that_were_asked_about_are_answered(cluster: FaultyCluster) -> None:
    for name in ("a", "b", "c"):
        cluster.create_node(name, topology=EIGHT)
    async with replica(cluster) as one:
        assert (await one.filter(asking_pod(cluster, "vm"), "c")).names == ["c"]
        assert (await one.filter(asking_pod(cluster, "vm2"), "b", "c")).names == ["c"]  # fuller


async def test_the_next_pod_finds_the_held_cores_taken(cluster: FaultyCluster) -> None:
    for name in ("a", "b"):
        cluster.create_node(name, topology=EIGHT)
    async with replica(cluster) as one:
        answers = [await one.filter(asking_pod(cluster, f"vm-{number}", 5)) for number in range(3)]
        assert [answer.names for answer in answers] == [["a"], ["b"], []]
        assert answers[2].unresolvable == dict.fromkeys(
            ("a", "b"), "no socket with 5 free CPUs, best 3 on a socket 0"
        )


async def test_a_pod_that_is_filtered_again_is_not_blocked_by_its_own_hold(cluster: FaultyCluster) -> None:
    cluster.create_node("a", topology=EIGHT)
    async with replica(cluster) as one:
        pod = asking_pod(cluster, "vm", 8)
        for _ in range(3):
            assert (await one.filter(pod)).names == ["a"]
        assert one.held() == 1


async def test_a_pod_with_a_request_again_is_not_blocked_by_its_own_claim(cluster: FaultyCluster) -> None:
    """Its replica may have died between claim and binding: only this pod can use these cores."""
    for name in ("a", "b"):
        cluster.create_node(name, topology=EIGHT)
    async with replica(cluster, controller=False) as before:
        pod = asking_pod(cluster, "vm", 8)
        cluster.faults.fail(Operation.BIND, Unavailable("no answer"), times=50)
        assert await before.bind(pod, "b")
    cluster.faults = FaultScript()
    for settings in (ExtenderSettings(), ADVISING):
        async with replica(cluster, controller=False, extending=settings) as after:
            assert "b" in ((await after.filter(pod)).names or ())
            assert (await after.filter(pod, "b")).names == ["b"]
            assert (await after.scores(pod, "b")) == {"b": 10}
    async with replica(cluster, controller=False) as after:
        assert (await after.filter(pod)).names == ["b"]  # rather than claiming elsewhere, too
        other = asking_pod(cluster, "other", 8)
        assert (await after.filter(other, "b")).names == []
        assert (await after.filter(pod, "a")).names == ["a"]  # its claim is on a node that is not offered
        assert await after.bind(pod, "b") == ""


async def test_a_hold_ends_after_a_while(cluster: FaultyCluster) -> None:
    cluster.create_node("a", topology=EIGHT)
    async with replica(cluster) as one:
        assert (await one.filter(asking_pod(cluster, "lost", 8))).names == ["a"]
        later = asking_pod(cluster, "later", 8)
        await asyncio.sleep(29.0)
        assert (await one.filter(later)).names == []
        await asyncio.sleep(2.0)
        assert (await one.filter(later)).names == ["a"]


async def test_a_hold_ends_with_its_pod(cluster: FaultyCluster) -> None:
    cluster.create_node("a", topology=EIGHT)
    async with replica(cluster) as one:
        pod = asking_pod(cluster, "lost", 8)
        await one.until(lambda: pod.uid in one.cache.pods.records)
        assert (await one.filter(pod)).names == ["a"]
        cluster.delete_pod("default", "lost")
        await one.until(lambda: one.held() == 0)
        assert (await one.filter(asking_pod(cluster, "later", 8))).names == ["a"]


async def test_a_hold_ends_when_its_pod_is_bound_elsewhere(cluster: FaultyCluster) -> None:
    for name in ("a", "b"):
        cluster.create_node(name, topology=EIGHT)
    async with replica(cluster) as one, replica(cluster) as other:
        pod = asking_pod(cluster, "vm", 8)
        assert (await one.filter(pod)).names == ["a"]
        assert await other.bind(pod, "b") == ""
        await one.until(lambda: one.held() == 0)
        assert (await one.filter(asking_pod(cluster, "later", 8))).names == ["a"]


async def test_holds_of_sharing_vms_keep_exclusive_vms_away(cluster: FaultyCluster) -> None:
    cluster.create_node("a", topology=EIGHT)
    async with replica(cluster) as one:
        assert (await one.filter(asking_pod(cluster, "s", 6, policy=Policy.SHARE))).names == ["a"]
        assert (await one.filter(asking_pod(cluster, "x", 3))).names == []
        assert (await one.filter(asking_pod(cluster, "t", 8, policy=Policy.SHARE))).names == ["a"]


async def test_each_unusable_node_has_its_reason(cluster: FaultyCluster) -> None:
    cluster.create_node("bare")
    cluster.create_node("odd")
    cluster.put_topology_document("odd", {"cores": "x"})
    cluster.create_node("typo", cpu_map='{"socket": ["1"]}')
    cluster.create_node("torn", topology=EIGHT)
    cluster.put_ledger("torn", Ledger())
    cluster._ledgers.put(
        "torn",
        replace(cluster._ledgers.records["torn"], problem="the claim of pod x cannot be read: 'policy'"),
    )
    async with replica(cluster) as one:
        answer = await one.filter(asking_pod(cluster, "vm"), "bare", "odd", "typo", "torn", "ghost")
        assert answer.names == []
        assert answer.unresolvable == {
            "bare": "neither a NodeTopology object nor a cpu-map annotation describes the node",
            "ghost": "the node is not known to the API server",
            "odd": "its NodeTopology cannot be read: packages is missing; it must be a list",
            "torn": "its ledger cannot be read: the claim of pod x cannot be read: 'policy'",
            "typo": "its annotation cpu-map: '{\"socket\": [\"1\"]}': key 'socket' must be "
            "socket0, socket1, ...",
        }


async def test_a_node_with_only_a_hand_written_cpu_map_can_be_used(cluster: FaultyCluster) -> None:
    cluster.create_node("hand", cpu_map='{"socket0": ["1", "2", "3"], "socket1": ["5"]}')
    async with replica(cluster) as one:
        assert (await one.filter(asking_pod(cluster, "vm", 3))).names == ["hand"]
        refused = await one.filter(asking_pod(cluster, "wide", 4))
        assert refused.unresolvable == {"hand": "no socket with 4 free CPUs, best 1 on hand socket 1"}


async def test_the_cpu_map_of_a_node_narrows_the_cpus_of_its_topology(cluster: FaultyCluster) -> None:
    cluster.create_node("n", cpu_map='{"socket0": ["2", "3", "4"]}', topology=EIGHT)
    async with replica(cluster) as one:
        pod = asking_pod(cluster, "vm", 3)
        assert (await one.filter(pod)).names == ["n"]
        (held,) = one.extender.pending.held_on(NodeName("n"))
        assert (held.uid, held.owned) == (pod.uid, mask_of([2, 3, 4]))
        assert (await one.filter(asking_pod(cluster, "wide", 4))).names == []


async def test_nodes_that_fail_alike_get_one_text_with_the_best_of_them_named(
    cluster: FaultyCluster,
) -> None:
    for number in range(3):
        cluster.create_node(f"worker-{number}", topology=TWO)
    async with replica(cluster) as one:
        for node, vcpus in (("worker-0", 8), ("worker-1", 7), ("worker-2", 6)):
            for part in range(2):
                pod = asking_pod(cluster, f"{node}-{part}", vcpus, scope=Scope.ONE_NUMA)
                assert (await one.filter(pod, node)).names == [node]
        refusals = REFUSALS.labels(Reason.NO_NUMA_NODE_FITS.value)._value.get()
        answer = await one.filter(asking_pod(cluster, "vm", 4, scope=Scope.ONE_NUMA))
        assert REFUSALS.labels(Reason.NO_NUMA_NODE_FITS.value)._value.get() == refusals + 1
        told = "no NUMA node with 4 free CPUs, best 2 on worker-2 numa 0"
        assert answer.unresolvable == {f"worker-{number}": told for number in range(3)}
        await one.events.finish()
        (event,) = [event for event in cluster.events if event.reason is EventReason.DOES_NOT_FIT]
        assert (event.regarding.kind, event.regarding.name) == ("VirtualMachineInstance", "vm")
        assert event.note == f"3 nodes: {told}"


async def test_an_equal_event_is_not_written_at_every_retry(cluster: FaultyCluster) -> None:
    cluster.create_node("a", topology=EIGHT)
    async with replica(cluster) as one:
        pod = asking_pod(cluster, "vm", 9)
        for _ in range(5):
            await one.filter(pod)
        await one.events.finish()
        assert [event.note for event in cluster.events] == [
            "1 node: no socket with 9 free CPUs, best 8 on a socket 0"
        ]


async def test_a_vm_that_may_float_gets_every_node_when_none_has_room(cluster: FaultyCluster) -> None:
    for name in ("a", "b"):
        cluster.create_node(name, topology=EIGHT)
    async with replica(cluster) as one:
        floating = asking_pod(cluster, "vm", 9, on_failure=OnFailure.FLOAT)
        assert (await one.filter(floating)).names == ["a", "b"]
        sitting = asking_pod(cluster, "fits", 8, on_failure=OnFailure.FLOAT)
        assert (await one.filter(sitting)).names == ["a"]


async def test_a_pod_without_a_request_is_an_error_with_its_fix(cluster: FaultyCluster) -> None:
    cluster.create_node("a", topology=EIGHT)
    async with replica(cluster) as one:
        answer = await one.filter(cluster.create_pod("early"))
        assert (answer.names, answer.nodes) == (None, None)
        assert "delete it to have it created again" in answer.error


async def test_a_request_that_cannot_be_read_fails_every_node_for_good(cluster: FaultyCluster) -> None:
    for name in ("a", "b"):
        cluster.create_node(name, topology=EIGHT)
    async with replica(cluster) as one:
        answer = await one.filter(cluster.create_pod("bad", request='{"version": 7}'))
        assert answer.names == []
        assert set(answer.unresolvable) == {"a", "b"}
        assert "must be an object of version 1" in answer.unresolvable[NodeName("a")]
        assert await one.scores(cluster.create_pod("bad2", request="{")) == {"a": 0, "b": 0}


async def test_words_that_exclude_each_other_fail_every_node_for_good(cluster: FaultyCluster) -> None:
    """Another release's admission may have let them through."""
    cluster.create_node("a", topology=EIGHT)
    async with replica(cluster) as one:
        excluding: tuple[dict[str, Any], ...] = (
            {"policy": Policy.SHARE, "smt": Smt.ISOLATE},
            {"policy": Policy.NUMA, "guest_numa": GuestNuma.MIRROR},
        )
        for number, options in enumerate(excluding):
            pod = asking_pod(cluster, f"vm-{number}", 2, **options)
            answer = await one.filter(pod)
            assert answer.names == []
            assert "contradicts kvplace.io/cpu-policy" in answer.unresolvable[NodeName("a")]
            assert await one.scores(pod) == {"a": 0}
            assert "contradicts kvplace.io/cpu-policy" in await one.bind(pod, "a")


async def test_before_the_caches_have_synced_filter_answers_an_error() -> None:
    cluster = FaultyCluster()
    cluster.create_node("a", topology=EIGHT)
    cache = NodeCache(cluster)
    pod = asking_pod(cluster, "vm")
    answer = await Extender(cluster, cache, EventRecorder(cluster)).filter(asking_args(pod, "a"))
    assert answer.error == "kvplace has not read the cluster yet; it will in a moment"
    assert answer.names is None


async def test_complete_nodes_are_answered_with_complete_nodes(cluster: FaultyCluster) -> None:
    for name in ("a", "b"):
        cluster.create_node(name, topology=EIGHT)
    async with replica(cluster) as one:
        pod = asking_pod(cluster, "vm")
        body = (
            '{"pod": {"metadata": {"name": "vm", "namespace": "default", "uid": "%s", '
            '"labels": {"kvplace.io/placed": "true"}, "annotations": {"%s": %s}}}, '
            '"nodes": {"items": [{"metadata": {"name": "a"}, "x": 1}, '
            '{"metadata": {"name": "b"}}]}}'
        )
        quoted = '"' + pod.request.replace('"', '\\"') + '"'
        answer = await one.extender.filter(read_extender_args((body % (pod.uid, REQUEST, quoted)).encode()))
        assert answer.names is None
        assert answer.nodes is not None
        assert [bytes(raw) for raw in answer.nodes["items"]] == [b'{"metadata": {"name": "a"}, "x": 1}']


async def test_a_change_of_a_node_is_seen_by_the_next_pod(cluster: FaultyCluster) -> None:
    cluster.create_node("n", topology=EIGHT)
    async with replica(cluster) as one:
        assert (await one.filter(asking_pod(cluster, "a", 9, scope=Scope.ANY))).names == []
        cluster.put_topology("n", TWO)
        await _settled(one)
        assert (await one.filter(asking_pod(cluster, "b", 9, scope=Scope.ANY))).names == ["n"]
        cluster.delete_topology("n")
        await _settled(one)
        assert (await one.filter(asking_pod(cluster, "c"))).names == []
        cluster.create_node("n", cpu_map='{"socket0": ["7"]}')
        await _settled(one)
        assert (await one.filter(asking_pod(cluster, "d", 1))).names == ["n"]
        cluster.delete_node("n")
        await _settled(one)
        assert (await one.filter(asking_pod(cluster, "e", 1), "n")).names == []


async def test_claims_of_other_replicas_are_seen(cluster: FaultyCluster) -> None:
    cluster.create_node("n", topology=EIGHT)
    async with replica(cluster) as one, replica(cluster) as other:
        assert await other.bind(asking_pod(cluster, "vm", 6), "n") == ""
        await one.until(lambda: one.cache.ledger(NodeName("n")).owned)
        assert (await one.filter(asking_pod(cluster, "late", 3))).names == []
        assert (await one.filter(asking_pod(cluster, "small", 2))).names == ["n"]


async def test_the_reasons_for_a_choice_are_kept_for_pods_that_want_them(cluster: FaultyCluster) -> None:
    for name in ("a", "b", "c"):
        cluster.create_node(name, topology=TWO)
    cluster.create_node("tiny", cpu_map='{"socket0": ["1"]}')
    async with replica(cluster) as one:
        only = asking_pod(cluster, "only", 4, explain=True)
        assert (await one.filter(only, "c")).names == ["c"]
        assert await one.bind(only, "c") == ""
        alone = cluster.pod_annotations("default", "only")["kvplace.io/explanation"]
        assert alone == "c (1 socket, 1 NUMA node, 1 L3 group); no other node fits"
        cluster.delete_pod("default", "only", force=True)
        await one.until(lambda: not one.claims("c"))
        pod = asking_pod(cluster, "vm", 4, explain=True)
        (node,) = (await one.filter(pod)).names or [NodeName("")]
        assert await one.bind(pod, node) == ""
        assert cluster.pod_annotations("default", "vm")["kvplace.io/explanation"] == (
            "a (1 socket, 1 NUMA node, 1 L3 group); before b: first by name"
        )


async def test_where_kube_scheduler_chooses_the_reasons_report_it(cluster: FaultyCluster) -> None:
    for name in ("a", "b"):
        cluster.create_node(name, topology=TWO)
    async with replica(cluster, extending=ADVISING) as one:
        pod = asking_pod(cluster, "vm", 4, explain=True)
        assert (await one.filter(pod)).names == ["a", "b"]
        assert await one.bind(pod, "b") == ""
        assert cluster.pod_annotations("default", "vm")["kvplace.io/explanation"] == (
            "kube-scheduler chose; kvplace ranks first a (1 socket, 1 NUMA node, 1 L3 group); "
            "before b: first by name"
        )


async def test_equal_clusters_give_equal_answers_in_every_replica(cluster: FaultyCluster) -> None:
    for number in range(5):
        cluster.create_node(f"n{number}", topology=TWO if number % 2 else EIGHT)
    cluster.put_ledger("n2", Ledger().after(LedgerChange()))
    async with replica(cluster) as one, replica(cluster) as other:
        for number in range(12):
            pod = asking_pod(cluster, f"vm-{number}", 1 + number % 5)
            assert await one.filter(pod) == await other.filter(pod)


async def test_a_topology_as_the_agent_writes_it_is_the_machine_of_the_node(cluster: FaultyCluster) -> None:
    cluster.create_node("n")
    cluster.put_topology_document("n", topology_document(replace(TWO, reserved=CpuMask(0b11))))
    async with replica(cluster) as one:
        pod = asking_pod(cluster, "vm", 8)
        assert (await one.filter(pod)).names == ["n"]
        assert await one.bind(pod, "n") == ""
        assert set(cpus_of(one.cache.ledger(NodeName("n")).owned)) == {4, 5, 6, 7, 12, 13, 14, 15}


async def _settled(one: Replica) -> None:
    """Wait until the replica has heard of everything so far."""
    marker = asking_pod(one.cluster, f"marker-{one.cluster._next_version()}")
    await one.until(lambda: marker.uid in one.cache.pods.records)
    assert not one.cluster._logs[PODS]._paused
    assert not one.cluster._logs[LEDGERS]._paused


async def test_cpus_that_the_kubelet_holds_are_given_to_no_vm_until_it_frees_them(
    cluster: FaultyCluster,
) -> None:
    cluster.create_node("n")
    cluster.put_topology("n", EIGHT, kubelet_cpus=0b1100)
    async with replica(cluster) as one:
        small, large = asking_pod(cluster, "small", 3), asking_pod(cluster, "large", 5)
        assert (await one.filter(small)).names == ["n"]
        assert await one.bind(small, "n") == ""
        assert list(cpus_of(one.cache.ledger(NodeName("n")).owned)) == [0, 1, 4]
        assert (await one.filter(large)).names == []
        described = one.cache.topologies
        cluster.put_topology("n", EIGHT)
        await one.until(lambda: described.records[NodeName("n")].kubelet_cpus == 0)
        assert (await one.filter(large)).names == ["n"]


async def test_a_pod_without_a_record_is_read_again_for_its_bind(cluster: FaultyCluster) -> None:
    cluster.create_node("a", topology=EIGHT)
    async with replica(cluster) as one:
        pod = asking_pod(cluster, "vm")
        assert (await one.filter(pod)).names == ["a"]
        one.extender.pending._forget(pod.uid)
        assert await one.bind(pod, "a") == ""
