"""A child that answers, fails, dies or hangs; the parent learns of each and keeps nothing of it."""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import time
from collections.abc import Callable

import pytest

from kvplace.core.errors import BadDomainXml, GrpcStatus, Misconfigured
from kvplace.hook.errand import Errand, Outcome

# Newer Pythons warn of forking beside pytest-timeout's thread; the hook itself has one thread.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")


def outcome_of(question: Callable[[], bytes]) -> Outcome:
    errand = Errand.send(question)
    while not errand.listen():
        select.select([errand.pipe], [], [], 60)
    outcome = errand.end()
    with pytest.raises(ChildProcessError):
        os.waitpid(errand.pid, os.WNOHANG)
    return outcome


def raising(error: Exception) -> Callable[[], bytes]:
    def ask() -> bytes:
        raise error

    return ask


@pytest.mark.parametrize("size", [0, 1, 65_536, 3_000_000])
def test_an_answer_of_any_size_comes_back_whole(size: int) -> None:
    assert outcome_of(lambda: b"x" * size) == Outcome(GrpcStatus.OK, b"x" * size)


def test_an_error_comes_back_with_its_status_and_sentence() -> None:
    assert outcome_of(raising(Misconfigured("no way"))) == Outcome(GrpcStatus.FAILED_PRECONDITION, b"no way")
    assert outcome_of(raising(BadDomainXml("no domain"))).status is GrpcStatus.INVALID_ARGUMENT


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSEGV])
def test_a_child_that_is_killed_leaves_a_sentence(fate: signal.Signals) -> None:
    def die() -> bytes:
        faulthandler.disable()
        os.kill(os.getpid(), fate)
        return b""

    outcome = outcome_of(die)
    assert outcome.status is GrpcStatus.UNAVAILABLE
    assert f"the process that pins ended with -{int(fate)}" in outcome.said.decode()


def test_an_unforeseen_exception_in_the_child_is_no_answer(capfd: pytest.CaptureFixture[str]) -> None:
    assert outcome_of(raising(ZeroDivisionError())).status is GrpcStatus.UNAVAILABLE


def test_a_child_that_hangs_is_ended_and_the_sentence_names_the_limit() -> None:
    def hang() -> bytes:
        while True:
            signal.pause()

    errand = Errand.send(hang)
    assert not errand.listen()
    assert errand.deadline - time.monotonic() <= 8
    errand.deadline = time.monotonic()
    outcome = errand.end()
    assert outcome.status is GrpcStatus.UNAVAILABLE
    assert "longer than 8 seconds" in outcome.said.decode()
    with pytest.raises(ChildProcessError):
        os.waitpid(errand.pid, os.WNOHANG)
