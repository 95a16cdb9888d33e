"""Options in every spelling; contradictions and typos are refused with the correction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.annotations import (
    check_agreement,
    contradiction_in,
    is_movable,
    may_migrate,
    meant_keys,
    read_options,
    wants_crane_result,
    wants_explanation,
    wants_room,
    without_effect,
)
from kvplace.core.errors import BadAnnotation
from kvplace.core.request import (
    EmulatorThreads,
    GuestNuma,
    NumaMemory,
    OnFailure,
    PinningOptions,
    Policy,
    Scope,
    Smt,
)
from kvplace.core.well_known_names import ASKING, MODIFIERS, OPTING_IN, RESULTS
from tests.core.invalid_input import answer_or_sentence
from tests.core.option_values import VALUES, OptionValue


@pytest.mark.parametrize("row", VALUES, ids=str)
def test_every_value_of_every_key_is_understood(row: OptionValue) -> None:
    assert read_options(row.annotations) == PinningOptions(**row.sets)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", MODIFIERS)
def test_a_modifier_alone_requests_nothing_and_is_warned_of(key: str) -> None:
    for value in ("false", "require", "float"):
        assert read_options({key: value}) is None
    (warning,) = without_effect({key: "false", "other": "x"})
    assert warning == f"annotation {key} has no effect alone: add cpu-set: one-socket to request cores"
    for asked in OPTING_IN:
        assert without_effect({key: "false", asked: "any"}) == ()


def test_a_vm_that_carries_none_of_our_keys_asks_for_nothing() -> None:
    assert read_options({}) is None
    assert read_options({"kubevirt.io/domain": "x", "cpu-set-note": "y", "cpuset": "0-3"}) is None


def test_results_that_were_inherited_ask_for_nothing() -> None:
    assert read_options(dict.fromkeys(RESULTS, "anything")) is None


def test_a_vm_that_only_declines_awareness_is_not_touched() -> None:
    assert read_options({"topology.crane.io/topology-awareness": "false"}) is None
    declined = {"topology.crane.io/topology-awareness": "false", "topology.crane.io/cpu-policy": "exclusive"}
    assert read_options(declined) == PinningOptions()


def test_spellings_that_agree_are_read_as_one() -> None:
    options = read_options(
        {
            "cpu-set": "one-numa",
            "kvplace.io/cpu-set": "one-numa",
            "topology.crane.io/topology-awareness": "true",
            "qos.gocrane.io/cpu-manager": "share",
            "topology.crane.io/cpu-policy": "none",
        }
        | {"topology.crane.io/cpu-policy": "exclusive", "qos.gocrane.io/cpu-manager": "exclusive"}
    )
    assert options == PinningOptions(scope=Scope.ONE_NUMA, policy=Policy.EXCLUSIVE)
    crane = {"topology.crane.io/cpu-policy": "immovable", "kvplace.io/on-failure": "float"}
    assert read_options(crane) == PinningOptions(policy=Policy.IMMOVABLE, on_failure=OnFailure.FLOAT)


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [
        ({"cpu-set": "any"}, False),
        ({"kvplace.io/cpu-policy": "share"}, False),
        ({"topology.crane.io/cpu-policy": "numa"}, True),
        ({"topology.crane.io/topology-awareness": "true", "cpu-set": "one-numa"}, True),
        ({"qos.gocrane.io/cpu-manager": "share", "kvplace.io/cpu-policy": "share"}, True),
    ],
    ids=str,
)
def test_any_key_of_crane_asks_for_its_result_annotation(
    annotations: Mapping[str, str], expected: bool
) -> None:
    assert wants_crane_result(annotations) is expected


def test_an_explanation_is_wanted_where_its_annotation_states_true() -> None:
    assert wants_explanation({"kvplace.io/explain": "true"})
    assert not wants_explanation({"kvplace.io/explain": "false"})
    assert not wants_explanation({"cpu-set": "any"})
    with pytest.raises(BadAnnotation, match="must be one of true, false"):
        read_options({"cpu-set": "any", "kvplace.io/explain": "yes"})


@pytest.mark.parametrize(
    ("key", "read"), [("kvplace.io/movable", is_movable), ("kvplace.io/make-room", wants_room)]
)
def test_moves_are_agreed_to_or_wanted_where_the_annotation_states_true(
    key: str, read: Callable[[Mapping[str, str]], bool]
) -> None:
    assert read({key: "true"})
    assert not read({key: "false"})
    assert not read({"cpu-set": "any"})
    with pytest.raises(BadAnnotation, match="must be one of true, false"):
        read_options({"cpu-set": "any", key: "yes"})


def test_a_vm_that_may_go_to_other_nodes_may_move_inside_its_node_too() -> None:
    for value, moves, migrates in (("nodes", True, True), ("true", True, False), ("false", False, False)):
        asked = {"cpu-set": "any", "kvplace.io/movable": value}
        assert read_options(asked) == read_options({"cpu-set": "any"})
        assert (is_movable(asked), may_migrate(asked)) == (moves, migrates)
    assert not may_migrate({"cpu-set": "any"})
    with pytest.raises(BadAnnotation, match="must be one of true, false, nodes; did you mean 'nodes'"):
        read_options({"cpu-set": "any", "kvplace.io/movable": "node"})


@pytest.mark.parametrize(
    "annotations",
    [
        {"cpu-set": "one-numa", "kvplace.io/cpu-set": "one-l3"},
        {"cpu-set": "any", "topology.crane.io/topology-awareness": "true"},
        {"kvplace.io/cpu-set": "one-socket", "topology.crane.io/topology-awareness": "true"},
        {"kvplace.io/cpu-policy": "share", "topology.crane.io/cpu-policy": "exclusive"},
        {"kvplace.io/cpu-policy": "none", "qos.gocrane.io/cpu-manager": "exclusive"},
        {"topology.crane.io/cpu-policy": "none", "qos.gocrane.io/cpu-manager": "share"},
    ],
    ids=" and ".join,
)
def test_spellings_that_contradict_each_other_are_refused_with_both_named(
    annotations: Mapping[str, str],
) -> None:
    with pytest.raises(BadAnnotation) as caught:
        read_options(annotations)
    for key, value in annotations.items():
        assert key in str(caught.value)
        assert repr(value) in str(caught.value)
    assert "keep one, or make them agree" in str(caught.value)


def test_a_typo_in_a_value_is_answered_with_the_word_that_was_meant() -> None:
    with pytest.raises(BadAnnotation) as caught:
        read_options({"cpu-set": "one-sokcet"})
    assert str(caught.value) == (
        "annotation cpu-set: 'one-sokcet': must be one of one-socket, one-numa, one-l3, spread-sockets, "
        "spread-numa, any; did you mean 'one-socket'?"
    )


@pytest.mark.parametrize("key", ["cpu-set", "kvplace.io/cpu-set"])
@pytest.mark.parametrize("value", ["0-3", "2,34", "4"])
def test_cpus_in_place_of_a_scope_are_answered_with_the_meaning_of_the_annotation(
    key: str, value: str
) -> None:
    with pytest.raises(BadAnnotation, match="it names a scope, not CPUs: kvplace chooses the CPUs, as many"):
        read_options({key: value})


@pytest.mark.parametrize("annotations", [{"cpu-set": ""}, {"cpu-set": "any", "kvplace.io/smt": "0-3"}])
def test_only_cpus_in_place_of_a_scope_get_this_answer(annotations: Mapping[str, str]) -> None:
    with pytest.raises(BadAnnotation) as caught:
        read_options(annotations)
    assert "scope" not in str(caught.value)


def test_a_value_near_no_word_is_answered_with_all_of_them() -> None:
    with pytest.raises(BadAnnotation) as caught:
        read_options({"cpu-set": "any", "kvplace.io/smt": "42"})
    assert str(caught.value) == ("annotation kvplace.io/smt: '42': must be one of prefer, require, isolate")


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("kvplace.io/cpuset", "kvplace.io/cpu-set"),
        ("kvplace.io/cpu-polcy", "kvplace.io/cpu-policy"),
        ("kvplace.io/emulator-thread", "kvplace.io/emulator-threads"),
        ("kvplace.io/explains", "kvplace.io/explain"),
        ("kvplace.io/SMT", "kvplace.io/smt"),
    ],
)
def test_a_typo_in_a_key_is_answered_with_the_key_that_was_meant(key: str, meant: str) -> None:
    with pytest.raises(BadAnnotation) as caught:
        read_options({key: "any"})
    assert (
        str(caught.value)
        == f"annotation {key}: 'any': is not an annotation of kvplace; did you mean {meant}?"
    )


@pytest.mark.parametrize("key", ["kvplace.io/colour", "kvplace.io/", "kvplace.io/requests"])
def test_a_key_near_none_is_answered_with_those_that_users_may_write(key: str) -> None:
    with pytest.raises(BadAnnotation) as caught:
        read_options({key: "blue"})
    assert str(caught.value) == (
        f"annotation {key}: 'blue': is not an annotation of kvplace; known are kvplace.io/cpu-set, "
        "kvplace.io/cpu-policy, kvplace.io/smt, kvplace.io/emulator-threads, kvplace.io/numa-memory, "
        "kvplace.io/guest-numa, kvplace.io/device-numa, kvplace.io/on-failure, kvplace.io/explain, "
        "kvplace.io/movable, kvplace.io/make-room"
    )


@given(st.dictionaries(st.sampled_from([*ASKING, "kvplace.io/x", "other"]), st.text(max_size=12)))
def test_any_annotations_are_options_nothing_or_one_sentence(annotations: dict[str, str]) -> None:
    options, sentence = answer_or_sentence(read_options, annotations, BadAnnotation)
    if sentence:
        assert any(sentence.startswith(f"annotation {key}: ") for key in annotations)
    assert options is None or isinstance(options, PinningOptions)


def test_keys_that_nothing_reads_are_distinguished_from_those_of_others() -> None:
    asked = (
        "cpu-sets",
        "cpuset",
        "CPU_SET",
        "cpu-policy",
        "kvplace/smt",
        "Kvplace.io/numa-memory",
        "guestNuma",
    )
    assert list(meant_keys(asked).values()) == [
        *("cpu-set", "cpu-set", "cpu-set", "kvplace.io/cpu-policy", "kvplace.io/smt"),
        *("kvplace.io/numa-memory", "kvplace.io/guest-numa"),
    ]
    assert not meant_keys((*ASKING, *RESULTS, "explain", "movable", "example.org/cpu-set", "kvplace.io/smr"))


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
    "the memory of a guest cell lies on one NUMA node, interleaved memory on all of them; use preferred "
    "or strict"
)
ANYWHERE = "guest cells promise memory near their vCPUs, which off does not provide; use preferred"


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
