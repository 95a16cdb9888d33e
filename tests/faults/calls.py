"""Single calls of `serve` that go wrong, in every way in which a call can."""

from __future__ import annotations

from collections.abc import Callable

from harness.faults.script import (
    ALL,
    EVENT,
    Answer,
    Cut,
    Delay,
    DropAnswer,
    ExpiredStream,
    Fault,
    OldVersion,
    Rule,
    SlowBody,
    TornLine,
)
from tests.faults.faulty_cluster import Outcome, Scene
from tests.faults.scenario import OwnStory, Scenario

LEDGER = "nodeledgers"
BINDING = "pods/binding"


def _rules(*rules: Rule) -> Callable[[Scene], list[Rule]]:
    return lambda _: list(rules)


def _both(fault: Fault, times: int = 3) -> Callable[[Scene], list[Rule]]:
    """Let some claims and some bindings fail."""
    return _rules(Rule("update", LEDGER, fault, 1, 2), Rule("create", BINDING, fault, 4, times))


def _cut_everything(on: Scene) -> None:
    on.observer.wait_until_bound(10)
    on.stage.proxy.cut_all()


def _slow(on: Scene, outcome: Outcome) -> None:
    """Every call takes 200 ms more, from the first pod to the last release."""
    outcome.pods = 40
    with on.stage.proxy.playing(Rule("*", "*", Delay(0.2), times=ALL)):
        with on.burst(outcome.pods):
            pass
        outcome.bound_s = on.since_burst(on.observer.wait_until_bound(outcome.pods))
        outcome.agree_s = on.since_burst(on.wait_until_agreed())
        on.delete_all()
        on.wait_until_freed()


def _expired_list(on: Scene) -> list[Rule]:
    """The watch of pods ends, and its version is too old when it is opened again."""
    return [
        Rule(EVENT, "pods", Cut(), 5),
        Rule("watch", "pods", OldVersion()),
        Rule(EVENT, LEDGER, Cut(), 3),
        Rule("watch", LEDGER, Answer(410, "Expired")),
    ]


CALLS: tuple[Scenario | OwnStory, ...] = (
    Scenario("cut-calls", "connections cut before claims and bindings", binding=_both(Cut())),
    Scenario("drop-answers", "answers to claims and bindings lost", binding=_both(DropAnswer()), quick=True),
    Scenario("cut-everything", "all connections to the API server cut", during=_cut_everything, quick=True),
    OwnStory("slow-calls", "every call 200 ms slower (since the burst)", _slow),
    Scenario(
        "too-many-requests",
        "429 with Retry-After 1 s for claims and bindings",
        binding=_both(Answer(429, "TooManyRequests", 1)),
        quick=True,
    ),
    Scenario("error-500", "500 for claims and bindings", binding=_both(Answer(500, "InternalError"))),
    Scenario("error-503", "503 for claims and bindings", binding=_both(Answer(503, "ServiceUnavailable"))),
    Scenario(
        "conflicts", "409 for claims and bindings", binding=_both(Answer(409, "Conflict"), 5), quick=True
    ),
    Scenario(
        "old-version",
        "claims written with an old resourceVersion",
        binding=_rules(Rule("update", LEDGER, OldVersion(), 1, 3)),
    ),
    Scenario(
        "slow-answers",
        "answers to bindings take longer than 10 s",
        binding=_rules(Rule("create", BINDING, SlowBody(12, 1.0), 4, 3)),
    ),
    Scenario(
        "closed-watches",
        "watches of pods and ledgers end in mid-line",
        binding=_rules(Rule(EVENT, "pods", TornLine(), 5, 3), Rule(EVENT, LEDGER, TornLine(), 2, 2)),
        quick=True,
    ),
    Scenario("expired-watches", "watches end and their versions are too old", binding=_expired_list),
    Scenario(
        "expired-streams",
        "ERROR 410 inside the watches of pods and ledgers",
        binding=_rules(Rule(EVENT, "pods", ExpiredStream(), 5), Rule(EVENT, LEDGER, ExpiredStream(), 2)),
        quick=True,
    ),
    Scenario(
        "late-watches",
        "events of pods and ledgers 0.5 s late each",
        binding=_rules(Rule(EVENT, "pods", Delay(0.5), 1, 20), Rule(EVENT, LEDGER, Delay(0.5), 1, 10)),
    ),
    Scenario(
        "release-answers-lost",
        "answers to releases lost",
        releasing=_rules(Rule("update", LEDGER, DropAnswer(), 1, 2), Rule("get", "pods", DropAnswer(), 1, 3)),
    ),
    Scenario(
        "release-errors",
        "500 for releases and pod reads",
        releasing=_rules(
            Rule("update", LEDGER, Answer(500, "InternalError"), 1, 3),
            Rule("get", "pods", Answer(500, "InternalError"), 1, 3),
        ),
    ),
)
