"""Nothing grows in a long life: what is gone is forgotten."""

from __future__ import annotations

import asyncio

import pytest

from tests.serve.churn import Churn
from tests.virtual_time import JumpingLoop

BOUNDED = (".pending._records", "._written", "._rankings", "._states._states")
"""Caches of a fixed size: pods that were deleted before Filter, messages of the last minutes, states.

The last known states of nodes: at most one for each node.
"""


@pytest.mark.timeout(300)
def test_objects_that_are_gone_are_forgotten() -> None:
    async def live() -> list[dict[str, int]]:
        async with Churn() as churn:
            kept = []
            for pods in (400, 800):
                await churn.run(pods)
                kept.append(churn.kept())
            assert churn.happened["bound"] > 700
            assert churn.happened["node added"] > 15
            return kept

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        early, late = runner.run(live())
    grown = {
        place: (early.get(place, 0), size)
        for place, size in late.items()
        if size > early.get(place, 0) + 4 and not any(cache in place for cache in BOUNDED)
    }
    assert grown == {}
    assert late["Extender._fits._states._states"] <= late["Extender._fits._states._of_node"]
    assert late["Extender._fits._rankings[]._order"] < 3000
