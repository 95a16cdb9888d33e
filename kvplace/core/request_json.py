"""The JSON form in which people and programs ask for one VM: the one reader of all commands.

The keys are a stable interface. Everything that is wrong is said in one sentence that names the key,
what it holds and what it may hold; unknown keys are refused, since a misspelt wish is no wish.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, TypeVar

from kvplace.core.contradictions import contradiction_in
from kvplace.core.errors import BadBody
from kvplace.core.quantity import about_bytes, format_bytes, parse_bytes
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
from kvplace.core.strict_json import known_keys, shown

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
    if wish.get("vcpus", 0) == 0:
        raise BadBody("vcpus is missing or 0; say how many vCPUs the VM has")
    vcpus = _number(wish, "vcpus", MAX_VCPUS, least=1)
    request = Request(
        vcpus=vcpus,
        options=PinningOptions(
            scope=_word(wish, "cpuSet", Scope.ONE_SOCKET, tuple(Scope)),
            policy=_word(wish, "policy", Policy.EXCLUSIVE, _POLICIES),
            smt=_word(wish, "smt", Smt.PREFER, tuple(Smt)),
            emulator_threads=_word(wish, "emulatorThreads", EmulatorThreads.SHARED, tuple(EmulatorThreads)),
            numa_memory=_word(wish, "numaMemory", NumaMemory.PREFERRED, tuple(NumaMemory)),
            guest_numa=_word(wish, "guestNuma", GuestNuma.OFF, tuple(GuestNuma)),
            on_failure=_word(wish, "onFailure", OnFailure.WAIT, tuple(OnFailure)),
        ),
        memory=_bytes(wish.get("memory", 0), "memory"),
        huge_pages=_huge_pages(wish),
        io_threads=_number(wish, "ioThreads", _MOST_IO_THREADS),
    )
    _check_pages(request)
    found = contradiction_in(request.options)
    if found is not None:
        word, other = (f"{_KEYS[type(one)]}: {one.value!r}" for one in (found.word, found.other))
        raise BadBody(f"{word} contradicts {other}: {found.reason}")
    return request


def id_of(wish: Mapping[str, Any], key: str = "id") -> str:
    """Read an id, empty when there is none; raises BadBody unless it can be printed on one line."""
    value = wish.get(key, "")
    if not isinstance(value, str) or len(value) > _MOST_ID or (key in wish and not value):
        raise BadBody(f"{key} must be a text of 1 to {_MOST_ID} characters")
    if not value.isprintable():
        raise BadBody(f"{key} is {shown(value)}; it must consist of printable characters")
    return value


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


def _number(wish: Mapping[str, Any], key: str, most: int, *, least: int = 0, what: str = "") -> int:
    value = wish.get(key, least)
    if type(value) is not int or not least <= value <= most:
        raise BadBody(f"{what or key} is {shown(value)}; it must be a whole number from {least} to {most}")
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
        if page in found:
            raise BadBody(f"hugepages names pages of {format_bytes(page)} twice; write one count of them")
        found[page] = number
    return {page: number for page, number in found.items() if number}


def _check_pages(request: Request) -> None:
    """Refuse a page more than the memory fills: what lies in huge pages is part of it."""
    paged = sum(size * count for size, count in request.huge_pages.items())
    if request.memory and paged - request.memory >= min(request.huge_pages, default=0) > 0:
        raise BadBody(
            f"hugepages hold {about_bytes(paged)}, more than the {about_bytes(request.memory)} of memory that"
            " they are part of"
        )


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
