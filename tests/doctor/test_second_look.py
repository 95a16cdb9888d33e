"""A VM that starts or ends while doctor reads is no fault; one that stays half there is."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import pytest

from kvplace.core.ledger import Ledger
from kvplace.doctor.claim_checks import check_ledgers, check_vms
from kvplace.doctor.reading import read_installation
from kvplace.kube.object_reader import ApiKind, Document
from kvplace.kube.records import LedgerRecord, NodeRecord, PodRecord
from kvplace.kube.watches import EVERYTHING, LEDGERS, NODES, PODS, Kind, Selector
from tests.doctor.examples import NOW, WORKER, pod
from tests.kube.claims import claim, taking

K = TypeVar("K")
R = TypeVar("R")

CLAIMED = (LedgerRecord(WORKER, Ledger().after(taking(claim("db", 0, 8))), "2"),)
UNCLAIMED = (LedgerRecord(WORKER, Ledger(), "1"),)
RUNS, GONE = (pod("db", pinned=True),), ()
VMI = {"metadata": {"name": "db", "namespace": "default"}, "status": {"activePods": {"db": "worker"}}}


class Changing:
    """A cluster that has changed at some reads of its lists."""

    def __init__(
        self, ledgers: list[tuple[LedgerRecord, ...]], pods: list[tuple[PodRecord, ...]], *, is_vmi: bool
    ) -> None:
        self.answers: dict[Kind[Any, Any], list[Any]] = {LEDGERS: ledgers, PODS: pods}
        self.is_vmi = is_vmi

    async def read_all(self, kind: Kind[K, R], selector: Selector = EVERYTHING) -> tuple[R, ...]:
        if kind is NODES:
            return (NodeRecord(WORKER, "uid"),)  # type: ignore[return-value]
        answers = self.answers.get(kind, [()])
        return answers.pop(0) if len(answers) > 1 else answers[0]  # type: ignore[no-any-return]

    async def read_version(self) -> str:
        return "v1.36.3"

    async def read(self, kind: ApiKind, name: str, *, namespace: str = "") -> Document | None:
        return None

    async def read_metadata(self, kind: ApiKind, name: str, *, namespace: str = "") -> Document | None:
        return None

    async def read_list(self, kind: ApiKind, **_: str) -> tuple[Document, ...]:
        return (VMI,) if self.is_vmi and kind.resource == "virtualmachineinstances" else ()

    async def read_list_as(self, form: type[R], kind: ApiKind, **_: str) -> tuple[R, ...]:
        return ()

    async def create(self, kind: ApiKind, document: Document, **_: Any) -> Document:
        return {"status": {"allowed": True}}


def problems_in(cluster: Changing) -> tuple[list[str], list[float]]:
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    found = asyncio.run(
        read_installation(
            cluster, cluster, cluster, namespace="default", client_version="1", now=lambda: NOW, pause=pause
        )
    )
    return [each.problem for check in (check_ledgers, check_vms) for each in check(found)], pauses


@pytest.mark.parametrize(
    ("ledgers", "pods", "is_vmi"),
    [
        ([UNCLAIMED, CLAIMED], [RUNS], False),
        ([UNCLAIMED], [RUNS, GONE], False),
        ([CLAIMED, UNCLAIMED], [GONE], False),
        ([CLAIMED], [GONE, RUNS], False),
        ([CLAIMED], [GONE, RUNS], True),
    ],
)
def test_what_changes_between_two_lists_is_no_fault(
    ledgers: list[tuple[LedgerRecord, ...]], pods: list[tuple[PodRecord, ...]], *, is_vmi: bool
) -> None:
    assert problems_in(Changing(ledgers, pods, is_vmi=is_vmi)) == ([], [5.0])


@pytest.mark.parametrize(
    ("ledgers", "pods", "is_vmi", "said"),
    [
        (UNCLAIMED, RUNS, False, "run on cores that no ledger holds"),
        (CLAIMED, GONE, False, "have no pod on the node"),
        (UNCLAIMED, GONE, True, "admission has not seen it"),
    ],
)
def test_what_stays_half_there_is_a_fault(
    ledgers: tuple[LedgerRecord, ...], pods: tuple[PodRecord, ...], said: str, *, is_vmi: bool
) -> None:
    (problem,), _ = problems_in(Changing([ledgers], [pods], is_vmi=is_vmi))
    assert said in problem


def test_nothing_is_looked_at_twice_where_all_is_well() -> None:
    assert problems_in(Changing([CLAIMED], [RUNS], is_vmi=True)) == ([], [])
