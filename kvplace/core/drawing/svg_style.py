"""The style sheet of a core map in SVG: its colours in light and dark mode.

Every text has a contrast of at least 4.5 to 1 with its background (WCAG 2, level AA), and no meaning is in
the colour alone. All rules are below one class, so that a map in a page changes nothing else there.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """Behind the letters of a VM; used in this order again and again."""


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
        "#8cc4f2", "#f6b27c", "#8bd8a5", "#f5a3c1", "#ecd266", "#b9a8ee",
        "#79d7d7", "#c6cc5c", "#f29a8e", "#a6cb74", "#dba6e4", "#cbb594",
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
        "#1f6098", "#95500f", "#23703f", "#9a2f60", "#705a06", "#5a48b0",
        "#126d6d", "#5d6310", "#a33a2c", "#476a1a", "#82408f", "#6f5532",
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
