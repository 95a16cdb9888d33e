"""Waits of tests for other processes: one patience for all of them.

Patience costs nothing where a test passes. So it is twice as long as the longest pause that a test waits out:
kvplace searches for migrations once a minute, and the kubelet and virt-controller repeat failed work after up
to a minute. It is shorter than the time limit of a test, so that a failure names the missing state.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 120.0


def wait_until(holds: Callable[[], object], missing: Callable[[], str], pause_s: float = 0.02) -> None:
    """Poll until something holds that nothing announces; else the AssertionError names the missing state."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(f"after {PATIENCE_S:.0f} s: {missing()}")
        time.sleep(pause_s)
