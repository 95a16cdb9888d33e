"""CPU sets as int bitmasks, and the Linux cpu list form of them.

Bit *n* stands for the CPU (or NUMA node) that Linux numbers *n*. Plain ints are an order of
magnitude faster than sets here, hash by value and need no wrapper in the allocator's inner loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from kvplace.core.scalars import NO_CPUS, CpuId, CpuMask

MAX_CPU = 16383
"""Highest id we accept: libvirt's limit (VIR_DOMAIN_CPUMASK_LEN is 16384)."""


def mask_of(cpus: Iterable[int]) -> CpuMask:
    """Make a set of the given ids."""
    mask = 0
    for cpu in cpus:
        mask |= 1 << cpu
    return CpuMask(mask)


def union(sets: Iterable[CpuMask]) -> CpuMask:
    """Join sets."""
    joined = NO_CPUS
    for mask in sets:
        joined |= mask
    return joined


def bits_of(mask: int) -> Iterator[int]:
    """Yield the numbers of the bits that are set, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


if TYPE_CHECKING:

    def cpus_of(mask: CpuMask) -> Iterator[CpuId]:
        """Yield the ids of a set of CPUs, ascending."""

else:
    cpus_of = bits_of  # a call of CpuId for each CPU would cost more than the loop


def place_of_each(sets: Iterable[CpuMask]) -> dict[CpuId, int]:
    """Map each CPU to the index of the set that contains it."""
    return {cpu: place for place, mask in enumerate(sets) for cpu in cpus_of(mask)}


def lowest(mask: CpuMask, count: int) -> CpuMask:
    """Take the `count` lowest ids of a set; fewer when it has fewer."""
    taken = 0
    for _ in range(count):
        low = mask & -mask
        if not low:
            break
        taken |= low
        mask ^= low
    return CpuMask(taken)


def parse_id(text: str) -> int | None:
    """Read the id of a CPU or NUMA node; None for any other text."""
    is_number = text.isascii() and text.isdigit() and len(text) <= 5
    return int(text) if is_number and int(text) <= MAX_CPU else None


def parse_cpu_list(text: str, *, what: str = "CPU list") -> CpuMask:
    """Read the Linux form `0-3,8` into a set.

    Blanks around items and a NUL or newline at the end are tolerated (sysfs has both), and an empty
    text is the empty set. Raises ValueError with one sentence that starts with `what`.
    """
    mask = 0
    cleaned = text.strip("\0 \t\r\n")
    if not cleaned:
        return NO_CPUS
    where = f"{what} {_shorten(cleaned)!r}"
    for item in map(str.strip, cleaned.split(",")):
        first_text, dash, last_text = item.partition("-")
        if not (first_text.isascii() and first_text.isdigit()) or (
            dash and not (last_text.isascii() and last_text.isdigit())
        ):
            raise ValueError(f"{where}: {_shorten(item)!r} is neither a number nor a range like 2-5")
        if len(first_text) > 6 or len(last_text) > 6 or int(last_text or first_text) > MAX_CPU:
            raise ValueError(f"{where}: {_shorten(item)!r} is above the highest id {MAX_CPU}")
        first = int(first_text)
        last = int(last_text) if dash else first
        if last < first:
            raise ValueError(f"{where}: the range {_shorten(item)!r} runs backwards")
        mask |= (1 << (last + 1)) - (1 << first)
    return CpuMask(mask)


def format_cpu_list(mask: int) -> str:
    """Write a set in the Linux form, `0-3,8`; the empty set is the empty text."""
    parts: list[str] = []
    while mask:
        first = (mask & -mask).bit_length() - 1
        run = mask >> first
        length = (~run & (run + 1)).bit_length() - 1
        last = first + length - 1
        parts.append(str(first) if length == 1 else f"{first}-{last}")
        mask = (mask >> (last + 1)) << (last + 1)
    return ",".join(parts)


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
