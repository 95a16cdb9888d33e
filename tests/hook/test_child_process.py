"""A child that answers, fails, is killed or hangs: the parent gets an outcome of each and reaps it."""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import time
from collections.abc import Callable

import pytest

from kvplace.core.errors import BadDomainXml, GrpcStatus, Misconfigured
from kvplace.hook.process import ChildProcess, Outcome

# Newer Pythons warn of fork() while pytest-timeout's thread runs; the hook itself has one thread.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")


def outcome_of(work: Callable[[], bytes]) -> Outcome:
    child = ChildProcess.start(work)
    while not child.read():
        select.select([child.pipe], [], [], 60)
    outcome = child.end()
    with pytest.raises(ChildProcessError):
        os.waitpid(child.pid, os.WNOHANG)
    return outcome


def raising(error: Exception) -> Callable[[], bytes]:
    def work() -> bytes:
        raise error

    return work


@pytest.mark.parametrize("size", [0, 1, 65_536, 3_000_000])
def test_an_answer_of_any_size_comes_back_whole(size: int) -> None:
    assert outcome_of(lambda: b"x" * size) == Outcome(GrpcStatus.OK, b"x" * size)


def test_an_error_comes_back_with_its_status_and_sentence() -> None:
    assert outcome_of(raising(Misconfigured("no way"))) == Outcome(GrpcStatus.FAILED_PRECONDITION, b"no way")
    assert outcome_of(raising(BadDomainXml("no domain"))).status is GrpcStatus.INVALID_ARGUMENT


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_child_gives_a_sentence(number: signal.Signals) -> None:
    def die() -> bytes:
        faulthandler.disable()
        os.kill(os.getpid(), number)
        return b""

    outcome = outcome_of(die)
    assert outcome.status is GrpcStatus.UNAVAILABLE
    assert f"the process that pins ended with -{int(number)}" in outcome.output.decode()


def test_an_unexpected_exception_in_the_child_is_not_an_answer(capfd: pytest.CaptureFixture[str]) -> None:
    assert outcome_of(raising(ZeroDivisionError())).status is GrpcStatus.UNAVAILABLE


def test_a_child_that_hangs_is_killed_and_the_sentence_names_the_limit() -> None:
    def hang() -> bytes:
        while True:
            signal.pause()

    child = ChildProcess.start(hang)
    assert not child.read()
    assert child.deadline - time.monotonic() <= 8
    child.deadline = time.monotonic()
    outcome = child.end()
    assert outcome.status is GrpcStatus.UNAVAILABLE
    assert "longer than 8 seconds" in outcome.output.decode()
    with pytest.raises(ChildProcessError):
        os.waitpid(child.pid, os.WNOHANG)
