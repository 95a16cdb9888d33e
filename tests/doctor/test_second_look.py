"""A VM that starts or ends while doctor reads is not a fault; one that stays half there is."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvplace.doctor.claim_checks import check_ledgers, check_vms
from kvplace.doctor.reading import read_installation
from kvplace.kube.object_records import LedgerRecord, PodRecord
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
def test_what_changes_between_two_lists_is_not_a_fault(
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
def test_what_stays_half_there_is_a_fault(
    ledgers: tuple[LedgerRecord, ...], pods: tuple[PodRecord, ...], said: str, *, is_vmi: bool
) -> None:
    (problem,), _ = problems_in(Changing([ledgers], [pods], is_vmi=is_vmi))
    assert said in problem


def test_nothing_is_checked_twice_where_all_is_well() -> None:
    assert problems_in(Changing([CLAIMED], [RUNS], is_vmi=True)) == ([], [])
