"""The layout of blocks: the shape nearest to the one wanted, found without looking at every shape."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.drawing import svg_blocks
from kvplace.core.drawing.svg_blocks import Block, grid


def _blocks(sizes: list[tuple[float, float]]) -> list[Block]:
    return [Block(width, height, lambda *_: None) for width, height in sizes]


_SIZES = st.one_of(
    st.integers(1, 60).map(lambda count: [(32.0, 60.0)] * count),
    st.lists(st.sampled_from([(32.0, 32.0), (32.0, 60.0), (60.0, 60.0)]), min_size=1, max_size=60),
    st.lists(st.tuples(st.floats(1, 9_000), st.floats(1, 9_000)), min_size=1, max_size=30),
)


@given(sizes=_SIZES, gap=st.sampled_from([4.0, 8.0, 12.0]), ratio=st.floats(0.3, 12))
def test_no_number_of_columns_comes_nearer_to_the_ratio(
    sizes: list[tuple[float, float]], gap: float, ratio: float
) -> None:
    blocks = _blocks(sizes)
    nearest = min(
        range(1, len(blocks) + 1), key=lambda columns: svg_blocks._deviation(blocks, columns, gap, ratio)
    )
    widths, heights = svg_blocks._measures(blocks, nearest)
    laid_out = grid(blocks, gap, ratio)
    assert laid_out.width == sum(widths) + gap * (len(widths) - 1)
    assert laid_out.height == sum(heights) + gap * (len(heights) - 1)


@pytest.mark.parametrize(
    "sizes",
    [
        [(32.0, 32.0)] * 16_384,
        [(32.0, 60.0), (32.0, 60.0), (32.0, 32.0), (60.0, 60.0)] * 4_096,
        [(4_200.0, 4_000.0), *[(44.0, 66.0)] * 16_383],
    ],
    ids=["all alike", "of three sizes", "one giant"],
)
def test_of_thousands_of_blocks_few_layouts_are_measured(
    sizes: list[tuple[float, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int] = []
    measures = svg_blocks._measures

    def counted(blocks: Sequence[Block], columns: int) -> tuple[list[float], list[float]]:
        measured.append(columns)
        return measures(blocks, columns)

    monkeypatch.setattr(svg_blocks, "_measures", counted)
    grid(_blocks(sizes), 4, 3.2)
    assert len(measured) < 400
