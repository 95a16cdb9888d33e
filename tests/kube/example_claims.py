"""Claims for tests, with only what a test is about reported in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvplace.core.cpuset import mask_of
from kvplace.core.ledger import Claim, LedgerChange
from kvplace.core.request import Policy
from kvplace.core.scalars import Bytes, NumaId, PodUid


def claim(uid: str, *cpus: int, **other: Any) -> Claim:
    return replace(
        Claim(
            uid=PodUid(uid),
            namespace="default",
            pod=f"pod-{uid}",
            vmi="",
            policy=Policy.EXCLUSIVE,
            cpus=mask_of(cpus),
            owned=mask_of(cpus),
            memory={NumaId(0): Bytes(1 << 30)},
            huge_pages={},
            since="2026-01-02T03:04:05Z",
        ),
        **other,
    )


def taking(*claims: Claim) -> LedgerChange:
    return LedgerChange(claims=claims)
