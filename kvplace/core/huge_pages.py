"""Huge pages, counted by page size: what they hold, and their JSON form `{"1Gi": 8}`."""

from __future__ import annotations

from collections.abc import Mapping

from kvplace.core.quantity import format_bytes, parse_bytes
from kvplace.core.scalars import Bytes
from kvplace.core.strict_json import shown

MOST_PAGES = 1 << 40


def bytes_in_pages(pages: Mapping[Bytes, int]) -> Bytes:
    """Add up what pages hold."""
    return Bytes(sum(size * count for size, count in pages.items()))


def plain_bytes(memory: Bytes, pages: Mapping[Bytes, int]) -> Bytes:
    """State how much memory lies outside huge pages, given all of it."""
    return Bytes(max(0, memory - bytes_in_pages(pages)))


def write_page_counts(pages: Mapping[Bytes, int]) -> dict[str, int]:
    """Write counts by page size, smallest first."""
    return {format_bytes(size): count for size, count in sorted(pages.items())}


def read_page_counts(pages: object, at: str) -> dict[Bytes, int]:
    """Read counts by page size; raises ValueError that names the entry, also for a size given twice."""
    if not isinstance(pages, Mapping):
        raise ValueError(  # noqa: TRY004
            f'{at} is {shown(pages)}; it must be an object of counts by page size such as {{"1Gi": 8}}'
        )
    counts: dict[Bytes, int] = {}
    for text, count in pages.items():
        try:
            size = parse_bytes(text)
        except ValueError as error:
            raise ValueError(f"{at}: {error}") from None
        if not size:
            raise ValueError(f"{at}: {shown(text)} is not a page size; write 2Mi or 1Gi")
        if size in counts:
            raise ValueError(f"{at} has pages of {format_bytes(size)} twice; write one count of them")
        if type(count) is not int or not 0 <= count <= MOST_PAGES:
            raise ValueError(
                f"{at}[{shown(text)}] is {shown(count)}; it must be a whole number from 0 to {MOST_PAGES}"
            )
        counts[size] = count
    return counts
