"""Which of the words that users may write this version can really serve.

The annotations have room for more than every version offers. What is not offered is refused where the
user still sees it, at admission, so that nothing behind admission ever meets it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

from kvplace.core.annotations import (
    CPU_POLICY,
    CPU_SET,
    CRANE_AWARENESS,
    CRANE_MANAGER,
    CRANE_POLICY,
    GUEST_NUMA,
    KVPLACE_CPU_SET,
    SMT,
    Wish,
)
from kvplace.core.errors import BadAnnotation
from kvplace.core.request import GuestNuma, Policy, Request, Scope, Smt

SCOPES = (Scope.ONE_SOCKET, Scope.ONE_NUMA, Scope.ONE_L3, Scope.ANY)
POLICIES = (Policy.EXCLUSIVE, Policy.SHARE, Policy.IMMOVABLE, Policy.NONE)
GUEST_NUMAS = (GuestNuma.OFF,)


def check_offered(wish: Wish | Request, annotations: Mapping[str, str] | None = None) -> None:
    """Raise BadAnnotation for the first value that this version does not offer.

    `annotations` are those that the wish was read from: with them the error names the key that the user
    wrote, without them the `kvplace.io/` one.
    """
    written = annotations or {}
    _check(wish.scope, SCOPES, (KVPLACE_CPU_SET, CPU_SET, CRANE_AWARENESS), written)
    _check(wish.policy, POLICIES, (CPU_POLICY, CRANE_POLICY, CRANE_MANAGER), written)
    _check(wish.guest_numa, GUEST_NUMAS, (GUEST_NUMA,), written)
    if wish.policy in (Policy.SHARE, Policy.IMMOVABLE):
        _check(wish.smt, (Smt.PREFER,), (SMT,), written, f" together with cpu-policy {wish.policy.value}")


def _check(
    value: Enum, offered: Sequence[Enum], keys: Sequence[str], written: Mapping[str, str], when: str = ""
) -> None:
    if value in offered:
        return
    key = next((key for key in keys if key in written), keys[0])
    words = ", ".join(str(word.value) for word in offered)
    raise BadAnnotation(
        key, written.get(key, str(value.value)), f"is not offered by this version{when}; offered are {words}"
    )
