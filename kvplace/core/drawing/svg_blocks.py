"""Blocks of an SVG drawing: laid out in stacks and grids, then written as elements with one style sheet.

A block has a minimum size; the block around it decides its real size, so that frames side by side end on one
line. Text is measured with the usual widths of its font: a browser with another font draws it a little
narrower or wider, and nothing here depends on that.

Every text has a contrast of at least 4.5 to 1 with its background (WCAG 2, level AA), and no meaning is in
the colour alone. The colours of VMs were computed: of all colours that such a text can stand on, the ones
that are furthest apart for every reader, with normal sight, deuteranopia or protanopia. All rules are below
one class, so that a map in a page changes nothing else there.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement

Draw = Callable[[Element, float, float, float, float], None]
"""Writes a block into a parent element at x and y, with a width and a height."""


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
    """Find the number of columns with the shape closest to `ratio`, the smallest of several.

    The largest block stands for all: measuring each number of columns would take minutes for thousands of
    blocks, and the blocks of one grid are much alike.
    """
    width = max(block.width for block in blocks) + gap
    height = max(block.height for block in blocks) + gap

    def deviation(columns: int) -> float:
        rows = -(-len(blocks) // columns)
        shape = (columns * width - gap + 1) / (rows * height - gap + 1)
        missing = -len(blocks) % columns
        penalty = 0.4 + missing / columns if missing else 0.0
        return round(abs(math.log(shape / ratio)) + penalty, 6)

    return min(range(1, len(blocks) + 1), key=deviation)


def _measures(blocks: Sequence[Block], columns: int) -> tuple[list[float], list[float]]:
    widths = [max(block.width for block in blocks[column::columns]) for column in range(columns)]
    heights = [
        max(block.height for block in blocks[start : start + columns])
        for start in range(0, len(blocks), columns)
    ]
    return widths, heights


def _total(lengths: Sequence[float], gap: float) -> float:
    return sum(lengths) + gap * max(0, len(lengths) - 1)


ROOT = "kvplace-map"
"""The class of the drawing."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """The colours of one mode."""

    page: str
    package: str
    numa: str
    l3: str
    line: str
    ink: str
    muted: str
    hatch: str
    alarm: str
    vms: tuple[str, ...]
    """Behind the letters of a VM; used in this order again and again. The first ones differ most."""


LIGHT = Scheme(
    page="#ffffff",
    package="#eef1f4",
    numa="#dde6ee",
    l3="#f8fafc",
    line="#69737d",
    ink="#171b20",
    muted="#4d565f",
    hatch="#c3cbd3",
    alarm="#c4162a",
    vms=(
        "#e478b4", "#d8fc7e", "#729006", "#aed2fc", "#fca830", "#48a2fc", "#12e4b4",
        "#a27e78", "#90a878", "#a272cc", "#d2a8d2", "#baf0d2", "#f6d242", "#c69c00",
        "#c0c078", "#00a8a8", "#00c6fc", "#969cd2", "#a8e484", "#de6c48",
    ),
)  # fmt: skip

DARK = Scheme(
    page="#0d1117",
    package="#171d25",
    numa="#212c38",
    l3="#10161d",
    line="#8b96a1",
    ink="#f2f5f8",
    muted="#aab4be",
    hatch="#38434e",
    alarm="#ff8a80",
    vms=(
        "#364e42", "#3c6cba", "#a25a00", "#480c54", "#a84e7e", "#5a1200", "#304296",
        "#8a2a06", "#6c246c", "#665a3c", "#362a3c", "#12540c", "#6c4e6c", "#1e1e72",
        "#5a4ea8", "#7e609c", "#00425a", "#42785a", "#1e3c2a", "#005a8a",
    ),
)  # fmt: skip

COLOURS = len(LIGHT.vms)

_FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def style_sheet() -> str:
    """Write the style sheet: for light mode, and the changes for dark mode."""
    return "\n".join(
        [
            "",
            f".{ROOT} text {{ font-family: {_FONTS}; }}",
            f".{ROOT} .middle {{ text-anchor: middle; }}",
            f".{ROOT} .strong {{ font-weight: 700; }}",
            f".{ROOT} .idle {{ stroke-dasharray: 2 2; }}",
            *_rules(LIGHT),
            "@media (prefers-color-scheme: dark) {",
            *_rules(DARK),
            "}",
            "",
        ]
    )


def _rules(scheme: Scheme) -> list[str]:
    fills = {
        "page": scheme.page,
        "package": scheme.package,
        "numa": scheme.numa,
        "l3": scheme.l3,
        "core": scheme.page,
        "plain": scheme.page,
        "hatch-ground": scheme.page,
        "qemu": scheme.ink,
        **{f"vm{index}": colour for index, colour in enumerate(scheme.vms)},
    }
    edges = ("package", "numa", "l3", "core", *(f"vm{index}" for index in range(COLOURS)))
    return [
        f".{ROOT} text {{ fill: {scheme.ink}; }}",
        f".{ROOT} text.muted {{ fill: {scheme.muted}; }}",
        f".{ROOT} text.alarm {{ fill: {scheme.alarm}; }}",
        *(f".{ROOT} .{name} {{ fill: {colour}; }}" for name, colour in fills.items()),
        f"{', '.join(f'.{ROOT} .{name}' for name in edges)} {{ stroke: {scheme.line}; }}",
        f".{ROOT} .plain {{ stroke: {scheme.hatch}; }}",
        f".{ROOT} .hatch {{ fill: none; stroke: {scheme.hatch}; }}",
        f".{ROOT} .dot {{ fill: {scheme.hatch}; }}",
        f".{ROOT} .fault {{ fill: none; stroke: {scheme.alarm}; stroke-width: 2.5; }}",
    ]
