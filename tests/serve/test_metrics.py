"""`/metrics` of `serve` describes the cluster at the moment of the scrape."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import aiohttp
import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from harness.certificates import Certificates
from harness.waiting import PATIENCE_S
from kvplace.core import search_budget
from kvplace.core.free_resources import BLOCK_LEVELS
from kvplace.core.ledger import Ledger
from kvplace.core.node_topology import Enforcement
from kvplace.core.request import Request
from kvplace.core.request_json import PodRequest, write_request
from kvplace.core.scalars import NodeName
from kvplace.core.well_known_names import PLACED_LABEL, REQUEST
from kvplace.kube.store import Store
from kvplace.nodes.node_cache import ClusterFreeBlocks
from kvplace.serve.metrics import ClusterGauges
from kvplace.serve.process import serving
from kvplace.service.connections import Address
from tests.controller.replicas import asking_pod, replica
from tests.event_loop_turns import with_turns
from tests.kube.example_claims import claim, taking
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import EIGHT, TWO
from tests.serve.served import settings_for

Sample = tuple[str, tuple[tuple[str, str], ...]]


async def scraped(address: Address) -> dict[Sample, float]:
    """Read the metrics as Prometheus does."""
    async with aiohttp.ClientSession() as session, session.get(f"http://{address}/metrics") as answer:
        assert answer.status == 200
        text = await answer.text()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


NAMING = {
    f"kvplace_{name}"
    for name in (
        "cluster_unusable_node",
        "cluster_enforced_node",
        "cluster_overlapping_pod",
        "cluster_oldest_waiting_pod_seconds",
        "ledger_oldest_unbound_claim_seconds",
    )
}
"""The metrics whose labels name nodes and pods."""


def series(samples: dict[Sample, float], name: str) -> tuple[tuple[str, str], ...]:
    """Return the labels of the only series of a metric."""
    (labels,) = (labels for found, labels in samples if found == f"kvplace_{name}")
    return labels


def gauge(samples: dict[Sample, float], name: str, **labels: str) -> float:
    return samples[f"kvplace_{name}", tuple(sorted(labels.items()))]


async def test_a_bind_is_seen_in_free_blocks_claims_ledger_writes_and_placement_time(
    certificates: Certificates,
) -> None:
    cluster = FaultyCluster()
    cluster.create_node("a", topology=TWO)
    cluster.create_node("without-description")
    waiting = asking_pod(cluster, "waiting", 16)
    pod = asking_pod(cluster, "vm", 4)
    async with (
        serving(settings_for(certificates), cluster) as addresses,
        aiohttp.ClientSession() as session,
    ):
        before = await scraped(addresses["health"])
        assert gauge(before, "cluster_nodes", state="usable") == 1
        assert gauge(before, "cluster_nodes", state="unusable") == 1
        assert gauge(before, "cluster_unusable_node", node="without-description") == 1
        assert gauge(before, "process_ready", process="serve") == 1
        assert gauge(before, "cluster_pods", state="waiting") == 2
        assert gauge(before, "cluster_free_cpus") == 16
        assert gauge(before, "cluster_nodes_with_free_block", scope="numa", cpus="8") == 1

        async def ask(verb: str, body: Any) -> Any:
            async with session.post(
                f"https://{addresses['extender']}/v1/{verb}",
                data=json.dumps(body),
                ssl=certificates.as_client(certificates.client),
            ) as answer:
                return await answer.json()

        metadata = {
            "name": "vm",
            "namespace": "default",
            "uid": pod.uid,
            "annotations": {REQUEST: pod.request},
            "labels": {PLACED_LABEL: "true"},
        }
        await ask("filter", {"Pod": {"metadata": metadata, "spec": {}}, "NodeNames": ["a"]})
        held = await scraped(addresses["health"])
        assert gauge(held, "extender_holds") == 1
        assert gauge(held, "cluster_free_cpus") == 16
        binding = {"PodName": "vm", "PodNamespace": "default", "PodUID": pod.uid, "Node": "a"}
        assert await ask("bind", binding) == {"Error": ""}
        after = await scraped(addresses["health"])
    assert gauge(after, "extender_holds") == 0
    assert gauge(after, "cluster_claims") == 1
    assert gauge(after, "cluster_free_cpus") == 12
    assert gauge(after, "cluster_pods", state="bound") == 1
    assert gauge(after, "cluster_largest_free_block_cpus", scope="numa") == 8
    assert (
        gauge(after, "process_certificate_end_timestamp_seconds", use="server")
        > datetime.now(UTC).timestamp()
    )
    for counted in ("extender_placement_seconds_count", "ledger_write_seconds_count", "ledger_changes_total"):
        assert gauge(after, counted) == gauge(before, counted) + 1
    told = {value for name, labels in after if name not in NAMING for _, value in labels}
    assert not told & {"vm", "default", "default/vm", pod.uid, waiting.uid, "a", "without-description"}
    assert dict(series(after, "cluster_oldest_waiting_pod_seconds"))["vm"] == "waiting"
    assert waiting.uid in {one.uid for one in cluster._pods.records.values()}


async def test_the_oldest_claim_without_a_bound_pod_has_its_age(certificates: Certificates) -> None:
    cluster = FaultyCluster()
    cluster.create_node("a", topology=EIGHT)
    pod = asking_pod(cluster, "vm")
    since = (datetime.now(UTC) - timedelta(seconds=30)).isoformat(timespec="seconds").replace("+00:00", "Z")
    empty = await cluster.create_ledger(NodeName("a"))
    await cluster.write_ledger(empty, taking(claim(pod.uid, 0, 1, pod="vm", since=since)))
    async with serving(settings_for(certificates), cluster) as addresses:
        found = await scraped(addresses["health"])
    name = "ledger_oldest_unbound_claim_seconds"
    assert 30 <= gauge(found, name, node="a", vm_namespace="default", vm="vm") < 90


async def test_the_oldest_pod_that_waits_has_its_age_and_a_bound_one_does_not_count(
    certificates: Certificates,
) -> None:
    cluster = FaultyCluster()
    cluster.create_node("a", topology=EIGHT)
    for name, minutes, node in (("new", 1, ""), ("old", 40, ""), ("bound", 90, "a")):
        created = (datetime.now(UTC) - timedelta(minutes=minutes)).isoformat(timespec="seconds")
        request = write_request(PodRequest(Request(2)))
        cluster.create_pod(name, request=request, node=node, created=created.replace("+00:00", "Z"))
    async with serving(settings_for(certificates), cluster) as addresses:
        found = await scraped(addresses["health"])
    assert 2400 <= gauge(found, "cluster_oldest_waiting_pod_seconds", vm_namespace="default", vm="old") < 2460


async def test_a_pod_on_cpus_that_the_kubelet_has_allocated_is_named_until_it_has_ended() -> None:
    cluster = FaultyCluster()
    cluster.create_node("a", topology=EIGHT)
    labels = {"node": "a", "vm_namespace": "default", "vm": "vm"}

    def named() -> float | None:
        return REGISTRY.get_sample_value("kvplace_cluster_overlapping_pod", labels)

    async with replica(cluster, controller=False) as one:
        gauges = ClusterGauges(
            one.cache, ClusterFreeBlocks(one.cache), one.extender, one.controller, one.events
        )
        assert await one.bind(asking_pod(cluster, "vm", 8), "a") == ""
        await gauges.refresh()
        assert named() is None
        cluster.put_topology("a", EIGHT, kubelet_cpus=EIGHT.cpus)
        await one.until(lambda: one.cache.topologies.records[NodeName("a")].kubelet_cpus == EIGHT.cpus)
        await one.controller.reconciler.reconcile(NodeName("a"))
        await gauges.refresh()
        assert named() == 1
        cluster.delete_pod("default", "vm", force=True)
        await one.until(lambda: not one.cache.pods.records)
        await gauges.refresh()
        assert named() is None


async def test_nodes_on_which_an_agent_enforces_are_named_while_they_are_there(
    certificates: Certificates,
) -> None:
    cluster = FaultyCluster()
    for node, how in (("a", Enforcement.NRI), ("b", Enforcement.CGROUP), ("c", Enforcement.NONE)):
        cluster.create_node(node, topology=TWO)
        cluster.put_topology(node, TWO, enforcement=how)
    cluster.put_topology("gone", TWO, enforcement=Enforcement.NRI)
    async with serving(settings_for(certificates), cluster) as addresses:
        found = await scraped(addresses["health"])
    named = {labels for name, labels in found if name == "kvplace_cluster_enforced_node"}
    assert named == {(("node", "a"),), (("node", "b"),)}


async def test_free_cpus_that_lie_apart_are_small_free_blocks_and_fragmentation(
    certificates: Certificates,
) -> None:
    cluster = FaultyCluster()
    cluster.create_node("a", topology=TWO)
    pod = asking_pod(cluster, "vm")
    async with serving(settings_for(certificates), cluster) as addresses:
        whole = await scraped(addresses["health"])
        empty = await cluster.create_ledger(NodeName("a"))
        one_thread_of_each_core = claim(pod.uid, *range(8), pod="vm")
        await cluster.write_ledger(empty, taking(one_thread_of_each_core))
        async with asyncio.timeout(PATIENCE_S):
            while gauge(apart := await scraped(addresses["health"]), "cluster_claims") == 0:
                pass
    for domain in BLOCK_LEVELS:
        scope = domain.value
        assert gauge(whole, "cluster_fragmentation_ratio", scope=scope) == 0
        assert gauge(whole, "cluster_largest_free_block_cpus", scope=scope) == 8
        assert gauge(whole, "cluster_largest_free_block_cores", scope=scope) == 4
        assert gauge(apart, "cluster_fragmentation_ratio", scope=scope) == 0.5
        assert gauge(apart, "cluster_largest_free_block_cpus", scope=scope) == 4
        assert gauge(apart, "cluster_largest_free_block_cores", scope=scope) == 0


async def test_each_kind_has_the_time_since_its_last_watch_event(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Store, "silent_s", property(lambda store: len(store.kind.name)))
    async with serving(settings_for(certificates), FaultyCluster()) as addresses:
        found = await scraped(addresses["health"])
    for kind in ("pods", "nodes", "nodetopologies", "nodeledgers"):
        assert gauge(found, "watch_age_seconds", kind=kind) == len(kind)


async def test_others_have_their_turn_while_the_claims_of_many_ledgers_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search_budget, "STEPS_OF_A_TURN", 1)
    cluster = FaultyCluster()
    for number in range(50):
        cluster.put_ledger(f"n{number}", Ledger())
    async with replica(cluster, controller=False) as one:
        gauges = ClusterGauges(
            one.cache, ClusterFreeBlocks(one.cache), one.extender, one.controller, one.events
        )
        _, turns = await with_turns(gauges.refresh())
    assert turns >= 49
