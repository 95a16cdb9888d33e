"""The right to the map is asked of the cluster, seldom, and never without bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from kvplace.core.errors import Unavailable
from kvplace.kube.reviews import Person, Right
from kvplace.web.gate import AUDIENCE, LOOK, Gate
from kvplace.web.remembered import Remembered
from tests.kube.faulty_cluster import FaultyCluster

ANNA = Person("anna", groups=("operators",))


class CountingCluster(FaultyCluster):
    """Counts what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    async def review_token(self, token: str, audiences: Sequence[str] = ()) -> Person | None:
        self.asked.append(f"token {token}")
        return await super().review_token(token, audiences)

    async def review_access(self, person: Person, right: Right) -> bool:
        self.asked.append(f"access {person.name} {right}")
        return await super().review_access(person, right)


async def test_tokens_for_the_map_and_for_the_api_server_open_the_map_and_others_do_not() -> None:
    cluster = FaultyCluster()
    cluster.tokens |= {
        ("of-the-map", AUDIENCE): ANNA,
        ("of-the-api-server", ""): ANNA,
        ("of-another-service", "vault"): ANNA,
    }
    gate = Gate(cluster)
    assert await gate.person_of("of-the-map") == ANNA
    assert await gate.person_of("of-the-api-server") == ANNA
    assert await gate.person_of("of-another-service") is None


async def test_many_requests_of_one_person_ask_the_api_server_once() -> None:
    cluster = CountingCluster()
    cluster.tokens["t", AUDIENCE] = ANNA
    cluster.allowed.add(("anna", LOOK))
    gate = Gate(cluster)
    assert await asyncio.gather(*(gate.person_of("t") for _ in range(50))) == [ANNA] * 50
    assert await asyncio.gather(*(gate.may_look(ANNA) for _ in range(50))) == [True] * 50
    assert cluster.asked == ["token t", "access anna list nodeledgers.kvplace.io"]


async def test_people_who_differ_in_anything_that_rbac_decides_by_are_asked_for_apart() -> None:
    cluster = CountingCluster()
    gate = Gate(cluster)
    people = [
        ANNA,
        Person("anna"),
        Person("anna", uid="2", groups=("operators",)),
        Person("anna", groups=("operators",), extra={"scopes": ("one",)}),
        Person("anna", groups=("operators",), extra={"scopes": ("other",)}),
    ]
    for person in people:
        await gate.may_look(person)
    assert len(cluster.asked) == len(people)


async def test_an_answer_is_forgotten_after_its_time() -> None:
    now = 0.0
    remembered: Remembered[str, int] = Remembered(lambda _: 60.0, clock=lambda: now)
    answers = iter(range(10))

    async def ask() -> int:
        return next(answers)

    assert [await remembered.get("a", ask), await remembered.get("a", ask)] == [0, 0]
    now = 60.0
    assert await remembered.get("a", ask) == 1


async def test_failures_are_not_remembered() -> None:
    remembered: Remembered[str, int] = Remembered(lambda _: 60.0)

    async def fail() -> int:
        raise Unavailable("no answer")

    async def ask() -> int:
        return 1

    with pytest.raises(Unavailable):
        await remembered.get("a", fail)
    assert await remembered.get("a", ask) == 1


async def test_only_so_many_answers_are_kept_and_so_many_questions_asked_at_once() -> None:
    remembered: Remembered[int, int] = Remembered(lambda _: 60.0, most=3, at_once=2)
    asked = []

    async def ask() -> int:
        asked.append(1)
        return 1

    for question in (1, 2, 3, 4, 1):
        await remembered.get(question, ask)
    assert len(asked) == 5, "the oldest answer was kept beyond the limit"

    never = asyncio.Event()

    async def hang() -> int:
        await never.wait()
        return 1

    hanging = [asyncio.create_task(remembered.get(question, hang)) for question in (10, 11)]
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="try again"):
        await remembered.get(12, ask)
    never.set()
    await asyncio.gather(*hanging)
