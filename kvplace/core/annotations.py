"""The annotations of a request, in every spelling, read into `PinningOptions` that do not exclude each other.

Precedence is kvplace.io, then the bare `cpu-set`, then topology.crane.io, then qos.gocrane.io; since two
spellings that contradict each other are refused, it only decides which of two keys an error names first.

Two options that cannot both be kept are refused at admission, where their author sees it, with both named.
So nothing after admission has to choose between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeVar, cast

from kvplace.core.errors import BadAnnotation
from kvplace.core.request import (
    DeviceNuma,
    EmulatorThreads,
    GuestNuma,
    NumaMemory,
    OnFailure,
    PinningOptions,
    Policy,
    Scope,
    Smt,
    scope_hint,
)
from kvplace.core.scalars import PodUid
from kvplace.core.strict_json import did_you_mean, near_word
from kvplace.core.well_known_names import (
    ASKING,
    CPU_POLICY,
    CPU_SET,
    CRANE_AWARENESS,
    CRANE_MANAGER,
    CRANE_POLICY,
    DEVICE_NUMA,
    EMULATOR_THREADS,
    EXPLAIN,
    GUEST_NUMA,
    KVPLACE_CPU_SET,
    MAKE_ROOM,
    MODIFIERS,
    MOVABLE,
    NUMA_MEMORY,
    ON_FAILURE,
    OPTING_IN,
    PLACE_AGAIN,
    PREFIX,
    RESULTS,
    SMT,
    VM_SIZE,
)

_FOREIGN_WORDS = (EXPLAIN, MOVABLE)
"""Options with bare words that other programs may use as keys of their own."""


def meant_keys(keys: Iterable[str]) -> dict[str, str]:
    """Return the keys that are likely typos of kvplace's, each with the right one.

    `cpu-sets`, `cpu_set` and a bare `smt` are such keys. Keys that begin with `kvplace.io/` are not:
    admission refuses them.
    """
    meant = {
        _folded(known): CPU_SET if known == KVPLACE_CPU_SET else known
        for known in ASKING
        if known.startswith(PREFIX) and known not in _FOREIGN_WORDS
    }
    return {
        key: meant[_folded(key)]
        for key in keys
        if key not in ASKING and not key.startswith(PREFIX) and _folded(key) in meant
    }


def _folded(key: str) -> str:
    word = key.lower().removeprefix(PREFIX).removeprefix("kvplace/")
    return word.replace("-", "").replace("_", "").replace("cpusets", "cpuset")


def read_options(annotations: Mapping[str, str]) -> PinningOptions | None:
    """Read the options of a VM; None when it has not opted in and must not be touched.

    Raises BadAnnotation for an unknown value, an unknown `kvplace.io/` key, or two spellings that
    contradict each other (both are named).
    """
    _refuse_unknown_keys(annotations)
    opted_in = [key for key in OPTING_IN if key in annotations]
    if not opted_in:
        return None
    scope = _one_of_spellings(
        annotations, {KVPLACE_CPU_SET: _words(Scope), CPU_SET: _words(Scope), CRANE_AWARENESS: _AWARENESS}
    )
    policy = _one_of_spellings(
        annotations,
        {CPU_POLICY: _words(Policy), CRANE_POLICY: _CRANE_POLICIES, CRANE_MANAGER: _CRANE_MANAGERS},
    )
    if opted_in == [CRANE_AWARENESS] and scope is None:  # it declines
        return None
    for read in (wants_explanation, is_movable, wants_room):
        read(annotations)
    return PinningOptions(
        scope=scope or Scope.ONE_SOCKET,
        policy=policy or Policy.EXCLUSIVE,
        smt=_word(annotations, SMT, Smt, Smt.PREFER),
        emulator_threads=_word(annotations, EMULATOR_THREADS, EmulatorThreads, EmulatorThreads.SHARED),
        numa_memory=_word(annotations, NUMA_MEMORY, NumaMemory, NumaMemory.PREFERRED),
        guest_numa=_word(annotations, GUEST_NUMA, GuestNuma, GuestNuma.OFF),
        device_numa=_word(annotations, DEVICE_NUMA, DeviceNuma, DeviceNuma.PREFERRED),
        on_failure=_word(annotations, ON_FAILURE, OnFailure, OnFailure.WAIT),
    )


def without_effect(annotations: Mapping[str, str]) -> tuple[str, ...]:
    """Warn, in one sentence for each, of modifiers of an object that has not opted in."""
    if any(key in annotations for key in OPTING_IN):
        return ()
    return tuple(
        f"annotation {key} has no effect alone: add {CPU_SET}: {Scope.ONE_SOCKET.value} to request cores"
        for key in MODIFIERS
        if key in annotations
    )


def written_without_effect(document: Mapping[str, Any]) -> Iterator[str]:
    """Name keys of a VM, VMI or pod that are written without effect, and the right spelling."""
    template = (document.get("spec") or {}).get("template")
    asked = _keys(template or document, "annotations")
    for key, meant in meant_keys(asked).items():
        yield f"annotation {key} has no effect: did you mean {meant}?"
    yield from without_effect(dict.fromkeys(asked, ""))
    labels = _keys(template or document, "labels")
    for key, meant in {**meant_keys(labels), **{key: key for key in labels if key in ASKING}}.items():
        yield f"label {key} has no effect: write the annotation {meant}"
    if template is not None:
        for key in _keys(document, "annotations"):
            if key in ASKING:
                yield f"annotation {key} has no effect here: move it to spec.template.metadata.annotations"


def _keys(document: Mapping[str, Any], kind: str) -> tuple[str, ...]:
    return tuple((document.get("metadata") or {}).get(kind) or ())


def wants_explanation(annotations: Mapping[str, str]) -> bool:
    """Whether the reasons for the choice of the node are to be written on the pod; raises BadAnnotation."""
    return _flag(annotations, EXPLAIN)


def is_movable(annotations: Mapping[str, str]) -> bool:
    """Whether the VM may get other cores while it runs, to make room for others; raises BadAnnotation."""
    return _lookup(annotations, MOVABLE, {**_FLAGS, _NODES: True}) or False


def may_migrate(annotations: Mapping[str, str]) -> bool:
    """Whether the VM may also go to another node to make room for others."""
    return annotations.get(MOVABLE) == _NODES


def place_again_of(uid: PodUid, revision: int) -> str:
    """Write the value of `kvplace.io/place-again`: it counts for one revision of one pod, so at most once."""
    return f"{uid}/{revision}"


def wants_room(annotations: Mapping[str, str]) -> bool:
    """Whether movable VMs are to make room for the VM where it does not fit; raises BadAnnotation."""
    return _flag(annotations, MAKE_ROOM)


def wants_crane_result(annotations: Mapping[str, str]) -> bool:
    """Whether any key of Crane is set: its tools then expect the result in Crane's own annotation, too."""
    return any(key in annotations for key in (CRANE_POLICY, CRANE_AWARENESS, CRANE_MANAGER))


_Word = TypeVar("_Word", bound=Enum)
_Value = TypeVar("_Value")

_FLAGS = {"true": True, "false": False}
_NODES = "nodes"
"""Value of `kvplace.io/movable`: other cores of its node, or another node."""
_AWARENESS: dict[str, Scope | None] = {"true": Scope.ONE_NUMA, "false": None}
_CRANE_POLICIES: dict[str, Policy | None] = {
    word: Policy(word) for word in ("none", "exclusive", "numa", "immovable")
}
_CRANE_MANAGERS: dict[str, Policy | None] = {word: Policy(word) for word in ("none", "exclusive", "share")}


def _words(kind: type[_Word]) -> Mapping[str, _Word | None]:
    return cast(Mapping[str, _Word | None], _members(kind))


@cache
def _members(kind: type[Enum]) -> Mapping[str, Enum]:
    return {member.value: member for member in kind}


def _word(annotations: Mapping[str, str], key: str, kind: type[_Word], default: _Word) -> _Word:
    return _lookup(annotations, key, _words(kind)) or default


def _flag(annotations: Mapping[str, str], key: str) -> bool:
    return _lookup(annotations, key, _FLAGS) or False


def _lookup(annotations: Mapping[str, str], key: str, words: Mapping[str, _Value]) -> _Value | None:
    value = annotations.get(key)
    if value is None:
        return None
    if value not in words:
        hint = scope_hint(value) if key in (CPU_SET, KVPLACE_CPU_SET) else ""
        hint = hint or did_you_mean(value, words)
        raise BadAnnotation(key, value, f"must be one of {', '.join(words)}{hint}")
    return words[value]


def _one_of_spellings(
    annotations: Mapping[str, str], spellings: Mapping[str, Mapping[str, _Value | None]]
) -> _Value | None:
    chosen: tuple[str, _Value] | None = None
    for key, words in spellings.items():
        value = _lookup(annotations, key, words)
        if value is None:
            continue
        if chosen is not None and chosen[1] != value:
            raise BadAnnotation(
                key,
                annotations[key],
                f"contradicts {chosen[0]}: {annotations[chosen[0]]!r}; keep one, or make them agree",
            )
        chosen = chosen or (key, value)
    return chosen[1] if chosen else None


def _refuse_unknown_keys(annotations: Mapping[str, str]) -> None:
    for key, value in annotations.items():
        if not key.startswith(PREFIX) or key in (*ASKING, *RESULTS, PLACE_AGAIN, VM_SIZE):
            continue
        asking = [known.removeprefix(PREFIX) for known in ASKING if known.startswith(PREFIX)]
        near = near_word(key.removeprefix(PREFIX), asking)
        hint = (
            f"did you mean {PREFIX}{near}?"
            if near
            else f"known are {', '.join(PREFIX + known for known in asking)}"
        )
        raise BadAnnotation(key, value, f"is not an annotation of kvplace; {hint}")


_KEYS: Mapping[type[Enum], tuple[str, ...]] = {
    Policy: (CPU_POLICY, CRANE_POLICY, CRANE_MANAGER),
    Smt: (SMT,),
    NumaMemory: (NUMA_MEMORY,),
    GuestNuma: (GUEST_NUMA,),
}


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Two options that exclude each other, the reason, and the fix."""

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
        "the memory of a guest cell lies on one NUMA node, interleaved memory on all of them; use "
        "preferred or strict",
    ),
    Contradiction(
        GuestNuma.MIRROR,
        NumaMemory.OFF,
        "guest cells promise memory near their vCPUs, which off does not provide; use preferred",
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
