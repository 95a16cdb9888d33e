"""The listeners of `kvplace serve`: who may call what, and when it is ready."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from harness.certificates import Certificates
from harness.waiting import PATIENCE_S
from kvplace.core.errors import Misconfigured
from kvplace.kube.events import EventRecorder
from kvplace.kube.watches import EVERYTHING, NODES, PODS, Kind, Selector, WatchEvent
from kvplace.serve.process import serving
from kvplace.service.connections import Address
from kvplace.service.process import run_until_signal
from tests.kube.faulty_cluster import FaultyCluster
from tests.serve.served import ready, settings_for

FILTER = json.dumps({"Pod": {"metadata": {"name": "p", "uid": "u"}}, "NodeNames": ["n1"]})


async def test_a_caller_with_a_certificate_of_the_client_ca_is_answered(certificates: Certificates) -> None:
    async with (
        serving(settings_for(certificates), FaultyCluster()) as addresses,
        aiohttp.ClientSession() as session,
        session.post(
            f"https://{addresses['extender']}/v1/filter",
            data=FILTER,
            ssl=certificates.as_client(certificates.client),
        ) as answer,
    ):
        assert answer.status == 200
        assert "has no kvplace.io/request" in (await answer.json())["Error"]


@pytest.mark.parametrize("certificate", ["none", "from another CA"])
async def test_without_a_certificate_of_the_client_ca_no_client_reaches_the_extender(
    certificates: Certificates, certificate: str
) -> None:
    pair = None if certificate == "none" else certificates.stranger.issue("intruder")
    async with (
        serving(settings_for(certificates), FaultyCluster()) as addresses,
        aiohttp.ClientSession() as session,
    ):
        with pytest.raises((aiohttp.ClientError, ssl.SSLError, ConnectionError)):
            async with session.post(
                f"https://{addresses['extender']}/v1/bind", data="{}", ssl=certificates.as_client(pair)
            ) as answer:
                await answer.read()


async def test_admission_accepts_the_api_server_without_a_certificate_and_refuses_a_body_of_ten_megabytes(
    certificates: Certificates,
) -> None:
    async with (
        serving(settings_for(certificates), FaultyCluster()) as addresses,
        aiohttp.ClientSession() as session,
        session.post(
            f"https://{addresses['admission']}/admit/pod",
            data=io.BytesIO(b" " * (10 << 20) + b"{}"),
            ssl=certificates.as_client(None),
        ) as answer,
    ):
        assert answer.status == 413


@pytest.mark.parametrize("listener", ["extender", "admission"])
async def test_a_renewed_certificate_is_shown_by_each_listener_without_a_restart(
    certificates: Certificates, listener: str
) -> None:
    client = certificates.as_client(certificates.client)

    async def certificate_shown() -> bytes:
        _, writer = await asyncio.open_connection(
            addresses[listener].host, addresses[listener].port, ssl=client
        )
        shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return shown

    async with serving(settings_for(certificates), FaultyCluster()) as addresses:
        before = await certificate_shown()
        certificates.ours.issue("serve")
        async with asyncio.timeout(PATIENCE_S):
            while await certificate_shown() == before:
                pass


class SlowCluster(FaultyCluster):
    """A cluster whose lists of one kind of object do not come until they are released."""

    def __init__(self, slow: Kind[Any, Any]) -> None:
        super().__init__()
        self.slow = slow
        self.asked = asyncio.Event()
        self.released = asyncio.Event()

    async def watch(
        self, kind: Kind[Any, Any], selector: Selector = EVERYTHING
    ) -> AsyncIterator[WatchEvent[Any]]:
        if kind is self.slow:
            self.asked.set()
            await self.released.wait()
        async for event in super().watch(kind, selector):
            yield event


@pytest.mark.parametrize("slow", [NODES, PODS])
async def test_it_is_ready_only_between_the_synced_caches_and_its_end(
    certificates: Certificates,
    slow: Kind[Any, Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level("INFO")
    cluster = SlowCluster(slow)
    at_the_end: list[tuple[int, str]] = []

    async def ask_at_the_end(_: EventRecorder) -> None:
        at_the_end.append(await ready(session, health))

    monkeypatch.setattr(EventRecorder, "finish", ask_at_the_end)
    async with contextlib.AsyncExitStack() as stack, aiohttp.ClientSession() as session:
        entering = asyncio.create_task(
            stack.enter_async_context(serving(settings_for(certificates), cluster))
        )
        await cluster.asked.wait()
        found = re.search(r"health is on (\S+)", caplog.text)
        assert found is not None
        health = found[1]
        assert await ready(session, health) == (503, "the cluster has not been read completely yet\n")
        assert not entering.done()
        cluster.released.set()
        assert str((await entering)["health"]) == health
        assert await ready(session, health) == (200, "ok\n")
        async with session.get(f"http://{health}/metrics") as answer:
            assert "kvplace_extender_filter_seconds_count" in await answer.text()
        await stack.aclose()
    assert at_the_end == [(503, "stopping\n")]


@pytest.mark.parametrize("listener", ["extender", "admission", "health"])
def test_a_port_that_is_in_use_ends_the_process_with_one_sentence(
    certificates: Certificates, listener: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = Address(*taken.getsockname())
        changed: Any = {f"{listener}_address": address}
        settings = replace(settings_for(certificates), **changed)
        with pytest.raises(Misconfigured, match=f"cannot listen on {address}"):
            run_until_signal(serving(settings, FaultyCluster()))
