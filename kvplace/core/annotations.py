"""The annotations of a request, in every spelling, read into `PinningOptions`.

Precedence is kvplace.io, then the bare `cpu-set`, then topology.crane.io, then qos.gocrane.io; since two
spellings that contradict each other are refused, it only decides which of two keys an error names first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from functools import cache
from typing import Any, TypeVar, cast

from kvplace.core.cpu_map import CPU_MAP
from kvplace.core.errors import BadAnnotation
from kvplace.core.placement import PLACEMENT
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

PREFIX = "kvplace.io/"
CPU_SET = "cpu-set"
KVPLACE_CPU_SET = "kvplace.io/cpu-set"
CPU_POLICY = "kvplace.io/cpu-policy"
SMT = "kvplace.io/smt"
EMULATOR_THREADS = "kvplace.io/emulator-threads"
NUMA_MEMORY = "kvplace.io/numa-memory"
GUEST_NUMA = "kvplace.io/guest-numa"
DEVICE_NUMA = "kvplace.io/device-numa"
ON_FAILURE = "kvplace.io/on-failure"
EXPLAIN = "kvplace.io/explain"
MOVABLE = "kvplace.io/movable"
MAKE_ROOM = "kvplace.io/make-room"
CRANE_POLICY = "topology.crane.io/cpu-policy"
CRANE_AWARENESS = "topology.crane.io/topology-awareness"
CRANE_MANAGER = "qos.gocrane.io/cpu-manager"

REQUEST = "kvplace.io/request"
EXPLANATION = "kvplace.io/explanation"
CRANE_RESULT = "topology.crane.io/topology-result"

OPTING_IN = (CPU_SET, KVPLACE_CPU_SET, CPU_POLICY, CRANE_POLICY, CRANE_AWARENESS, CRANE_MANAGER)
"""Keys that request cores; a VM without any of them is not touched."""
MODIFIERS = (
    SMT,
    EMULATOR_THREADS,
    NUMA_MEMORY,
    GUEST_NUMA,
    DEVICE_NUMA,
    ON_FAILURE,
    EXPLAIN,
    MOVABLE,
    MAKE_ROOM,
)
"""Keys that change such a request, and do nothing alone."""
ASKING = (*OPTING_IN, *MODIFIERS)
"""All keys of a request."""

RESULTS = (CPU_MAP, PLACEMENT, REQUEST, EXPLANATION, CRANE_RESULT)
"""Keys that only kvplace writes, and only on pods."""
PLACE_AGAIN = "kvplace.io/place-again"
"""Key of `kvplace defragment` on a running VM: `serve` is to give the pod with this UID, while it has this
revision, better cores if there are some. See `place_again_of`."""
VM_SIZE = "kvplace.io/vm-size"
"""Key that only admission writes, on VMIs: their size as KubeVirt reads it from their spec."""


_FOREIGN_WORDS = (EXPLAIN, MOVABLE)
"""Options with bare words that other programs may use as keys of their own."""


def meant_keys(keys: Iterable[str]) -> dict[str, str]:
    """Return the keys that are likely typos of kvplace's, each with the right one.

    `cpu-sets`, `cpu_set` and a bare `smt` are such keys. Those that begin with `kvplace.io/` are not:
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
    """Name keys of a VM, VMI or pod that have no effect as they are written, and how to write them."""
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
