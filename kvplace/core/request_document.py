"""The annotation `kvplace.io/request`: a normalised request on its way from admission to the extender.

Pod admission writes it and nobody else; the extender reads nothing else of the pod.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from kvplace.core.annotations import REQUEST
from kvplace.core.errors import BadAnnotation
from kvplace.core.quantity import format_bytes, parse_page_counts
from kvplace.core.request import (
    MAX_VCPUS,
    EmulatorThreads,
    GuestNuma,
    NumaMemory,
    OnFailure,
    PinningOptions,
    Policy,
    Request,
    Scope,
    Smt,
)
from kvplace.core.strict_json import shown

VERSION = 1
_MAX_TEXT = 16 * 1024
_Word = TypeVar("_Word", bound=Enum)


@dataclass(frozen=True)
class PodRequest:
    """A request together with what is needed to answer it on the pod it came from."""

    request: Request
    vmi: str = ""
    """`namespace/name` of the VMI, empty for a plain pod."""
    explain: bool = False
    crane_result: bool = False
    """Whether the result is also written in Crane's annotation."""


def write_request(pod: PodRequest) -> str:
    """Write the annotation's one line."""
    request, options = pod.request, pod.request.options
    return json.dumps(
        {
            "version": VERSION,
            "vcpus": request.vcpus,
            "cpuSet": options.scope.value,
            "policy": options.policy.value,
            "smt": options.smt.value,
            "emulatorThreads": options.emulator_threads.value,
            "numaMemory": options.numa_memory.value,
            "guestNuma": options.guest_numa.value,
            "onFailure": options.on_failure.value,
            "memory": request.memory,
            "hugepages": {format_bytes(size): count for size, count in sorted(request.huge_pages.items())},
            "ioThreads": request.io_threads,
            "vmi": pod.vmi,
            "explain": pod.explain,
            "craneResult": pod.crane_result,
        },
        separators=(",", ":"),
    )


def read_request(text: str) -> PodRequest:
    """Read the annotation; raises BadAnnotation that names the field."""
    if len(text) > _MAX_TEXT:
        raise BadAnnotation(REQUEST, text, f"is longer than {_MAX_TEXT} characters")
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        raise BadAnnotation(
            REQUEST, text, "is not JSON; only pod admission writes it, delete the pod"
        ) from None
    if not isinstance(raw, dict) or type(raw.get("version")) is not int or raw["version"] != VERSION:
        raise BadAnnotation(
            REQUEST, text, f"must be an object of version {VERSION}; only pod admission writes it"
        )
    try:
        huge_pages = parse_page_counts(raw.get("hugepages", {}))
    except ValueError as error:
        raise BadAnnotation(REQUEST, text, f"hugepages: {error}") from None
    vmi = raw.get("vmi", "")
    if not isinstance(vmi, str):
        raise BadAnnotation(REQUEST, text, "vmi must be a text")
    vcpus = _number(text, "vcpus", raw.get("vcpus"), MAX_VCPUS)
    if vcpus < 1:
        raise BadAnnotation(REQUEST, text, "vcpus must be at least 1")
    return PodRequest(
        Request(
            vcpus=vcpus,
            options=PinningOptions(
                scope=_word(text, raw, "cpuSet", Scope),
                policy=_word(text, raw, "policy", Policy),
                smt=_word(text, raw, "smt", Smt),
                emulator_threads=_word(text, raw, "emulatorThreads", EmulatorThreads),
                numa_memory=_word(text, raw, "numaMemory", NumaMemory),
                guest_numa=_word(text, raw, "guestNuma", GuestNuma),
                on_failure=_word(text, raw, "onFailure", OnFailure),
            ),
            memory=_number(text, "memory", raw.get("memory", 0), 1 << 60),
            huge_pages=huge_pages,
            io_threads=_number(text, "ioThreads", raw.get("ioThreads", 0), 65535),
        ),
        vmi=vmi,
        explain=raw.get("explain") is True,
        crane_result=raw.get("craneResult") is True,
    )


def _number(text: str, key: str, value: object, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise BadAnnotation(
            REQUEST, text, f"{key} is {shown(value)}; it must be a whole number from 0 to {most}"
        )
    return value


def _word(text: str, raw: dict[str, Any], key: str, kind: type[_Word]) -> _Word:
    for member in kind:
        if raw.get(key) == member.value:
            return member
    offered = ", ".join(str(member.value) for member in kind)
    raise BadAnnotation(REQUEST, text, f"{key} is {shown(raw.get(key))}; it must be one of {offered}")
