"""Blocks of an SVG drawing: laid out in stacks and grids, then written as elements.

A block has a minimum size; the block around it decides its real size, so that frames side by side end on one
line. Text is measured with the usual widths of its font: a browser with another font draws it a little
narrower or wider, and nothing here depends on that.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from xml.etree.ElementTree import Element, SubElement

Draw = Callable[[Element, float, float, float, float], None]
"""Writes a block into a parent element at x and y, with a width and a height."""

_ROUNDING = 1e-9
"""More than the rounding errors of sums of lengths."""


@dataclass(frozen=True, slots=True)
class Block:
    """Something to draw, and its minimum size."""

    width: float
    height: float
    draw: Draw


def tag(parent: Element, name: str, text: str = "", /, **attributes: str | float) -> Element:
    """Add an element; underscores in attribute names become hyphens, a trailing one is removed."""
    written = {
        key.rstrip("_").replace("_", "-"): value if isinstance(value, str) else number(value)
        for key, value in attributes.items()
    }
    element = SubElement(parent, name, written)
    element.text = text or None
    return element


def number(value: float) -> str:
    """Write a coordinate with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def text_width(text: str, size: float) -> float:
    """Estimate the width of a text in a monospaced font of a size."""
    return sum(map(_letter_width, text)) * size


def shortened(text: str, size: float, width: float) -> str:
    """Cut a text to a width, with an ellipsis where it is cut."""
    most = width / size
    kept, used = 0, 0.0
    for letter in text:
        used += _letter_width(letter)
        if used > most:
            return text[:kept] + "…"
        kept += used + _letter_width("…") <= most
    return text


def _letter_width(letter: str) -> float:
    return 1.204 if unicodedata.east_asian_width(letter) in "WF" else 0.602


def stack(blocks: Sequence[Block], gap: float) -> Block:
    """Put blocks below each other, each over the full width."""
    width = max((block.width for block in blocks), default=0)
    height = sum(block.height for block in blocks) + gap * max(0, len(blocks) - 1)

    def draw(parent: Element, x: float, y: float, given: float, _height: float) -> None:
        for block in blocks:
            block.draw(parent, x, y, given, block.height)
            y += block.height + gap

    return Block(width, height, draw)


def grid(blocks: Sequence[Block], gap: float, ratio: float) -> Block:
    """Put one or more blocks into a grid, row by row, with a shape close to `ratio` (width by height).

    A last row that is not full is avoided where the ratio allows it.
    """
    columns = _columns(blocks, gap, ratio)
    widths, heights = _measures(blocks, columns)

    def draw(parent: Element, x: float, y: float, given: float, tall: float) -> None:
        wider = max(0.0, given - _total(widths, gap)) / len(widths)
        taller = max(0.0, tall - _total(heights, gap)) / len(heights)
        top = y
        for row, height in enumerate(heights):
            left = x
            for block, width in zip(blocks[row * columns :], widths, strict=False):
                block.draw(parent, left, top, width + wider, height + taller)
                left += width + wider + gap
            top += height + taller + gap

    return Block(_total(widths, gap), _total(heights, gap), draw)


def fixed(block: Block) -> Block:
    """Keep a block at its minimum size, in the upper left corner."""

    def draw(parent: Element, x: float, y: float, _width: float, _height: float) -> None:
        block.draw(parent, x, y, block.width, block.height)

    return Block(block.width, block.height, draw)


def _columns(blocks: Sequence[Block], gap: float, ratio: float) -> int:
    """Find the number of columns whose shape is closest to `ratio`, the smallest of several.

    Numbers are measured in the order of their lower bounds, until no other can be better: measuring all of
    them would take minutes for thousands of blocks.
    """
    least = _least_deviation(blocks, gap, ratio)
    best, chosen = math.inf, 1
    for bound, count in sorted((bound, count) for count, bound in enumerate(least, 1)):
        if bound > best + _ROUNDING:
            break
        best, chosen = min((best, chosen), (_deviation(blocks, count, gap, ratio), count))
    return chosen


def _least_deviation(blocks: Sequence[Block], gap: float, ratio: float) -> list[float]:
    """Lower bounds of `_deviation` for 1, 2, ... columns, from the sizes of the blocks alone."""
    widths = _bounds([block.width for block in blocks], gap)
    heights = _bounds([block.height for block in blocks], gap)
    bounds = []
    for columns, (narrowest, widest) in enumerate(widths, 1):
        lowest, highest = heights[-(-len(blocks) // columns) - 1]
        slimmest, flattest = (narrowest + 1) / (highest + 1), (widest + 1) / (lowest + 1)
        off = max(0.0, math.log(slimmest / ratio), -math.log(flattest / ratio))
        bounds.append(off + _missing(blocks, columns))
    return bounds


def _bounds(lengths: list[float], gap: float) -> list[tuple[float, float]]:
    """Bounds of the total of 1, 2, ... rows, each as long as the longest of its blocks."""
    ordered = sorted(lengths, reverse=True)
    return [
        (ordered[0] + (ordered[-1] + gap) * (count - 1), total + gap * (count - 1))
        for count, total in enumerate(accumulate(ordered), 1)
    ]


def _deviation(blocks: Sequence[Block], columns: int, gap: float, ratio: float) -> float:
    widths, heights = _measures(blocks, columns)
    shape = (_total(widths, gap) + 1) / (_total(heights, gap) + 1)
    return abs(math.log(shape / ratio)) + _missing(blocks, columns)


def _missing(blocks: Sequence[Block], columns: int) -> float:
    missing = -len(blocks) % columns
    return 0.4 + missing / columns if missing else 0.0


def _measures(blocks: Sequence[Block], columns: int) -> tuple[list[float], list[float]]:
    widths = [max(block.width for block in blocks[column::columns]) for column in range(columns)]
    heights = [
        max(block.height for block in blocks[start : start + columns])
        for start in range(0, len(blocks), columns)
    ]
    return widths, heights


def _total(lengths: Sequence[float], gap: float) -> float:
    return sum(lengths) + gap * max(0, len(lengths) - 1)
