"""The retry policy, and foreign messages about an outage as sentences that name the program."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.errors import Conflict, Corrupt, Forbidden, KvplaceError, Refused, Unavailable
from kvplace.kube.api_errors import RETRIES, ApiUnavailable, Backoff, passes, unanswered, with_retries

LONGEST = Backoff(first_s=1, longest_s=8, jitter=lambda: 1.0)


class Call:
    """A call that fails with the given errors before it succeeds; keeps the pauses between its attempts."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.attempts = 0
        self.pauses: list[float] = []

    async def __call__(self) -> str:
        self.attempts += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)


@pytest.mark.parametrize(
    ("error", "attempts"),
    [
        (Unavailable("busy"), 3),
        (Conflict("changed"), 3),
        (Refused("no"), 1),
        (Forbidden("denied"), 1),
        (Corrupt("two owners"), 1),
        (OSError("a bug"), 1),
    ],
)
async def test_only_conflicts_and_unavailability_are_tried_again(error: Exception, attempts: int) -> None:
    call = Call(*[error] * 9)
    with pytest.raises(type(error)) as failure:
        await with_retries(call, attempts=3, sleep=call.pause)
    assert failure.value is error
    assert call.attempts == attempts


async def test_a_call_that_succeeds_answers() -> None:
    call = Call(Unavailable("busy"), Conflict("changed"))
    assert await with_retries(call, attempts=3, sleep=call.pause) == "done"


async def test_each_further_attempt_is_counted_by_its_cause() -> None:
    def counted() -> list[float]:
        return [RETRIES.labels(cause)._value.get() for cause in ("unavailable", "conflict")]

    unavailable, conflict = counted()
    call = Call(Unavailable("busy"), Conflict("changed"), Unavailable("busy"), Refused("no"))
    with pytest.raises(Refused):
        await with_retries(call, attempts=9, sleep=call.pause)
    assert counted() == [unavailable + 2, conflict + 1]
    call = Call(*[Unavailable("busy")] * 3)
    with pytest.raises(Unavailable):
        await with_retries(call, attempts=3, sleep=call.pause)
    assert counted() == [unavailable + 4, conflict + 1]


async def test_pauses_grow_after_unavailability_and_a_conflict_has_none() -> None:
    call = Call(*[Unavailable("busy")] * 5, Conflict("changed"), Unavailable("busy"))
    await with_retries(call, attempts=9, backoff=LONGEST, sleep=call.pause)
    assert call.pauses == [1, 2, 4, 8, 8, 0, 8]


async def test_the_pause_that_the_server_asks_for_comes_on_top() -> None:
    call = Call(ApiUnavailable("busy", retry_after=7.0), ApiUnavailable("busy"))
    await with_retries(call, attempts=3, backoff=LONGEST, sleep=call.pause)
    assert call.pauses == [8, 2]


def only_refusals(error: KvplaceError) -> bool:
    return isinstance(error, Refused)


async def test_the_retried_errors_can_be_narrowed_but_not_widened() -> None:
    for error in (Conflict("changed"), Refused("no")):
        call = Call(error)
        with pytest.raises(type(error)):
            await with_retries(call, attempts=3, retried=only_refusals, sleep=call.pause)
        assert call.attempts == 1


async def test_no_attempt_begins_after_the_deadline() -> None:
    loop = asyncio.get_running_loop()
    call = Call(*[Unavailable("busy")] * 99)
    with pytest.raises(Unavailable):
        await with_retries(call, deadline=loop.time() + 5.0, backoff=LONGEST, sleep=call.pause)
    # The clock stands, so a pause of 8 s is the first that would end after the deadline.
    assert call.pauses == [1, 2, 4]


@given(st.floats(0, 0.999), st.integers(0, 60))
def test_a_pause_is_never_longer_than_agreed(chance: float, failures: int) -> None:
    backoff = Backoff(first_s=0.2, longest_s=30, jitter=lambda: chance)
    assert 0 <= backoff.pause(failures) <= 30
    assert backoff.pause(failures, ApiUnavailable("busy", retry_after=5)) >= 5


LOOK = "`kubectl -n kvplace-system get pods` shows whether it runs"
FAILED = 'Internal error occurred: failed calling webhook "%s": failed to call webhook: '
EXPIRED = "x509: certificate has expired or is not yet valid: current time ... is after ..."
POST = 'Post "https://kvplace-serve.kvplace-system.svc:443/admit/vmi?timeout=10s": '


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (
            f"{FAILED % 'vmi.kvplace.io'}{POST}dial tcp 10.1.2.3:443: connect: connection refused",
            (
                "`kvplace serve` does not answer the API server (webhook vmi.kvplace.io): "
                f"dial tcp 10.1.2.3:443: connect: connection refused; {LOOK}"
            ),
        ),
        (
            f"{FAILED % 'pod.kvplace.io'}{POST}tls: failed to verify certificate: {EXPIRED}",
            (
                "the API server does not accept the certificate of `kvplace serve` (webhook pod.kvplace.io): "
                f"tls: failed to verify certificate: {EXPIRED}; `kubectl kvplace doctor` reports why"
            ),
        ),
        (
            f"patch vms: HTTP 500 ({FAILED % 'v.example.org'}no endpoints available for service v)",
            "webhook v.example.org does not answer the API server: no endpoints available for service v",
        ),
        (
            'running Filter on extender: Post "https://kvplace-extender:9443/v1/filter": EOF',
            f"`kvplace serve` does not answer kube-scheduler: EOF; {LOOK}",
        ),
    ],
)
def test_an_outage_is_reported_with_who_does_not_answer_and_where_to_check(
    message: str, sentence: str
) -> None:
    assert unanswered(message) == sentence


@pytest.mark.parametrize(
    ("message", "may_pass"),
    [
        ('Internal error occurred: failed calling webhook "vm.kvplace.io": EOF', True),
        ('Operation cannot be fulfilled on resourcequotas "q": the object has been modified', True),
        ('pods "virt-launcher-a" is forbidden: exceeded quota: q, requested: count/pods=1', False),
        ('admission webhook "v.example.org" denied the request: no', False),
    ],
)
def test_an_outage_passes_and_a_refusal_does_not(message: str, may_pass: bool) -> None:
    assert passes(message) is may_pass


def test_a_refusal_is_not_an_outage() -> None:
    assert unanswered('admission webhook "vm.kvplace.io" denied the request: cpu-set is one of ...') == ""
