"""The parts of the port's real side only: pages, forgotten versions, schemas, the form of requests."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings

from harness.control_plane.cluster import MERGE_PATCH, ControlPlane, RequestRefused
from kvplace.core.free_resources import CpuUsage
from kvplace.core.ledger import Claim, LedgerChange, claim_document
from kvplace.core.node_topology import topology_document
from kvplace.core.request import Policy
from kvplace.core.scalars import NO_CPUS, NodeName, PodUid
from kvplace.core.topology import Topology
from kvplace.kube.api_cluster import ApiCluster
from kvplace.kube.api_errors import ApiUnavailable, Expired, UnusableAnswer
from kvplace.kube.events import EventReason, EventRecord, ObjectReference, floating, pod_reference
from kvplace.kube.object_records import PodRecord, TopologyStatus
from kvplace.kube.session import open_session
from kvplace.kube.watches import (
    LEDGERS,
    NAME_FIELD,
    NODES,
    TOPOLOGIES,
    Init,
    InitApply,
    InitDone,
    Selector,
)
from tests.core.machines import topologies
from tests.kube.api_stub import ApiStub, answer, api_stub, status
from tests.kube.conftest import ledger_json
from tests.kube.example_claims import claim, taking
from tests.kube.ledger_strategies import claims
from tests.kube.worlds import LEDGERS_PATH, MACHINE, TOPOLOGIES_PATH, ApiWorld, api_cluster

Json = dict[str, Any]
AT_THE_SERVER = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
async def stub() -> AsyncIterator[ApiStub]:
    async with api_stub() as running:
        yield running


# On the real API server


async def test_a_list_of_many_pages_comes_whole(api_world: ApiWorld) -> None:
    names = {api_world.named(f"worker-{number}") for number in range(7)}
    for name in names:
        api_world.create_node(name)
    cluster = await api_cluster(api_world.plane, page_size=2)
    listed = []
    async with aclosing(cast(Any, cluster.watch(NODES))) as events:
        async for event in events:
            listed.append(event)
            if isinstance(event, InitDone):
                break
    await cluster.close()
    assert isinstance(listed[0], Init)
    assert len([event for event in listed if isinstance(event, Init)]) == 1
    seen = [event.record.name for event in listed if isinstance(event, InitApply)]
    assert names <= set(seen)
    assert len(seen) == len(set(seen))


async def test_a_version_that_the_server_has_forgotten_is_known_as_such(api_world: ApiWorld) -> None:
    cluster = cast(ApiCluster, api_world.cluster)
    # The server began to serve ledgers long after version 1, so it knows nothing of that time.
    with pytest.raises(Expired):
        async for _ in cluster.list_watch(LEDGERS).changes("1"):
            pass


async def test_kubectl_shows_how_the_cpus_of_a_node_are_used(api_world: ApiWorld) -> None:
    name = api_world.named("worker")
    api_world.create_node(name)
    api_world.put_topology(name, MACHINE)
    cluster = api_world.cluster
    ledger = await cluster.write_ledger(await cluster.create_ledger(name), taking(claim("db", 0, 2)))
    shared = claim("web", 1, policy=Policy.SHARE, owned=NO_CPUS)
    await cluster.write_ledger(ledger, taking(shared))
    (topology,) = await cluster.read_all(TOPOLOGIES, Selector(fields={NAME_FIELD: name}))
    version = topology.resource_version
    for usage in (CpuUsage(4, 2, 1, 1, 1, 2), CpuUsage(4, 1, 2, 0, 0, 2)):
        version = await cluster.write_topology_status(name, TopologyStatus(usage=usage), version)

    def columns(resource: str) -> list[list[str]]:
        return [line.split() for line in api_world.plane.kubectl("get", resource, name).splitlines()]

    head, row = columns("nodeledgers")
    assert (head, row[:4]) == (["NAME", "PODS", "OWNED", "SHARED", "AGE"], [name, "2", "2", "1"])
    head, row = columns("nodetopologies")
    assert head[:7] == ["NAME", "CPUS", "OWNED", "SHARED", "FREE", "LARGEST-NUMA", "PODS"]
    assert row[:7] == [name, "4", "1", "2", "0", "0", "2"]


async def test_a_long_note_is_cut_to_the_limit_of_the_server(api_world: ApiWorld) -> None:
    about = pod_reference(api_world.namespace, "vm", api_world.create_pod("vm"))
    await api_world.cluster.record_event(
        EventRecord(about, EventReason.DOES_NOT_FIT, "kein Platz für " + "ü" * 2000)
    )
    (stored,) = api_world.events(EventReason.DOES_NOT_FIT)
    assert 1020 <= len(stored.note.encode()) <= 1024
    assert set(stored.note[15:]) == {"ü"}


async def test_events_about_long_names_and_about_nodes_are_stored(api_world: ApiWorld) -> None:
    name = "a" * 199 + ".b" + "c" * 40
    await api_world.cluster.record_event(floating(pod_reference(api_world.namespace, name, PodUid("u"))))
    assert [event.regarding.name for event in api_world.events(EventReason.FLOATING)] == [name]
    node = api_world.named("worker")
    await api_world.cluster.record_event(
        EventRecord(ObjectReference("Node", "", node, node), EventReason.CORES_OVERLAP, "two pods")
    )
    everywhere = api_world.plane.request("GET", "/apis/events.k8s.io/v1/namespaces/default/events")["items"]
    assert [item["note"] for item in everywhere if item["regarding"]["name"] == node] == ["two pods"]


@AT_THE_SERVER
@given(topology=topologies())
def test_the_schema_takes_every_machine(ledger_server: ControlPlane, topology: Topology) -> None:
    document = {
        "apiVersion": "kvplace.io/v1alpha1",
        "kind": "NodeTopology",
        "metadata": {"name": "machine"},
        "spec": topology_document(topology),
    }
    path = f"{TOPOLOGIES_PATH}?dryRun=All&fieldValidation=Strict"
    stored = ledger_server.request("POST", path, document)
    assert stored["spec"] == document["spec"]


@AT_THE_SERVER
@given(claim=claims())
def test_the_schema_takes_every_claim(ledger_server: ControlPlane, claim: Claim) -> None:
    document = ledger_json("any", {"owners": {}, "claims": {claim.uid: claim_document(claim)}})
    stored = ledger_server.request("POST", f"{LEDGERS_PATH}?dryRun=All&fieldValidation=Strict", document)
    assert stored["spec"] == document["spec"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cores", []),
        ("cores", [""]),
        ("cores", ["0-"]),
        ("packages", [{"id": -1, "cpus": "0"}]),
        ("packages", [{"cpus": "0"}]),
        ("numaNodes", [{"id": 0, "cpus": "0", "memory": "much"}]),
        ("numaNodes", [{"id": 0, "cpus": "0", "distances": {"0": "far"}}]),
        ("reserved", "all"),
    ],
)
def test_the_schema_takes_no_machine_that_makes_no_sense(
    ledger_server: ControlPlane, field: str, value: object
) -> None:
    document = {
        "apiVersion": "kvplace.io/v1alpha1",
        "kind": "NodeTopology",
        "metadata": {"name": "machine"},
        "spec": {**MACHINE, field: value},
    }
    with pytest.raises(RequestRefused) as refused:
        ledger_server.request("POST", f"{TOPOLOGIES_PATH}?dryRun=All", document)
    assert refused.value.status == 422


async def test_the_api_server_does_not_track_the_fields_of_a_written_ledger(api_world: ApiWorld) -> None:
    record = await api_world.cluster.create_ledger(api_world.named("worker"))
    for change in (taking(claim("pod-a", 1, 2)), LedgerChange(releases=(PodUid("pod-a"),))):
        record = await api_world.cluster.write_ledger(record, change)
        stored = api_world.plane.request("GET", f"{LEDGERS_PATH}/{record.node}")
        assert "managedFields" not in stored["metadata"]


def test_the_reports_of_an_agent_are_kept_apart_from_the_machine(ledger_server: ControlPlane) -> None:
    name = f"worker-{secrets.token_hex(4)}"
    status = {
        "kubeletCpus": "2-3",
        "pods": [{"uid": "u", "pod": "p", "pinned": False, "cpus": "1", "drift": "CPU 2 instead of 1"}],
    }
    document = {
        "apiVersion": "kvplace.io/v1alpha1",
        "kind": "NodeTopology",
        "metadata": {"name": name},
        "spec": MACHINE,
        "status": status,
    }
    made = ledger_server.request("POST", TOPOLOGIES_PATH, document)
    assert "status" not in made
    path = f"{TOPOLOGIES_PATH}/{name}"
    seen = ledger_server.request("PATCH", f"{path}/status", {"status": status}, content_type=MERGE_PATCH)
    assert (seen["status"], seen["metadata"]["generation"]) == (status, made["metadata"]["generation"])
    shown = ledger_server.kubectl("get", "nodetopology", name, "-o", "wide")
    assert "sha256:0" in shown
    assert "2-3" in shown
    ledger_server.request("DELETE", path)


# Over the wire


async def test_a_bind_is_one_request_with_everything_in_it(stub: ApiStub, tmp_path: Path) -> None:
    stub.script = [answer({"kind": "Status", "status": "Success"})]
    async with await open_session(stub.kubeconfig(tmp_path, token="t")) as session:
        await ApiCluster(session).bind("space", "vm", PodUid("uid-1"), NodeName("worker"), {"cpu-map": "{}"})
    assert len(stub.asked) == 1
    assert (stub.asked[0].method, stub.asked[0].path) == ("POST", "/api/v1/namespaces/space/pods/vm/binding")
    assert json.loads(stub.bodies[0]) == {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": "vm", "namespace": "space", "uid": "uid-1", "annotations": {"cpu-map": "{}"}},
        "target": {"apiVersion": "v1", "kind": "Node", "name": "worker"},
    }


async def test_a_bind_that_is_turned_away_is_not_sent_later_than_its_caller_knows(
    stub: ApiStub, tmp_path: Path
) -> None:
    """After the pause that the server asks for, the claim behind it may belong to another client."""
    stub.script = [status(429, retry_after=0), answer({"kind": "Status", "status": "Success"})]
    async with await open_session(stub.kubeconfig(tmp_path, token="t")) as session:
        with pytest.raises(ApiUnavailable) as turned_away:
            await ApiCluster(session).bind("space", "vm", PodUid("uid-1"), NodeName("worker"), {})
    assert turned_away.value.untouched
    assert len(stub.asked) == 1


async def test_an_annotation_of_a_vm_is_written_to_its_vmi_and_that_of_a_plain_pod_to_the_pod(
    stub: ApiStub, tmp_path: Path
) -> None:
    plain = PodRecord("space", "pod-1", PodUid("uid-1"))
    of_vm = replace(plain, vmi="web", vmi_uid="uid-2")
    stub.script = [answer({}), answer({})]
    async with await open_session(stub.kubeconfig(tmp_path, token="t")) as session:
        await ApiCluster(session, component="defragment").annotate_vm(of_vm, "key", "value")
        await ApiCluster(session, component="defragment").annotate_vm(plain, "key", None)
    assert [(one.method, one.path) for one in stub.asked] == [
        ("PATCH", "/apis/kubevirt.io/v1/namespaces/space/virtualmachineinstances/web"),
        ("PATCH", "/api/v1/namespaces/space/pods/pod-1"),
    ]
    assert [json.loads(body)["metadata"] for body in stub.bodies] == [
        {"uid": "uid-2", "annotations": {"key": "value"}},
        {"uid": "uid-1", "annotations": {"key": None}},
    ]


async def test_a_vmi_is_given_as_it_is(stub: ApiStub, tmp_path: Path) -> None:
    vmi = {"metadata": {"name": "vm"}, "spec": {"domain": {"cpu": {"cores": 4}}, "unknown": [1, None, "x"]}}
    stub.script = [answer(vmi)]
    async with await open_session(stub.kubeconfig(tmp_path, token="t")) as session:
        assert await ApiCluster(session).read_vmi("space", "vm") == vmi
    path = "/apis/kubevirt.io/v1/namespaces/space/virtualmachineinstances/vm"
    assert stub.asked[0].path == path


@pytest.mark.parametrize("junk", [[], 7, "text", {"metadata": 3}, {"metadata": {"name": 1}}])
async def test_an_answer_of_another_form_is_unavailable_not_a_traceback(
    stub: ApiStub, tmp_path: Path, junk: object
) -> None:
    stub.script = [answer(junk)]
    async with await open_session(stub.kubeconfig(tmp_path, token="t")) as session:
        with pytest.raises(UnusableAnswer, match="nodeledgers"):
            await ApiCluster(session).read_ledger(NodeName("worker"))


async def test_an_answer_nested_without_end_is_unavailable_too(stub: ApiStub, tmp_path: Path) -> None:
    async def nested(_: web.Request) -> web.StreamResponse:
        return web.Response(body=b'{"spec":' + b"[" * 50_000 + b"]" * 50_000 + b"}")

    stub.script = [nested]
    async with await open_session(stub.kubeconfig(tmp_path, token="t")) as session:
        with pytest.raises(UnusableAnswer):
            await ApiCluster(session).read_vmi("space", "vm")


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("kvplace.kube.memory_cluster", ["kubernetes", "aiohttp", "msgspec", "tenacity"]),
        ("kvplace.kube.store", ["kubernetes", "aiohttp", "msgspec", "tenacity"]),
        ("kvplace.kube.api_cluster", ["kubernetes"]),
    ],
)
def test_a_module_imports_no_client_that_it_does_not_use(module: str, absent: list[str]) -> None:
    program = f"import sys, {module}; print([name for name in {absent} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
