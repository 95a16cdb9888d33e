"""The extender's verbs over plain HTTP/1.1: what kube-scheduler sends, and what it never should."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvplace.core.well_known_names import PLACED_LABEL, REQUEST
from kvplace.kube.object_records import PodRecord
from kvplace.scheduler.http import Routes, extender_application
from kvplace.scheduler.metrics import REJECTED_CALLS
from tests.controller.replicas import Replica, asking_pod, replica
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import EIGHT


@pytest.fixture
async def one() -> AsyncIterator[Replica]:
    """A replica on a cluster of two nodes of eight CPUs."""
    cluster = FaultyCluster()
    for name in ("a", "b"):
        cluster.create_node(name, topology=EIGHT)
    async with replica(cluster, controller=False) as made:
        yield made


@pytest.fixture
async def url(one: Replica) -> AsyncIterator[str]:
    """Where its routes are served."""
    runner = web.AppRunner(extender_application(Routes(one.extender)))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    yield f"http://{host}:{port}"
    await runner.cleanup()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as made:
        yield made


def about(pod: PodRecord, **others: Any) -> dict[str, Any]:
    metadata = {
        "name": pod.name,
        "namespace": pod.namespace,
        "uid": pod.uid,
        "annotations": {REQUEST: pod.request},
        "labels": {PLACED_LABEL: "true"},
    }
    return {"Pod": {"metadata": metadata, "spec": {"containers": []}}, **others}


async def test_a_pod_goes_through_all_three_verbs(
    one: Replica, url: str, session: aiohttp.ClientSession
) -> None:
    pod = asking_pod(one.cluster, "vm", 3)
    args = about(pod, Nodes=None, NodeNames=["a", "b"])
    async with session.post(f"{url}/v1/filter", json=args) as answer:
        assert (answer.status, answer.content_type) == (200, "application/json")
        assert await answer.json() == {
            "NodeNames": ["a"],
            "Nodes": None,
            "FailedAndUnresolvableNodes": {},
            "Error": "",
        }
    async with session.post(f"{url}/v1/prioritize", json=args) as answer:
        assert await answer.json() == [{"Host": "a", "Score": 10}, {"Host": "b", "Score": 0}]
    binding = {"PodName": "vm", "PodNamespace": "default", "PodUID": pod.uid, "Node": "a"}
    for _ in range(2):
        async with session.post(f"{url}/v1/bind", json=binding) as answer:
            assert (answer.status, await answer.json()) == (200, {"Error": ""})
    async with session.post(f"{url}/v1/bind", json=binding | {"Node": "b"}) as answer:
        assert answer.status == 200
        assert "already bound to a" in (await answer.json())["Error"]


async def test_keys_in_lower_case_are_answered_alike(
    one: Replica, url: str, session: aiohttp.ClientSession
) -> None:
    pod = asking_pod(one.cluster, "vm")
    lower = {key.lower(): value for key, value in about(pod, NodeNames=["b"]).items()}
    async with session.post(f"{url}/v1/filter", json=lower) as answer:
        assert (await answer.json())["NodeNames"] == ["b"]


@pytest.mark.parametrize("verb", ["filter", "prioritize", "bind"])
@pytest.mark.parametrize(
    "body", [b"", b"null", b"[]", b"{", b"\xff", b"{}", b'{"Pod":null,"NodeNames":null}']
)
async def test_junk_gets_400_and_one_sentence(
    url: str, session: aiohttp.ClientSession, verb: str, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    rejected = REJECTED_CALLS.labels(verb)._value.get()
    async with session.post(f"{url}/v1/{verb}", data=body) as answer:
        text = await answer.text()
        assert answer.status == 400
        assert text.count("\n") == 1
        assert caplog.messages[-1] == f"{verb} refused: {text.rstrip()}"
        assert REJECTED_CALLS.labels(verb)._value.get() == rejected + 1


async def test_an_unexpected_error_gets_500_and_one_sentence(
    one: Replica, url: str, session: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    one.extender.pending._clock = lambda: 1 / 0
    pod = asking_pod(one.cluster, "vm")
    async with session.post(f"{url}/v1/filter", json=about(pod, NodeNames=["a"])) as answer:
        assert (answer.status, await answer.text()) == (500, "filter failed; see the log of kvplace serve\n")
    assert "filter failed" in caplog.messages


async def test_ten_megabytes_get_400_and_the_fix(
    one: Replica, url: str, session: aiohttp.ClientSession
) -> None:
    pod = asking_pod(one.cluster, "vm")
    body = json.dumps(about(pod, NodeNames=["a"], Padding="x" * (10 << 20))).encode()
    async with session.post(f"{url}/v1/filter", data=io.BytesIO(body)) as answer:
        assert answer.status == 400
        assert "larger than 8388608 bytes; set nodeCacheCapable: true" in await answer.text()
    async with session.post(f"{url}/v1/filter", json=about(pod, NodeNames=["a"])) as answer:
        assert answer.status == 200


async def test_preempt_is_answered_with_the_victims_by_node(
    one: Replica, url: str, session: aiohttp.ClientSession
) -> None:
    low = asking_pod(one.cluster, "low", 8)
    assert await one.bind(low, "a") == ""
    await one.until(lambda: bool(one.cache.pods.records[low.uid].node))
    high = about(asking_pod(one.cluster, "high", 8), NodeNameToVictims=None)
    high["Pod"]["spec"]["priority"] = 7
    sent = {"Pods": [{"UID": low.uid}], "NumPDBViolations": 0}
    body = {**high, "NodeNameToMetaVictims": {"a": sent}}
    async with session.post(f"{url}/v1/preempt", json=body) as answer:
        assert answer.status == 200
        assert await answer.json() == {"NodeNameToMetaVictims": {"a": sent}}


async def test_other_paths_and_methods_are_not_there(url: str, session: aiohttp.ClientSession) -> None:
    async with session.post(f"{url}/v1/evict", json={}) as answer:
        assert answer.status == 404
    async with session.get(f"{url}/v1/filter") as answer:
        assert answer.status == 405
