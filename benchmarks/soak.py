"""Memory of `serve` after 75,000 pods have come and gone, and more than 50,000 of them were bound.

Two replicas of extender and controller run on a cluster in memory, in virtual time. Pods are bound, refused,
and deleted at every step, some of them together with their nodes. Each row is measured when all pods are
gone again. Objects are the ones that Python's garbage collector knows, of the whole process.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from pathlib import Path

from benchmarks._tables import table
from tests.serve.churn import Churn
from tests.virtual_time import JumpingLoop

ROUNDS = (1_500, 13_500, 15_000, 15_000, 15_000, 15_000)


async def measured() -> list[list[str]]:
    """Let pods come and go; returns a row after each round."""
    rows, came = [], 0
    async with Churn() as churn:
        for pods in ROUNDS:
            await churn.run(pods)
            came += pods
            gc.collect()
            kept = sum(churn.kept().values())
            bound = churn.happened["bound"]
            rows.append(
                [f"{came}", f"{bound}", f"{kept}", f"{len(gc.get_objects())}", f"{resident_mb():.0f} MB"]
            )
    return rows


def resident_mb() -> float:
    """The memory of this process."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024


def main() -> None:
    logging.disable()
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        rows = runner.run(measured())
    print(table(["pods so far", "bound", "kept in containers", "objects", "memory"], rows))


if __name__ == "__main__":
    main()
