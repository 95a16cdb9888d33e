"""Percentiles of measured times."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.vm_stages import Percentiles


@given(st.lists(st.floats(0, 10), max_size=50))
def test_percentiles_are_ordered_measurements(seconds: list[float]) -> None:
    found = Percentiles.of(seconds)
    assert found.p50 <= found.p95 <= found.p99 <= found.max == max(seconds, default=0.0)


def test_a_percentile_is_above_its_share_of_the_measurements() -> None:
    assert Percentiles.of(range(200)) == Percentiles(100, 190, 198, 199)
