"""A long-running process ends at a signal, at any moment, and with one sentence when its work fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from prometheus_client import Counter

from harness.waiting import PATIENCE_S
from kvplace.core.errors import Misconfigured, Unavailable
from kvplace.service.connections import Address
from kvplace.service.listening import listening
from kvplace.service.process import (
    LOOP_DELAYS,
    Readiness,
    health_application,
    in_background,
    log_as_json,
    run_until_signal,
    watch_loop,
)

SIGNALS = [signal.SIGTERM, signal.SIGINT]


async def go_on() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_service_and_a_second_one_does_not_cut_its_end_off(number: signal.Signals) -> None:
    steps: list[str] = []

    @contextlib.asynccontextmanager
    async def service() -> AsyncIterator[None]:
        os.kill(os.getpid(), number)
        async with in_background(go_on()):
            steps.append("serving")
            try:
                yield
            finally:
                os.kill(os.getpid(), number)
                for _ in range(10):  # the loop handles the signal in one of its next rounds
                    await asyncio.sleep(0)
                steps.append("ended")

    run_until_signal(service())
    assert steps == ["serving", "ended"]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_a_service_that_never_finishes_starting(number: signal.Signals) -> None:
    ended: list[bool] = []

    @contextlib.asynccontextmanager
    async def service() -> AsyncIterator[None]:
        os.kill(os.getpid(), number)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)
        yield

    run_until_signal(service())
    assert ended == [True]


def test_a_signal_ends_the_process_though_its_parent_ignored_sigint() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        test_a_signal_ends_a_service_that_never_finishes_starting(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_of_one_background_task_ends_the_process_with_its_sentence() -> None:
    async def fail() -> None:
        raise Misconfigured("the sentence")

    @contextlib.asynccontextmanager
    async def service() -> AsyncIterator[None]:
        async with in_background(go_on()), in_background(go_on(), fail()):
            yield

    with pytest.raises(Misconfigured, match="the sentence"):
        run_until_signal(service())


def test_an_unexpected_failure_keeps_its_exception_group() -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ExceptionGroup):
        run_until_signal(in_background(fail()))


def test_a_service_that_cannot_start_raises_its_own_error() -> None:
    class Service(contextlib.AbstractAsyncContextManager[None]):
        async def __aenter__(self) -> None:
            raise Unavailable("no cluster")

        async def __aexit__(self, *_: object) -> None:
            pytest.fail("it has not been entered")

    with pytest.raises(Unavailable, match="no cluster"):
        run_until_signal(Service())


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    """Put the handlers and the level of the root logger back after the test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("root_logger")
def test_a_line_has_time_level_component_and_the_context_that_was_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log_as_json("info")
    log = logging.getLogger("kvplace.scheduler.binder")
    log.debug("not shown")
    log.warning("no room for %s", "a", extra={"vm": "ns/a", "node": "worker-1", "secret": "x"})
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        log.exception("two\nlines")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert first.pop("ts").endswith("+00:00")
    assert first == {
        "level": "warning",
        "msg": "no room for a",
        "component": "scheduler",
        "vm": "ns/a",
        "node": "worker-1",
    }
    assert second["msg"] == "two\nlines"
    assert second["traceback"].endswith("ZeroDivisionError")


def seen() -> tuple[float, float]:
    """How often the loop was timed, and how many seconds it was late in all."""
    samples = {sample.name: sample.value for family in LOOP_DELAYS.collect() for sample in family.samples}
    name = "kvplace_process_loop_delay_seconds"
    return samples[f"{name}_count"], samples[f"{name}_sum"]


async def test_a_blocked_loop_is_seen_as_its_delay() -> None:
    count, late_s = seen()
    watching = asyncio.create_task(watch_loop())
    await asyncio.sleep(0)  # it waits for its timer now
    time.sleep(0.5)  # noqa: ASYNC251 - it is the test that holds the loop up
    async with asyncio.timeout(PATIENCE_S):
        while seen()[0] == count:  # noqa: ASYNC110 - nothing announces what is counted
            await asyncio.sleep(0)
    watching.cancel()
    assert seen()[1] - late_s >= 0.2


LOOPBACK = Address("127.0.0.1", 0)
COUNTED = Counter("kvplace_test_health", "Counts for the test of the metrics page.")


async def get(address: Address, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://{address}{path}") as answer:
        return answer.status, await answer.text()


async def test_readyz_fails_with_the_obstacle_until_there_is_none_and_healthz_never_fails() -> None:
    readiness = Readiness("the caches are empty")
    async with listening("health", health_application("agent", readiness), LOOPBACK) as address:
        assert await get(address, "/readyz") == (503, "the caches are empty\n")
        assert '\nkvplace_process_ready{process="agent"} 0.0\n' in (await get(address, "/metrics"))[1]
        assert await get(address, "/healthz") == (200, "ok\n")
        readiness.obstacle = ""
        assert await get(address, "/readyz") == (200, "ok\n")
        assert '\nkvplace_process_ready{process="agent"} 1.0\n' in (await get(address, "/metrics"))[1]
        readiness.obstacle = "stopping"
        assert await get(address, "/readyz") == (503, "stopping\n")
        assert await get(address, "/healthz") == (200, "ok\n")


async def test_metrics_are_those_of_this_process_at_this_moment() -> None:
    async with listening("health", health_application("agent", Readiness("")), LOOPBACK) as address:
        COUNTED.inc()
        before = await get(address, "/metrics")
        COUNTED.inc()
        after = await get(address, "/metrics")
    assert before[0] == after[0] == 200
    assert "\nkvplace_test_health_total 1.0\n" in before[1]
    assert "\nkvplace_test_health_total 2.0\n" in after[1]


async def test_scrapes_at_the_same_time_share_one_that_has_begun_after_all_of_them() -> None:
    prepared, begun, may_go_on = 0, asyncio.Event(), asyncio.Event()

    async def prepare() -> None:
        nonlocal prepared
        prepared += 1
        begun.set()
        await may_go_on.wait()
        COUNTED.inc()

    application = health_application("agent", Readiness(""), prepare)
    scrape = next(route.handler for route in application.router.routes() if "metrics" in str(route.resource))

    async def scraped() -> bytes:
        answer = await scrape(make_mocked_request("GET", "/metrics"))
        assert isinstance(answer, web.Response)
        assert isinstance(answer.body, bytes)
        return answer.body

    early = asyncio.create_task(scraped())
    await begun.wait()
    others = [asyncio.create_task(scraped()) for _ in range(100)]
    await asyncio.sleep(0)
    may_go_on.set()
    later = set(await asyncio.gather(*others))
    assert (prepared, len(later)) == (2, 1)
    assert await early not in later


async def test_a_port_that_is_in_use_is_named() -> None:
    application = health_application("agent", Readiness(""))
    async with listening("health", application, LOOPBACK) as address:
        with pytest.raises(Misconfigured, match=f"cannot listen on {address}: .*in use"):
            async with listening("health", health_application("agent", Readiness("")), address):
                pass
