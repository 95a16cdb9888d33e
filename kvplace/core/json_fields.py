"""The fields of a JSON object, each read with an error that names the field and the values that it may have.

Every document that kvplace reads (annotations, ledgers, machines, requests) is read with `Fields`, so that a
wrong field is reported in the same words everywhere. Errors are ValueErrors; the reader of a document turns
them into an error that names the document. `PinningOptions` have one JSON form in all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from functools import lru_cache
from typing import Any, TypeVar

from kvplace.core.cpuset import MAX_CPU, parse_cpu_list, parse_id
from kvplace.core.quantity import parse_bytes, read_page_counts
from kvplace.core.request import PinningOptions, Scope, scope_hint
from kvplace.core.scalars import Bytes, CpuMask, NumaId
from kvplace.core.strict_json import Json, did_you_mean, shown, unknown_key

MAX_BYTES = 1 << 60
"""More memory than a machine has."""
_MAX_ENTRIES = 16384
_Word = TypeVar("_Word", bound=Enum)


class Fields:
    """The fields of one JSON object."""

    def __init__(self, raw: object, at: str = "it") -> None:
        """`at` names the object in sentences; the fields of the outermost one go by their keys alone."""
        if not isinstance(raw, Mapping):
            raise ValueError(f"{at} is {shown(raw)}; it must be an object")  # noqa: TRY004
        self.raw: Mapping[str, Any] = raw
        self._prefix = "" if at == "it" else f"{at}."

    def at(self, key: str) -> str:
        """Name a field in a sentence."""
        return f"{self._prefix}{key}"

    def bad(self, key: str, what: str) -> ValueError:
        """Make the error for a field with a wrong value."""
        value = shown(self.raw[key]) if key in self.raw else "missing"
        return ValueError(f"{self.at(key)} is {value}; it must be {what}")

    def only(self, known: Iterable[str]) -> None:
        """Raise ValueError for the first key that is not known."""
        if sentence := unknown_key(self.raw, known, self._prefix):
            raise ValueError(sentence)

    def text(self, key: str, default: str | None = None) -> str:
        """Read a text."""
        value = self.raw.get(key, default)
        if not isinstance(value, str):
            raise self.bad(key, "a string")
        return value

    def word(self, key: str, kind: type[_Word], default: _Word | None = None) -> _Word:
        """Read a member of an enum by its value."""
        value = self.raw.get(key, default.value if default is not None else None)
        for member in kind:
            if member.value == value:
                return member
        words = [str(member.value) for member in kind]
        hint = (scope_hint(value) if kind is Scope else "") or did_you_mean(value, words)
        raise self.bad(key, f"one of {', '.join(words)}{hint}")

    def whole(self, key: str, most: int, *, least: int = 0, default: int | None = None) -> int:
        """Read a whole number."""
        value = self.raw.get(key, default)
        if type(value) is not int or not least <= value <= most:
            raise self.bad(key, f"a whole number from {least} to {most}")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """Read true or false."""
        value = self.raw.get(key, default)
        if not isinstance(value, bool):
            raise self.bad(key, "true or false")
        return value

    def ids(self, key: str, most: int = MAX_CPU) -> tuple[int, ...]:
        """Read a list of ids, of CPUs if not up to another number; a missing one is empty."""
        value = self.raw.get(key, [])
        if not isinstance(value, list):
            raise self.bad(key, "a list of ids")
        for index, entry in enumerate(value):
            if type(entry) is not int or not 0 <= entry <= most:
                raise ValueError(
                    f"{self.at(key)}[{index}] is {shown(entry)}; it must be an id from 0 to {most}"
                )
        return tuple(value)

    def cpus(self, key: str, default: str | None = None) -> CpuMask:
        """Read a CPU list."""
        if not isinstance(self.raw.get(key, default), str):
            raise self.bad(key, "a CPU list such as '0-3,8'")
        return parse_cpu_list(self.text(key, default), what=self.at(key))

    def cpu_lists(self, key: str) -> tuple[CpuMask, ...]:
        """Read a list of CPU lists; equal ones are read once, since nodes of one type have the same."""
        entries = self.list(key)
        try:
            return _cpu_lists(tuple(entries))
        except (TypeError, ValueError, AttributeError):
            pass  # read again for an error that names the entry
        lists = []
        for index, entry in enumerate(entries):
            at = f"{self.at(key)}[{index}]"
            if not isinstance(entry, str):
                raise ValueError(f"{at} is {shown(entry)}; it must be a CPU list such as '0-3,8'")  # noqa: TRY004
            lists.append(parse_cpu_list(entry, what=at))
        return tuple(lists)

    def list(self, key: str) -> list[Any]:
        """Read a list."""
        value = self.raw.get(key)
        if not isinstance(value, list):
            raise self.bad(key, "a list")
        if len(value) > _MAX_ENTRIES:
            raise ValueError(f"{self.at(key)} has {len(value)} entries, more than {_MAX_ENTRIES}")
        return value

    def fields(self, key: str) -> Fields:
        """Read an object; a missing one is empty."""
        return Fields({} if self.raw.get(key) is None else self.raw[key], self.at(key))

    def each(self, key: str) -> Iterator[Fields]:
        """Read a list of objects."""
        for index, entry in enumerate(self.list(key)):
            yield Fields(entry, f"{self.at(key)}[{index}]")

    def bytes(self, key: str, default: int | None = None) -> Bytes:
        """Read an amount of memory, a number of bytes or a quantity."""
        value = self.raw.get(key, default)
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise self.bad(key, "a quantity such as 8Gi")
        try:
            count = parse_bytes(value)
        except ValueError as error:
            raise ValueError(f"{self.at(key)}: {error}") from None
        if count > MAX_BYTES:
            raise ValueError(f"{self.at(key)}: {shown(value)} is more than 1Ei")
        return count

    def page_counts(self, key: str) -> dict[Bytes, int]:
        """Read counts by page size; a missing object is empty."""
        return read_page_counts(self.raw.get(key, {}), self.at(key))

    def by_node(self, key: str) -> Iterator[tuple[NumaId, Fields, str]]:
        """Read the NUMA nodes that are the keys of an object: each with the fields and its own key."""
        fields = self.fields(key)
        for node in fields.raw:
            if (number := parse_id(node)) is None:
                raise ValueError(f"{self.at(key)}[{shown(node)}] is not the id of a NUMA node")
            yield NumaId(number), fields, node

    def bytes_by_node(self, key: str) -> dict[NumaId, Bytes]:
        """Read numbers of bytes by NUMA node."""
        return {node: Bytes(fields.whole(own, MAX_BYTES)) for node, fields, own in self.by_node(key)}

    def pages_by_node(self, key: str) -> dict[NumaId, dict[Bytes, int]]:
        """Read counts by page size by NUMA node."""
        return {node: fields.page_counts(own) for node, fields, own in self.by_node(key)}


@lru_cache(maxsize=256)
def _cpu_lists(entries: tuple[str, ...]) -> tuple[CpuMask, ...]:
    return tuple([parse_cpu_list(entry) for entry in entries])


OPTION_KEYS = {
    "cpuSet": "scope",
    "policy": "policy",
    "smt": "smt",
    "emulatorThreads": "emulator_threads",
    "numaMemory": "numa_memory",
    "guestNuma": "guest_numa",
    "deviceNuma": "device_numa",
    "onFailure": "on_failure",
}
"""Field of `PinningOptions` by the key that sets it."""


def options_document(options: PinningOptions) -> Json:
    """Write options; `read_options_document` gives them back unchanged."""
    return {key: getattr(options, field).value for key, field in OPTION_KEYS.items()}


def read_options_document(fields: Fields) -> PinningOptions:
    """Read options, all of them optional; raises ValueError that names the field."""
    defaults = PinningOptions()
    options = {
        field: fields.word(key, type(getattr(defaults, field)), getattr(defaults, field))
        for key, field in OPTION_KEYS.items()
    }
    return PinningOptions(**options)
