"""Claims for tests, with only what a test is about said in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvplace.core.cpuset import mask_of
from kvplace.core.ledger import Claim, ClaimState, LedgerChange
from kvplace.core.request import Policy


def claim(uid: str, *cpus: int, **other: Any) -> Claim:
    return replace(
        Claim(
            uid=uid,
            namespace="default",
            pod=f"pod-{uid}",
            vmi="",
            policy=Policy.EXCLUSIVE,
            state=ClaimState.CLAIMED,
            cpus=mask_of(cpus),
            owned=mask_of(cpus),
            memory={0: 1 << 30},
            huge_pages={},
            since="2026-01-02T03:04:05Z",
        ),
        **other,
    )


def taking(*claims: Claim) -> LedgerChange:
    return LedgerChange(claims=claims)
