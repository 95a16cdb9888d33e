"""The layout of blocks: the shape nearest to a ratio, found without measuring every shape."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvplace.core.drawing import svg_blocks
from kvplace.core.drawing.svg_blocks import Block, grid


def _blocks(sizes: list[tuple[float, float]]) -> list[Block]:
    return [Block(width, height, lambda *_: None) for width, height in sizes]


@pytest.mark.parametrize(
    ("count", "ratio", "columns", "rows"),
    [(1, 2.0, 1, 1), (8, 2.0, 4, 2), (6, 1.0, 2, 3), (6, 9.0, 6, 1), (7, 1.0, 3, 3), (5, 0.2, 1, 5)],
)
def test_blocks_take_the_shape_nearest_to_the_ratio(
    count: int, ratio: float, columns: int, rows: int
) -> None:
    laid_out = grid(_blocks([(30.0, 30.0)] * count), 4, ratio)
    assert (laid_out.width, laid_out.height) == (columns * 34 - 4, rows * 34 - 4)


def test_a_column_is_as_wide_as_its_widest_block_and_a_row_as_high_as_its_highest() -> None:
    laid_out = grid(_blocks([(30.0, 30.0), (60.0, 30.0), (40.0, 50.0), (20.0, 10.0)]), 0, 1.0)
    assert (laid_out.width, laid_out.height) == (40 + 60, 30 + 50)


@pytest.mark.parametrize(
    "sizes",
    [
        [(32.0, 32.0)] * 16_384,
        [(32.0, 60.0), (32.0, 60.0), (32.0, 32.0), (60.0, 60.0)] * 4_096,
        [(4_200.0, 4_000.0), *[(44.0, 66.0)] * 16_383],
    ],
    ids=["all alike", "of three sizes", "one giant"],
)
def test_of_thousands_of_blocks_one_layout_is_measured(
    sizes: list[tuple[float, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int] = []
    measures = svg_blocks._measures

    def counted(blocks: Sequence[Block], columns: int) -> tuple[list[float], list[float]]:
        measured.append(columns)
        return measures(blocks, columns)

    monkeypatch.setattr(svg_blocks, "_measures", counted)
    grid(_blocks(sizes), 4, 3.2)
    assert len(measured) == 1
