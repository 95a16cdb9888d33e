"""Percentiles of measured times."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Percentiles:
    """How long something took, in seconds."""

    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Percentiles:
        """Take the percentiles of measurements; all 0 without any."""
        ordered = sorted(seconds)
        count = len(ordered)
        if not count:
            return cls()
        p50, p95, p99 = (ordered[count * percent // 100] for percent in (50, 95, 99))
        return cls(p50, p95, p99, ordered[-1])
