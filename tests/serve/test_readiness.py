"""Readiness and liveness of `serve` while the API server is out of reach, refuses, or the loop is blocked."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from harness.certificates import Certificates
from harness.waiting import PATIENCE_S
from kvplace.core.errors import Forbidden, KvplaceError, Unavailable
from kvplace.kube.watches import (
    EVERYTHING,
    LEDGERS,
    NODES,
    PODS,
    TOPOLOGIES,
    Alive,
    Interrupted,
    Kind,
    Selector,
    WatchEvent,
)
from kvplace.serve.process import ServeReadiness, serving
from kvplace.service.connections import Address
from tests.kube.faulty_cluster import FaultyCluster
from tests.serve.extender_callers import answer, context
from tests.serve.served import ready, settings_for

DECIDES_ON = (PODS, NODES, TOPOLOGIES, LEDGERS)


class CutOffCluster(FaultyCluster):
    """A cluster whose watches fail while the test reports it."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[str, asyncio.Queue[WatchEvent[Any]]] = {}

    async def watch(
        self, kind: Kind[Any, Any], selector: Selector = EVERYTHING
    ) -> AsyncIterator[WatchEvent[Any]]:
        said = self._said.setdefault(kind.name, asyncio.Queue())
        source = super().watch(kind, selector)

        async def pass_on() -> None:
            async for event in source:
                said.put_nowait(event)

        passing = asyncio.create_task(pass_on())
        try:
            while True:
                yield await said.get()
        finally:
            passing.cancel()

    def fail(self, error: KvplaceError, *kinds: Kind[Any, Any]) -> None:
        for kind in kinds:
            self._said[kind.name].put_nowait(Interrupted(error))

    def work_again(self, *kinds: Kind[Any, Any]) -> None:
        for kind in kinds:
            self._said[kind.name].put_nowait(Alive())


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let watches that fail count at once."""
    monkeypatch.setattr(ServeReadiness, "__init__", _impatient_init(ServeReadiness.__init__))


def _impatient_init(init: Any) -> Any:
    def made(self: ServeReadiness, obstacle: str) -> None:
        init(self, obstacle, patience_s=0.001)

    return made


async def until(address: Address, status: int, part: str) -> str:
    """Ask for readiness until it is as expected; returns the sentence."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(PATIENCE_S):
        while True:
            found, sentence = await ready(session, str(address))
            if found == status and part in sentence:
                return sentence
            await asyncio.sleep(0.01)  # readiness is asked for, nothing announces it


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "error",
    [
        Unavailable("list pods: no connection to the API server"),
        Forbidden("watch pods: the API server rejects the credentials"),
    ],
)
async def test_cut_off_from_the_api_server_it_is_not_ready_states_why_and_is_ready_again_by_itself(
    certificates: Certificates, error: KvplaceError
) -> None:
    cluster = CutOffCluster()
    async with serving(settings_for(certificates), cluster) as addresses:
        health = addresses["health"]
        await until(health, 200, "ok")
        cluster.fail(error, *DECIDES_ON)
        sentence = await until(health, 503, str(error))
        assert sentence.startswith("every watch of the API server has failed for ")
        async with aiohttp.ClientSession() as session, session.get(f"http://{health}/healthz") as alive:
            assert alive.status == 200
        cluster.work_again(PODS)
        await until(health, 200, "ok, but the view of nodes, nodetopologies, nodeledgers grows old")
        cluster.work_again(*DECIDES_ON)
        assert await until(health, 200, "ok\n") == "ok\n"


@pytest.mark.usefixtures("impatient")
async def test_one_watch_that_fails_is_reported_and_leaves_it_ready(certificates: Certificates) -> None:
    cluster = CutOffCluster()
    async with serving(settings_for(certificates), cluster) as addresses:
        cluster.fail(Forbidden("the API server denies watch on nodetopologies"), TOPOLOGIES)
        sentence = await until(addresses["health"], 200, "denies watch on nodetopologies")
    assert sentence.startswith("ok, but the view of nodetopologies grows old; watching has failed for ")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("protocol", ["h2", "http/1.1"])
async def test_while_it_is_not_ready_the_schedulers_connection_ends_so_that_it_finds_another_replica(
    certificates: Certificates, protocol: str
) -> None:
    cluster = CutOffCluster()
    async with serving(settings_for(certificates), cluster) as addresses:
        extender = addresses["extender"]
        client = context(certificates, "the scheduler")
        client.set_alpn_protocols([protocol])
        reader, writer = await asyncio.open_connection(extender.host, extender.port, ssl=client)
        if protocol == "http/1.1":
            writer.write(b"POST /v1/bind HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}")
            assert b"400" in await reader.readline()
        cluster.fail(Unavailable("away"), *DECIDES_ON)
        async with asyncio.timeout(PATIENCE_S):
            while await reader.read(65536):
                pass
        writer.transport.abort()
        cluster.work_again(*DECIDES_ON)
        await until(addresses["health"], 200, "ok\n")
        assert b"missing" in await answer(extender, context(certificates, "the scheduler"), protocol)


async def test_a_blocked_loop_is_not_alive(certificates: Certificates) -> None:
    probed: list[bool] = []

    def probe(address: Address, timeout_s: float = PATIENCE_S) -> None:
        with socket.create_connection((address.host, address.port), timeout=timeout_s) as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            try:
                probed.append(b"200 OK" in connection.recv(1000))
            except TimeoutError:
                probed.append(False)

    async with serving(settings_for(certificates), FaultyCluster()) as addresses:
        await asyncio.to_thread(probe, addresses["health"])
        thread = threading.Thread(target=probe, args=[addresses["health"], 0.3])
        thread.start()
        while thread.is_alive():
            time.sleep(0.01)  # noqa: ASYNC251 - it is the test that blocks the loop
        await asyncio.to_thread(probe, addresses["health"])
    assert probed == [True, False, True]
