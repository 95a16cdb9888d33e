"""Which options of one VM exclude each other.

Each option works by itself. Two that cannot both be kept are refused at admission, where their author
sees it, with both named, so that nothing after admission has to choose between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from kvplace.core.annotations import (
    CPU_POLICY,
    CRANE_MANAGER,
    CRANE_POLICY,
    GUEST_NUMA,
    NUMA_MEMORY,
    SMT,
)
from kvplace.core.errors import BadAnnotation
from kvplace.core.request import GuestNuma, NumaMemory, PinningOptions, Policy, Smt

_KEYS: Mapping[type[Enum], tuple[str, ...]] = {
    Policy: (CPU_POLICY, CRANE_POLICY, CRANE_MANAGER),
    Smt: (SMT,),
    NumaMemory: (NUMA_MEMORY,),
    GuestNuma: (GUEST_NUMA,),
}


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Two options that exclude each other, the reason, and what to ask for instead."""

    word: Enum
    other: Enum
    reason: str


CONTRADICTIONS = (
    *(
        Contradiction(
            Smt.ISOLATE,
            policy,
            f"a sibling stays idle only when the VM owns it, and with {policy.value} it owns none; "
            "ask for exclusive, or for smt require",
        )
        for policy in (Policy.SHARE, Policy.IMMOVABLE)
    ),
    *(
        Contradiction(
            smt,
            Policy.NUMA,
            "with numa every vCPU may use all shared CPUs of the NUMA nodes, so none has a core; "
            "ask for share, which names CPUs, or leave smt out",
        )
        for smt in (Smt.ISOLATE, Smt.REQUIRE)
    ),
    Contradiction(
        GuestNuma.MIRROR,
        Policy.NUMA,
        "with numa no vCPU has a CPU of its own, so there is nothing to mirror; ask for share, which names "
        "CPUs, or leave guest-numa out",
    ),
    Contradiction(
        GuestNuma.MIRROR,
        NumaMemory.INTERLEAVE,
        "the memory of a guest cell lies on one NUMA node, interleaved memory on all of them; ask for "
        "preferred or strict",
    ),
    Contradiction(
        GuestNuma.MIRROR,
        NumaMemory.OFF,
        "guest cells promise memory near their vCPUs, which off does not provide; ask for preferred",
    ),
)


def contradiction_in(options: PinningOptions) -> Contradiction | None:
    """Find the first two options that exclude each other."""
    words = (options.policy, options.smt, options.numa_memory, options.guest_numa)
    return next((found for found in CONTRADICTIONS if found.word in words and found.other in words), None)


def check_agreement(options: PinningOptions, annotations: Mapping[str, str]) -> None:
    """Raise BadAnnotation for two options that exclude each other, naming both as the user wrote them."""
    found = contradiction_in(options)
    if found is None:
        return
    (key, value), (other_key, other_value) = (
        _as_written(word, annotations) for word in (found.word, found.other)
    )
    raise BadAnnotation(key, value, f"contradicts {other_key}: {other_value!r}: {found.reason}")


def _as_written(word: Enum, annotations: Mapping[str, str]) -> tuple[str, str]:
    keys = _KEYS[type(word)]
    key = next((key for key in keys if key in annotations), keys[0])
    return key, annotations.get(key, str(word.value))
