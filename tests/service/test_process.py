"""A long-running process ends at a signal, at any moment, and with one sentence when its work fails."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator

import pytest

from kvplace.core.errors import Misconfigured, Unavailable
from kvplace.service.process import in_background, run_until_signal

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
