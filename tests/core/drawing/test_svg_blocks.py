"""The layout of blocks: the shape nearest to a ratio, found without measuring every shape."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest

from kvplace.core.drawing import svg_blocks
from kvplace.core.drawing.svg_blocks import COLOURS, DARK, LIGHT, Block, Scheme, grid


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


Triple = tuple[float, float, float]
Matrix = tuple[Triple, Triple, Triple]

NORMAL: Matrix = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
# Machado, Oliveira and Fernandes 2009, severity 1.0, on linear RGB.
DEUTERANOPIA: Matrix = (
    (0.367322, 0.860646, -0.227968),
    (0.280085, 0.672501, 0.047413),
    (-0.011820, 0.042940, 0.968881),
)
PROTANOPIA: Matrix = (
    (0.152286, 1.052583, -0.204868),
    (0.114503, 0.786281, 0.099216),
    (-0.003882, -0.048116, 1.051998),
)
# Ottosson 2020: from linear sRGB to OKLab, where equal distances appear equally large.
TO_CONES: Matrix = (
    (0.4122214708, 0.5363325363, 0.0514459929),
    (0.2119034982, 0.6806995451, 0.1073969566),
    (0.0883024619, 0.2817188376, 0.6299787005),
)
TO_LAB: Matrix = (
    (0.2104542553, 0.7936177850, -0.0040720468),
    (1.9779984951, -2.4285922050, 0.4505937099),
    (0.0259040371, 0.7827717662, -0.8086757660),
)
JUST_SEEN = 0.02
"""The distance in OKLab that one can just see between two fields side by side."""


def times(matrix: Matrix, vector: Triple) -> Triple:
    a, b, c = (sum(x * y for x, y in zip(row, vector, strict=True)) for row in matrix)
    return a, b, c


def linear(colour: str) -> Triple:
    shares = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    r, g, b = (one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in shares)
    return r, g, b


def seen(colour: str, sight: Matrix) -> Triple:
    r, g, b = (min(1.0, max(0.0, one)) for one in times(sight, linear(colour)))
    x, y, z = (one ** (1 / 3) for one in times(TO_CONES, (r, g, b)))
    return times(TO_LAB, (x, y, z))


def distance(one: str, other: str, sight: Matrix) -> float:
    pairs = zip(seen(one, sight), seen(other, sight), strict=True)
    return float(sum((a - b) ** 2 for a, b in pairs) ** 0.5)


def closest(colours: tuple[str, ...], sight: Matrix) -> float:
    return min(distance(one, other, sight) for one, other in combinations(colours, 2))


SCHEMES = pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
SIGHTS = pytest.mark.parametrize(
    ("sight", "least"),
    [(NORMAL, 3 * JUST_SEEN), (DEUTERANOPIA, 2.2 * JUST_SEEN), (PROTANOPIA, 2.2 * JUST_SEEN)],
    ids=["normal sight", "deuteranopia", "protanopia"],
)


@SCHEMES
@SIGHTS
def test_any_two_vms_differ_by_more_than_can_just_be_seen(
    scheme: Scheme, sight: Matrix, least: float
) -> None:
    assert closest(scheme.vms, sight) >= least


@SCHEMES
def test_the_first_few_vms_of_a_node_differ_most(scheme: Scheme) -> None:
    assert closest(scheme.vms[:6], DEUTERANOPIA) >= 2 * closest(scheme.vms, DEUTERANOPIA)


@SCHEMES
@SIGHTS
def test_the_colour_of_a_vm_is_not_that_of_a_free_cpu(scheme: Scheme, sight: Matrix, least: float) -> None:
    assert min(distance(colour, scheme.page, sight) for colour in scheme.vms) >= least


def test_colours_repeat_only_after_twenty_vms_and_alike_in_both_modes() -> None:
    assert len(set(LIGHT.vms)) == len(set(DARK.vms)) == COLOURS == 20
