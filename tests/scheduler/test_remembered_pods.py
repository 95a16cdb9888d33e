"""What is remembered about pods goes with them, also when their end was seen before the question."""

from __future__ import annotations

from collections import OrderedDict

from kvplace.core.scalars import PodUid
from kvplace.scheduler.remembered_pods import forget_gone


def test_pods_that_are_gone_are_forgotten_and_those_that_wait_are_kept() -> None:
    waiting = {PodUid(f"waiting-{number}") for number in range(50)}
    remembered: OrderedDict[PodUid, str] = OrderedDict.fromkeys(waiting, "")
    for number in range(5_000):
        remembered[PodUid(f"gone-{number}")] = ""
        forget_gone(remembered, waiting)
    assert remembered.keys() > waiting
    assert len(remembered) < 400


def test_pods_that_the_watch_has_not_shown_yet_are_kept() -> None:
    remembered = OrderedDict.fromkeys((PodUid(f"new-{number}") for number in range(200)), "")
    forget_gone(remembered, set())
    assert len(remembered) == 200
