"""How much CPU processes have used, as the kernel counts it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process with all its threads since it began."""
    # The program's name in brackets may hold spaces, so count from its end.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def cpu_of_all(pids: Mapping[str, int]) -> dict[str, float]:
    """CPU seconds by name."""
    return {name: cpu_seconds(pid) for name, pid in pids.items()}


def used_since(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """CPU seconds between two readings, by name."""
    return {name: after[name] - before[name] for name in before}
