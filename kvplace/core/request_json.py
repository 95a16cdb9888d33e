"""The JSON form in which people and programs ask for one VM: the one reader of all commands.

The keys are a stable interface. Everything that is wrong is said in one sentence that names the key,
what it holds and what it may hold; unknown keys are refused, since a misspelt wish is no wish.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, TypeAlias, TypeVar

from kvplace.core.contradictions import contradiction_in
from kvplace.core.errors import BadBody
from kvplace.core.quantity import parse_bytes
from kvplace.core.request import (
    MAX_VCPUS,
    EmulatorThreads,
    GuestNuma,
    NumaMemory,
    OnFailure,
    Policy,
    Request,
    Scope,
    Smt,
)

Json: TypeAlias = dict[str, Any]

REQUEST_KEYS = (
    "vcpus", "cpuSet", "policy", "smt", "emulatorThreads", "numaMemory", "guestNuma", "onFailure",
    "memory", "hugepages", "ioThreads",
)  # fmt: skip
_POLICIES = tuple(policy for policy in Policy if policy is not Policy.NONE)
_KEYS = {Policy: "policy", Smt: "smt", NumaMemory: "numaMemory", GuestNuma: "guestNuma"}
_MOST_IO_THREADS = 65535
_MOST_ID = 256
_Word = TypeVar("_Word", bound=Enum)


def request_of(wish: Mapping[str, Any], *, also: Iterable[str] = ()) -> Request:
    """Read a request, where all but `vcpus` may be left out; raises BadBody.

    `also` are the keys beside it that the caller reads itself.
    """
    known_keys(wish, (*also, *REQUEST_KEYS))
    vcpus = _number(wish, "vcpus", MAX_VCPUS)
    if not vcpus:
        raise BadBody("vcpus is missing or 0; say how many vCPUs the VM has")
    request = Request(
        vcpus=vcpus,
        scope=_word(wish, "cpuSet", Scope.ONE_SOCKET, tuple(Scope)),
        policy=_word(wish, "policy", Policy.EXCLUSIVE, _POLICIES),
        smt=_word(wish, "smt", Smt.PREFER, tuple(Smt)),
        emulator_threads=_word(wish, "emulatorThreads", EmulatorThreads.SHARED, tuple(EmulatorThreads)),
        numa_memory=_word(wish, "numaMemory", NumaMemory.PREFERRED, tuple(NumaMemory)),
        guest_numa=_word(wish, "guestNuma", GuestNuma.OFF, tuple(GuestNuma)),
        on_failure=_word(wish, "onFailure", OnFailure.WAIT, tuple(OnFailure)),
        memory=_bytes(wish.get("memory", 0), "memory"),
        huge_pages=_huge_pages(wish),
        io_threads=_number(wish, "ioThreads", _MOST_IO_THREADS),
    )
    found = contradiction_in(request)
    if found is not None:
        word, other = (f"{_KEYS[type(one)]}: {one.value!r}" for one in (found.word, found.other))
        raise BadBody(f"{word} contradicts {other}: {found.reason}")
    return request


def json_object(text: str, *, what: str) -> Json:
    """Read one JSON object; raises BadBody, also for a key that stands in it twice.

    Two values under one key would make the answer depend on the reader's taste.
    """
    try:
        found = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise BadBody(f"{what} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadBody(f'{what} must be a JSON object such as {{"vcpus": 8}}, not {type(found).__name__}')
    return found


def known_keys(wish: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise BadBody for the first key that is not known, with the one that is probably meant."""
    known = tuple(known)
    for key in wish:
        if key not in known:
            near = difflib.get_close_matches(str(key)[:60], known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise BadBody(f"{shown(key)} is not known; {hint}")


def id_of(wish: Mapping[str, Any], key: str = "id") -> str:
    """Read an id, empty when there is none; raises BadBody unless it can be printed on one line."""
    value = wish.get(key, "")
    if not isinstance(value, str) or len(value) > _MOST_ID or (key in wish and not value):
        raise BadBody(f"{key} must be a text of 1 to {_MOST_ID} characters")
    if not value.isprintable():
        raise BadBody(f"{key} is {shown(value)}; it must consist of printable characters")
    return value


def shown(value: object) -> str:
    """Write a value as it was given, cut to what fits a sentence."""
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python writes
        return f"a number of {int(value).bit_length()} bits" if isinstance(value, int) else "too large"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _unique(pairs: list[tuple[str, Any]]) -> Json:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {shown(key)} stands in it twice")
            seen.add(key)
    return found


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no JSON number")


def _word(wish: Mapping[str, Any], key: str, default: _Word, words: tuple[_Word, ...]) -> _Word:
    value = wish.get(key, default.value)
    for word in words:
        if word.value == value:
            return word
    everything = [str(word.value) for word in type(default)]
    unknown = "asks for nothing to place" if value in everything else "is not known"
    raise BadBody(
        f"{key}: {shown(value)} {unknown}; it must be one of {', '.join(str(w.value) for w in words)}"
    )


def _number(wish: Mapping[str, Any], key: str, most: int, *, what: str = "") -> int:
    value = wish.get(key, 0)
    if type(value) is not int or not 0 <= value <= most:
        raise BadBody(f"{what or key} is {shown(value)}; it must be a whole number up to {most}")
    return value


def _huge_pages(wish: Mapping[str, Any]) -> dict[int, int]:
    pages = wish.get("hugepages", {})
    if not isinstance(pages, dict):
        raise BadBody(
            f'hugepages is {shown(pages)}; it must be an object of counts by page size such as {{"1Gi": 8}}'
        )
    found: dict[int, int] = {}
    for size in pages:
        number = _number(pages, size, 1 << 40, what=f"hugepages: {shown(size)}")
        page = _bytes(size, "hugepages")
        if not page:
            raise BadBody(f"hugepages: {shown(size)} is no page size; write 2Mi or 1Gi")
        if number:
            found[page] = found.get(page, 0) + number
    return found


def _bytes(value: object, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise BadBody(f"{key} is {shown(value)}; it must be a quantity such as 8Gi")
    if isinstance(value, str) and len(value) > 60:
        raise BadBody(f"{key}: {shown(value)} is not a quantity such as 8Gi")
    try:
        count = parse_bytes(value)
    except ValueError as error:
        raise BadBody(f"{key}: {error}") from None
    if count > 1 << 60:
        raise BadBody(f"{key}: {shown(value)} is more than 1Ei")
    return count
