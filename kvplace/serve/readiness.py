"""When `serve` is ready: from its first complete lists until its end, unless the API server is out of reach.

Out of reach means that every watch has failed for a while: this replica then decides on what was true, and
another one may know better. A single watch that fails does not make it unready. The cause of that (a missing
right, a broken kind) is mostly the same for all replicas, and without a ready one admission refuses every VM
that asks for cores; with a stale cache Filter is wrong more often, and Bind still asks the API server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvplace.kube.store import Store
from kvplace.service.health import Health, Readiness


@dataclass(slots=True)
class ServeReadiness(Readiness):
    """Ready without an obstacle and while at least one watch works."""

    patience_s: float = 30.0
    """How long all watches may fail; shorter than kube-scheduler's pauses between attempts get."""
    stores: Sequence[Store[Any, Any]] = field(default=())
    """The stores that decisions rest on."""

    def health(self) -> Health:
        """Return whether the replica can serve, and what is wrong."""
        if self.obstacle:
            return Health(False, self.obstacle)
        failing = [store for store in self.stores if store.failing_s >= self.patience_s]
        if not failing:
            return Health(True, "ok")
        shortest = min(failing, key=lambda store: store.failing_s)
        lasting = f"for {shortest.failing_s:.0f} s: {shortest.failure}"
        if len(failing) == len(self.stores):
            return Health(False, f"every watch of the API server has failed {lasting}")
        kinds = ", ".join(store.kind.name for store in failing)
        return Health(True, f"ok, but what is known of {kinds} grows old; watching has failed {lasting}")


async def hang_up_while_unready(
    readiness: Readiness, hang_up: Callable[[], None], *, every_s: float = 1.0
) -> None:
    """End the connections of kube-scheduler whenever this replica cannot serve, until cancelled.

    A Service chooses among ready replicas only when a connection is opened. kube-scheduler keeps its own open
    and would ask this replica for ever.
    """
    while True:
        await asyncio.sleep(every_s)
        if not readiness.health().is_ready:
            hang_up()
