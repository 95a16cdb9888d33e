"""Options that exclude each other are refused with both named; all others pass."""

from __future__ import annotations

from itertools import product

import pytest

from kvplace.core.annotations import read_options
from kvplace.core.contradictions import check_agreement, contradiction_in
from kvplace.core.errors import BadAnnotation
from kvplace.core.request import EmulatorThreads, GuestNuma, NumaMemory, PinningOptions, Policy, Scope, Smt

POLICY, SMT, GUEST, MEMORY = (
    f"kvplace.io/{name}" for name in ("cpu-policy", "smt", "guest-numa", "numa-memory")
)
CRANE = "topology.crane.io/cpu-policy"
NO_SIBLING = (
    "a sibling stays idle only when the VM owns it, and with {} it owns none; ask for exclusive, or for smt "
    "require"
)
NO_CORE = (
    "with numa every vCPU may use all shared CPUs of the NUMA nodes, so none has a core; ask for share, "
    "which names CPUs, or leave smt out"
)
NO_CPU = (
    "with numa no vCPU has a CPU of its own, so there is nothing to mirror; ask for share, which names CPUs, "
    "or leave guest-numa out"
)
EVERYWHERE = (
    "the memory of a guest cell lies on one NUMA node, interleaved memory on all of them; ask for preferred "
    "or strict"
)
ANYWHERE = "guest cells promise memory near their vCPUs, which off does not provide; ask for preferred"


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ((SMT, "isolate"), (POLICY, "share"), NO_SIBLING.format("share")),
        ((SMT, "isolate"), (CRANE, "immovable"), NO_SIBLING.format("immovable")),
        ((SMT, "require"), (POLICY, "numa"), NO_CORE),
        ((SMT, "isolate"), (CRANE, "numa"), NO_CORE),
        ((GUEST, "mirror"), (POLICY, "numa"), NO_CPU),
        ((GUEST, "mirror"), (MEMORY, "interleave"), EVERYWHERE),
        ((GUEST, "mirror"), (MEMORY, "off"), ANYWHERE),
    ],
    ids=str,
)
def test_words_that_exclude_each_other_are_both_named_as_they_were_written(
    first: tuple[str, str], second: tuple[str, str], reason: str
) -> None:
    annotations = dict((second, first), **{"cpu-set": "any"})
    options = read_options(annotations)
    assert options is not None
    with pytest.raises(BadAnnotation) as refused:
        check_agreement(options, annotations)
    assert str(refused.value) == (
        f"annotation {first[0]}: {first[1]!r}: contradicts {second[0]}: {second[1]!r}: {reason}"
    )


def test_without_the_annotations_the_error_names_the_keys_of_kvplace() -> None:
    options = PinningOptions(policy=Policy.NUMA, smt=Smt.ISOLATE)
    with pytest.raises(BadAnnotation) as refused:
        check_agreement(options, {})
    assert str(refused.value).startswith(
        "annotation kvplace.io/smt: 'isolate': contradicts kvplace.io/cpu-policy: 'numa': "
    )


def test_no_two_words_exclude_each_other_but_these() -> None:
    refused = {
        (policy, smt, memory, guest)
        for policy, smt, memory, guest in product(Policy, Smt, NumaMemory, GuestNuma)
        if contradiction_in(PinningOptions(policy=policy, smt=smt, numa_memory=memory, guest_numa=guest))
    }
    mirror = GuestNuma.MIRROR
    assert refused == {
        (policy, smt, memory, guest)
        for policy, smt, memory, guest in product(Policy, Smt, NumaMemory, GuestNuma)
        if (policy in (Policy.SHARE, Policy.IMMOVABLE, Policy.NUMA) and smt is Smt.ISOLATE)
        or (policy is Policy.NUMA and smt is Smt.REQUIRE)
        or (policy is Policy.NUMA and guest is mirror)
        or (guest is mirror and memory in (NumaMemory.INTERLEAVE, NumaMemory.OFF))
    }


@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("emulator", EmulatorThreads)
def test_every_scope_goes_with_every_policy(scope: Scope, policy: Policy, emulator: EmulatorThreads) -> None:
    check_agreement(PinningOptions(scope=scope, policy=policy, emulator_threads=emulator), {})
