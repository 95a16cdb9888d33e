"""A signal cancels a command between two steps of its event loop, and its clean-up runs to the end."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from kvplace.cli.live_cluster import on_interrupt, run_until_interrupt

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in SIGNALS]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_cancels_when_the_step_under_way_has_ended_and_not_within_it(number: signal.Signals) -> None:
    said: list[str] = []

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        os.kill(os.getpid(), number)
        assert not task.cancelling()
        said.append("step")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            said.append("cleaned up")

    before = handlers()
    with pytest.raises(KeyboardInterrupt):
        run_until_interrupt(main())
    assert said == ["step", "cleaned up"]
    assert handlers() == before


def test_a_second_interrupt_ends_a_clean_up_that_hangs() -> None:
    async def main() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("the program went on")

    with pytest.raises(KeyboardInterrupt):
        run_until_interrupt(main())


def test_a_command_that_ends_by_itself_gives_its_answer_and_leaves_no_handler() -> None:
    async def main() -> str:
        return "answer"

    before = handlers()
    assert run_until_interrupt(main()) == "answer"
    assert handlers() == before


def test_a_cancellation_that_no_signal_asked_for_stays_one() -> None:
    async def main() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run_until_interrupt(main())


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_cancels_between_two_steps_again_after_a_block_with_an_action_of_its_own(
    number: signal.Signals,
) -> None:
    said: list[str] = []

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        stopped = asyncio.Event()
        with on_interrupt(stopped.set):
            os.kill(os.getpid(), number)
            await stopped.wait()
        with on_interrupt(None):
            said.append("asked")
        os.kill(os.getpid(), number)
        assert not task.cancelling()
        said.append("step")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            said.append("cleaned up")

    before = handlers()
    with pytest.raises(KeyboardInterrupt):
        run_until_interrupt(main())
    assert said == ["asked", "step", "cleaned up"]
    assert handlers() == before


def test_a_signal_that_is_ignored_stays_so() -> None:
    async def main() -> str:
        with on_interrupt(None):
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.01)
        return "answer"

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert run_until_interrupt(main()) == "answer"
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
