"""Ledgers, claims and changes for property tests: small machines, so that pods meet often."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from kvplace.core.cpuset import mask_of
from kvplace.core.ledger import Claim, Ledger, LedgerChange, OwnershipConflict
from kvplace.core.request import Policy
from kvplace.core.scalars import Bytes, NumaId, PodUid

CPUS = 12
PODS = tuple(PodUid(f"pod-{letter}") for letter in "abcde")

page_sizes = st.sampled_from([1 << 21, 1 << 30]).map(Bytes)
cpu_sets = st.sets(st.integers(0, CPUS - 1), max_size=4).map(mask_of)
numa_nodes = st.integers(0, 2).map(NumaId)


@st.composite
def claims(draw: st.DrawFn, uid: PodUid | None = None) -> Claim:
    """Any claim; its owned CPUs are a part of those it names."""
    cpus = draw(cpu_sets)
    name = uid or draw(st.sampled_from(PODS))
    return Claim(
        uid=name,
        namespace="default",
        pod=name,
        vmi=draw(st.sampled_from(["", "vm"])),
        policy=draw(st.sampled_from(Policy)),
        cpus=cpus,
        owned=cpus & draw(cpu_sets),
        memory=draw(st.dictionaries(numa_nodes, st.integers(0, 1 << 40).map(Bytes), max_size=3)),
        huge_pages=draw(
            st.dictionaries(
                numa_nodes,
                st.dictionaries(page_sizes, st.integers(1, 64), min_size=1),
                max_size=3,
            )
        ),
        since=draw(st.sampled_from(["2026-01-02T03:04:05Z", "2026-05-06T07:08:09Z"])),
        revision=draw(st.integers(1, 3)),
    )


changes = st.builds(
    LedgerChange,
    st.lists(claims(), max_size=3).map(tuple),
    st.lists(st.sampled_from(PODS), max_size=2).map(tuple),
)


@st.composite
def ledgers(draw: st.DrawFn) -> Ledger:
    """A ledger that came about by allowed changes."""
    ledger = Ledger()
    for change in draw(st.lists(changes, max_size=6)):
        try:
            ledger = ledger.after(change)
        except OwnershipConflict:
            continue
    return ledger


def merged(target: Any, patch: Any) -> Any:
    """JSON merge patch, word by word after RFC 7396, section 2."""
    if not isinstance(patch, Mapping):
        return patch
    result = dict(target) if isinstance(target, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result
