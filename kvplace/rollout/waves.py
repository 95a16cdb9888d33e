"""Which VMs are made next: waves, and how many may be on their way at once. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum


class Status(Enum):
    """The part of a VM's state that waves need."""

    TO_MAKE = "to make"
    UNDER_WAY = "under way"
    THERE = "there"
    FAILED = "failed"

    @property
    def is_settled(self) -> bool:
        """Whether nothing more is awaited."""
        return self in (Status.THERE, Status.FAILED)


def wave_ends(sizes: Sequence[int | str], total: int) -> tuple[int, ...]:
    """Return where each wave ends: the first number of VMs after it. What is left forms the last wave."""
    ends: list[int] = []
    for size in sizes:
        before = ends[-1] if ends else 0
        vms = size if isinstance(size, int) else max(1, total * int(size.removesuffix("%")) // 100)
        if before + vms >= total:
            break
        ends.append(before + vms)
    return (*ends, total)


def due(
    statuses: Sequence[Status], ends: Sequence[int], max_in_flight: int, max_failures: int | None = None
) -> Iterator[int]:
    """Yield the numbers of the VMs that are made now, in order.

    A wave begins when every VM before it is there or has failed.
    """
    if max_failures is not None and statuses.count(Status.FAILED) >= max_failures:
        return
    room = max_in_flight - statuses.count(Status.UNDER_WAY)
    for number, status in enumerate(statuses[: _open_until(statuses, ends)]):
        if room <= 0:
            return
        if status is Status.TO_MAKE:
            room -= 1
            yield number


def _open_until(statuses: Sequence[Status], ends: Sequence[int]) -> int:
    for end in ends:
        if not all(status.is_settled for status in statuses[:end]):
            return end
    return ends[-1]
