"""The reading of a cluster: changes meanwhile are not faults, and a pod on trial shows who refuses it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvplace.core.errors import KvplaceError
from kvplace.doctor.claim_checks import check_ledgers, check_vms
from kvplace.doctor.installation import ADMITTED
from kvplace.doctor.reading import read_installation
from kvplace.kube.api_errors import Denied, Rejected
from kvplace.kube.object_client import Document
from kvplace.kube.object_records import LedgerRecord, PodRecord
from kvplace.kube.watches import ApiKind
from tests.doctor.changing import CLAIMED, GONE, RUNS, UNCLAIMED, Changing
from tests.doctor.examples import NOW

ENDED = tuple(replace(pod, phase="Succeeded") for pod in RUNS)


def problems_in(cluster: Changing) -> tuple[list[str], list[float]]:
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    found = asyncio.run(
        read_installation(
            cluster, cluster, namespace="default", client_version="1", now=lambda: NOW, pause=pause
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
        ([CLAIMED, UNCLAIMED], [ENDED], False),
    ],
)
def test_a_change_between_two_lists_is_not_a_fault(
    ledgers: list[tuple[LedgerRecord, ...]], pods: list[tuple[PodRecord, ...]], *, is_vmi: bool
) -> None:
    assert problems_in(Changing(ledgers, pods, is_vmi=is_vmi)) == ([], [5.0])


@pytest.mark.parametrize(
    ("ledgers", "pods", "is_vmi", "said"),
    [
        (UNCLAIMED, RUNS, False, "run on cores that their node's ledger does not give them"),
        (CLAIMED, GONE, False, "have no running pod on the node"),
        (CLAIMED, ENDED, False, "have no running pod on the node"),
        (UNCLAIMED, GONE, True, "did not pass admission"),
    ],
)
def test_a_difference_that_stays_is_a_fault(
    ledgers: tuple[LedgerRecord, ...], pods: tuple[PodRecord, ...], said: str, *, is_vmi: bool
) -> None:
    (problem,), _ = problems_in(Changing([ledgers], [pods], is_vmi=is_vmi))
    assert said in problem


def test_nothing_is_checked_twice_where_all_is_well() -> None:
    assert problems_in(Changing([CLAIMED], [RUNS], is_vmi=True)) == ([], [])


NO_RIGHT = 'pods is forbidden: User "eve" cannot create resource "pods" in API group "" in the namespace "a"'
RESTRICTED = 'pods "kvplace-doctor-x" is forbidden: violates PodSecurity "restricted:latest"'
OURS = 'admission webhook "pod.kvplace.io" denied the request: annotation kvplace.io/doctor'


class Refusing(Changing):
    """A cluster that answers the trial pod with an error."""

    def __init__(self, error: KvplaceError | None) -> None:
        super().__init__([UNCLAIMED], [GONE], is_vmi=False)
        self.error = error

    async def create(self, kind: ApiKind, document: Document, **options: Any) -> Document:
        if kind.resource == "pods" and self.error is not None:
            raise self.error
        return await super().create(kind, document, **options)


@pytest.mark.parametrize(
    ("error", "answer", "unread"),
    [
        (None, ADMITTED, ""),
        (Rejected(OURS), OURS, ""),
        (Denied("create", "pods", NO_RIGHT), "", "you may not create pods"),
        (
            Denied("create", "pods", RESTRICTED),
            "",
            f"the API server refuses a pod in namespace default: {RESTRICTED}",
        ),
    ],
)
def test_a_missing_right_and_a_refusal_by_others_are_distinguished(
    error: KvplaceError | None, answer: str, unread: str
) -> None:
    cluster = Refusing(error)
    found = asyncio.run(
        read_installation(cluster, cluster, namespace="default", client_version="1", now=lambda: NOW)
    )
    assert (found.admission_answer, found.denied.get("a trial pod", "")) == (answer, unread)
