"""The contents of the pages: nodes, VMs, search and events, over HTTP as a browser asks for them."""

from __future__ import annotations

import asyncio
import gzip
import json
from dataclasses import replace

import pytest

from harness.waiting import PATIENCE_S
from kvplace.core.claim_changes import reserve
from kvplace.core.cpuset import cpus_of, format_cpu_list
from kvplace.core.request_json import PodRequest, write_request
from kvplace.core.scalars import NO_CPUS, NodeName
from kvplace.core.well_known_names import PINNED
from kvplace.kube.memory_cluster import MemoryCluster
from kvplace.kube.object_records import Condition, TopologyRecord
from kvplace.kube.store import Store
from kvplace.kube.watches import AGENT_PODS, AGENTS
from kvplace.machines.server_types import read_machine
from kvplace.service.process import in_background
from kvplace.web.documents import GONE, Agents
from tests.core.requests import request_with
from tests.kube.example_claims import claim, taking
from tests.nodes.machines import TWO
from tests.web.map_client import visitor
from tests.web.staged_cluster import StagedCluster, cluster_of, mapped


async def test_a_node_is_described_with_its_map_and_its_vms() -> None:
    stage = StagedCluster()
    stage.add_node("worker", TWO)
    vm = await stage.run_vm("worker", 4, name="db")
    assert vm is not None
    async with mapped(stage) as url, visitor(url) as anna:
        status, node = await anna.json("/api/nodes/worker")
        assert status == 200
        assert (node["allocatable"], node["free"], node["enforcement"]) == (16, 12, "nri")
        (found,) = node["vms"]
        assert (found["namespace"], found["name"], found["label"]) == ("shop", "db", "A")
        assert (found["state"], found["cpus"]) == ("Pinned", format_cpu_list(vm.claim.cpus))
        assert len(node["map"]["sockets"]) == 2
        placed = vm.placement.placement
        assert node["map"]["legend"][0]["emulatorCpus"] == format_cpu_list(placed.emulator_cpus) != ""
        assert (await anna.json("/api/nodes/nowhere"))[1] == {"error": "the cluster has no node nowhere"}


async def test_a_vm_for_which_room_is_made_shows_its_reserved_cores() -> None:
    stage = StagedCluster()
    stage.add_node("worker", TWO)
    vm = await stage.run_vm("worker", 4, name="db")
    assert vm is not None
    pod = stage.cluster.create_pod(
        "waits", namespace="shop", request=write_request(PodRequest(request_with(4)))
    )
    ledger = stage.cluster._ledgers.records[NodeName("worker")].ledger
    whole = claim(pod.uid, *cpus_of(vm.claim.cpus), namespace="shop", pod="waits")
    kept = reserve(ledger, whole, but=NO_CPUS, until="2026-01-02T03:05:00Z")
    stage.cluster.put_ledger("worker", ledger.after(taking(kept)))
    async with mapped(stage) as url, visitor(url) as anna:
        _, node = await anna.json("/api/nodes/worker")
        found = next(one for one in node["vms"] if one["name"] == "waits")
        cpus = format_cpu_list(vm.claim.cpus)
        assert found["reserved"] == {"owned": cpus, "stillInUse": cpus, "until": "2026-01-02T03:05:00Z"}
        assert found["sentence"].startswith("other VMs make room for it")
        _, document = await anna.json("/api/vms/shop/waits")
        (page,) = document["pods"]
        assert (page["state"], page["node"], page["reservedOn"]) == ("Waiting", "", "worker")
        assert page["claim"]["reserved"] == found["reserved"]
        assert (page["map"]["name"], page["seat"]["cpus"]) == ("worker", 4)


async def test_a_vm_is_described_by_its_seat_its_measured_threads_and_its_neighbours() -> None:
    stage = StagedCluster()
    stage.add_node("worker", TWO)
    vm = await stage.run_vm("worker", 2, name="db")
    await stage.run_vm("worker", 2, name="cache", namespace="other")
    assert vm is not None
    elsewhere = TWO.packages[1].cpus
    await stage.report("worker", {vm.uid: elsewhere}, sentence="vCPU 0 may run on CPU 4-7")
    async with mapped(stage) as url, visitor(url) as anna:
        status, document = await anna.json("/api/vms/shop/db")
        assert status == 200
        (pod,) = document["pods"]
        assert (document["kind"], pod["node"], pod["phase"]) == ("VM", "worker", "Running")
        assert (pod["state"], pod["sentence"]) == ("NotPinned", "vCPU 0 may run on CPU 4-7")
        assert pod["measured"]["cpus"] == "4-7,12-15"
        assert pod["seat"] == {
            "sockets": [0], "numaNodes": [0], "l3Groups": [0], "cores": 1, "wholeCores": 1, "cpus": 2,
        }  # fmt: skip
        assert pod["placement"]["vcpus"] == list(vm.placement.placement.vcpus)
        assert [(one["name"], one["nearness"]) for one in pod["neighbours"]] == [
            ("cache", "the same L3 cache")
        ]
        assert {fault["kind"] for fault in pod["map"]["faults"]} == {"drift"}
        status, missing = await anna.json("/api/vms/shop/nobody")
        assert (status, missing["error"]) == (404, "no running VM or pod shop/nobody requests cores")


async def test_qemus_own_threads_in_the_shared_pool_are_not_drift() -> None:
    stage = StagedCluster()
    stage.add_node("worker", read_machine("2x-epyc-9354-nps2"))
    vm = await stage.run_vm("worker", 2, name="db")
    assert vm is not None
    pool = vm.placement.placement.emulator_cpus
    assert pool & ~vm.claim.cpus, "QEMU's threads share this VM's CPUs: the test shows nothing"
    await stage.report("worker", {vm.uid: vm.claim.cpus | pool}, sentence="a cpuset is wider")
    async with mapped(stage) as url, visitor(url) as anna:
        _, node = await anna.json("/api/nodes/worker")
        assert node["map"]["faults"] == []
        assert node["vms"][0]["state"] == "NotPinned"


async def test_a_vm_that_waits_is_described_without_a_node() -> None:
    stage = StagedCluster()
    stage.cluster.create_pod("virt-launcher-web", request='{"version":1,"vcpus":2}', vmi="web")
    why = "0/3 nodes are available: 3 no NUMA node with 2 free CPUs."
    stage.cluster.change_pod("default", "virt-launcher-web", was_tried=True, unschedulable=why)
    async with mapped(stage) as url, visitor(url) as anna:
        _, document = await anna.json("/api/vms/default/web")
        (pod,) = document["pods"]
        assert (pod["state"], pod["node"], "map" in pod) == ("Waiting", "", False)
        assert pod["sentence"] == why
        _, cluster = await anna.json("/api/cluster")
        assert cluster["totals"]["firstWaiting"] == [["default", "web"]]


@pytest.mark.parametrize(
    ("query", "nodes", "vms"),
    [
        ("worker-1", ["worker-1"], []),
        ("WORKER", ["worker-0", "worker-1"], []),
        ("shop db", [], ["db-1", "db-2"]),
        ("db-2", [], ["db-2"]),
        ("", [], []),
        ("   ", [], []),
        ("<nothing>", [], []),
    ],
)
async def test_search_finds_nodes_and_vms_by_all_words(query: str, nodes: list[str], vms: list[str]) -> None:
    stage = StagedCluster()
    for name in ("worker-0", "worker-1"):
        stage.add_node(name, TWO)
    for name in ("db-1", "db-2"):
        await stage.run_vm("worker-0", 2, name=name)
    async with mapped(stage) as url, visitor(url) as anna:
        status, body, _ = await anna.ask("/api/search", params={"q": query})
        found = json.loads(body)
        assert (status, found["more"]) == (200, False)
        assert (found["nodes"], [vm["name"] for vm in found["vms"]]) == (nodes, vms)
        status, _, _ = await anna.ask("/api/search", params={"q": "x" * 257})
        assert status == 400


async def test_large_answers_are_compressed_for_who_takes_that() -> None:
    stage = await cluster_of(read_machine("2x-epyc-9354-nps2"), 1)
    async with mapped(stage) as url, visitor(url) as anna:
        _, plain, headers = await anna.ask("/api/nodes/worker-0", headers={"Accept-Encoding": "identity"})
        assert "Content-Encoding" not in headers
        _, zipped, headers = await anna.ask(
            "/api/nodes/worker-0", headers={"Accept-Encoding": "gzip"}, auto_decompress=False
        )
        assert headers["Content-Encoding"] == "gzip"
        assert json.loads(gzip.decompress(zipped)) == json.loads(plain)
        assert len(zipped) < len(plain) / 4


async def test_a_file_that_a_browser_has_is_not_sent_again() -> None:
    async with mapped(StagedCluster()) as url, visitor(url) as anybody:
        _, body, headers = await anybody.ask("/files/app.js")
        assert body
        assert headers["Content-Type"].startswith("text/javascript")
        status, body, _ = await anybody.ask("/files/app.js", headers={"If-None-Match": headers["ETag"]})
        assert (status, body) == (304, b"")


async def test_events_carry_the_changes_and_resume_where_a_reader_was() -> None:
    stage = await cluster_of(TWO, 3)
    async with mapped(stage) as url, visitor(url) as anna:
        _, cluster = await anna.json("/api/cluster")
        async with asyncio.timeout(PATIENCE_S):
            async with anna.events(cluster["position"]) as events:
                await stage.report("worker-1")
                event, position, document = await anext(events)
                assert event == "changes"
                assert [row["name"] for row in document["nodes"]] == ["worker-1"]
                assert document["totals"]["nodes"] == 3
            await stage.report("worker-2")
            async with anna.events("of-no-use-1", **{"Last-Event-ID": position}) as events:
                event, _, document = await anext(events)
                assert (event, [row["name"] for row in document["nodes"]]) == ("changes", ["worker-2"])
            async with anna.events("another-replica-7") as events:
                assert [event async for event, _, _ in events] == ["reload"]


async def test_no_more_pages_follow_than_are_allowed() -> None:
    async with (
        mapped(StagedCluster(), streams=1) as url,
        visitor(url) as anna,
    ):
        _, cluster = await anna.json("/api/cluster")
        async with anna.events(cluster["position"]):
            status, answer = await anna.json(f"/api/events?since={cluster['position']}")
            assert (status, "1 pages follow" in answer["error"]) == (503, True)


async def test_a_reader_who_disconnects_gives_his_place_back_and_leaves_nothing_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Nothing is sent to a reader for an hour: a place is given back because its reader hung up.
    async with mapped(StagedCluster(), streams=1, heartbeat_s=3600.0) as url:
        for _ in range(3):
            async with visitor(url) as anna, asyncio.timeout(PATIENCE_S):
                _, cluster = await anna.json("/api/cluster")
                path = f"/api/events?since={cluster['position']}"
                while True:
                    async with anna.http.get(anna.url + path) as answer:
                        if answer.status == 200:
                            await answer.content.readline()
                            break
                    await asyncio.sleep(0.01)
    assert [record for record in caplog.records if record.levelname in ("ERROR", "WARNING")] == []


async def test_states_of_kubevirt_are_those_of_the_command_line() -> None:
    stage = StagedCluster()
    stage.add_node("worker", TWO)
    vm = await stage.run_vm("worker", 2, name="db")
    assert vm is not None
    record = await stage.cluster.read_pod("shop", "virt-launcher-db")
    assert record is not None
    await stage.cluster.set_pod_condition(record, Condition(PINNED, None, "NotMeasured", ""))
    why = "quota exceeded"
    stage.cluster.put_vmi(
        "shop",
        "new",
        {
            "metadata": {"annotations": {"cpu-set": "any"}},
            "status": {"conditions": [{"type": "Synchronized", "status": "False", "message": why}]},
        },
    )
    stage.cluster.put_vmi("shop", "other", {"metadata": {}})
    async with mapped(stage) as url, visitor(url) as anna:

        async def state() -> str:
            _, node = await anna.json("/api/nodes/worker")
            _, document = await anna.json("/api/vms/shop/db")
            assert node["vms"][0]["state"] == document["pods"][0]["state"]
            return str(node["vms"][0]["state"])

        assert await state() == "Running"
        stage.cluster.put_vmi("shop", "db", {"metadata": {}, "status": {"phase": "Scheduled"}})
        assert await state() == "Starting"
        stage.cluster.put_vmi("shop", "db", {"metadata": {}, "status": {"phase": "Running"}})
        assert await state() == "Running"
        _, new = await anna.json("/api/vms/shop/new")
        assert (new["pods"], new["state"], new["sentence"]) == ([], "NotCreated", why)
        status, _ = await anna.json("/api/vms/shop/other")
        assert status == 404


NODE = NodeName("worker")
WELL = TopologyRecord(NODE, TWO, by_agent=True, generation=3, observed_generation=3)
NOT_READY = Condition("Ready", False, "NoCpusets", "no cgroup hierarchy is mounted")


async def trouble(described: TopologyRecord | None, *, pods: list[str]) -> str:
    cluster, store = MemoryCluster(), Store(AGENT_PODS, AGENTS)
    agents = Agents(store)
    for node in pods:
        cluster.put_agent_pod(node)
    async with in_background(store.run(cluster)):
        await agents.announce([])
        return agents.trouble(NODE, described)


@pytest.mark.parametrize(
    ("described", "said"),
    [
        (None, ""),
        (WELL, ""),
        (
            replace(WELL, conditions=(NOT_READY,)),
            "its agent reports NoCpusets: no cgroup hierarchy is mounted",
        ),
        (replace(WELL, generation=4), "its agent has not read the newest description yet"),
        (replace(WELL, by_agent=False, observed_generation=None), ""),
    ],
)
async def test_an_agent_that_runs_is_believed(described: TopologyRecord | None, said: str) -> None:
    assert await trouble(described, pods=["worker"]) == said


@pytest.mark.parametrize(
    ("described", "said"),
    [
        (None, ""),
        (WELL, GONE),
        (replace(WELL, by_agent=False), GONE),
        (replace(WELL, by_agent=False, observed_generation=None), ""),
    ],
    ids=["nothing is described", "by the agent", "by hand, beside an agent", "by hand"],
)
async def test_an_agent_without_a_pod_on_its_node_is_gone(
    described: TopologyRecord | None, said: str
) -> None:
    assert await trouble(described, pods=["another"]) == said


def test_no_client_is_called_gone_before_the_pods_are_known() -> None:
    assert Agents(Store(AGENT_PODS, AGENTS)).trouble(NODE, WELL) == ""
