"""The style sheet of a core map in SVG: its colours in light and dark mode.

Every text has a contrast of at least 4.5 to 1 with its background (WCAG 2, level AA), and no meaning is in
the colour alone. The colours of VMs were computed: of all colours that such a text can stand on, the ones
that are furthest apart for every reader, with normal sight, deuteranopia or protanopia. All rules are below
one class, so that a map in a page changes nothing else there.
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
