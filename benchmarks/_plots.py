"""Plots for the page, as SVG that is equal byte for byte when its numbers are.

Each has a title, its grid is behind what it shows, and its legend stands beside the panels, never on them. A
bar begins at zero, so its axis is never logarithmic; what spans powers of ten is drawn as points.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

Figure = Any
"""matplotlib.figure.Figure, which is there only with the extra `bench`."""
PLOTS = Path(__file__).resolve().parent.parent / "docs" / "plots"


class NotInstalled(Exception):
    """A benchmark needs a package that kvplace itself does not."""

    def __init__(self, package: str, extra: str) -> None:
        """Name the package and the extra that brings it."""
        super().__init__(f"{package} is not installed: pip install 'kvplace[{extra}]'")


def write_plot(
    name: str, draw: Callable[[Figure], None], *, title: str, width: float = 8.0, height: float = 4.5
) -> str:
    """Draw a figure of so many inches into docs/plots and answer the line that shows it on the page.

    The title stands above the figure, too. Raises NotInstalled when matplotlib is not there.
    """
    try:
        matplotlib, figures = import_module("matplotlib"), import_module("matplotlib.figure")
    except ImportError as error:
        raise NotInstalled("matplotlib", "bench") from error
    PLOTS.mkdir(parents=True, exist_ok=True)
    # A fixed salt names the parts of the picture, and text stays text: nothing depends on day or fonts.
    fixed = {
        "svg.hashsalt": "kvplace",
        "svg.fonttype": "none",
        "font.size": 9.0,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.titlesize": "medium",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": "#d5dae0",
    }
    with matplotlib.rc_context(fixed):
        figure = figures.Figure(figsize=(width, height), layout="constrained")
        figure.suptitle(title, fontweight="bold")
        draw(figure)
        figure.savefig(PLOTS / f"{name}.svg", metadata={"Date": None, "Creator": None})
    return f"![{title}](plots/{name}.svg)"


def print_plot(name: str, draw: Callable[[Figure], None], *, title: str, height: float = 4.5) -> None:
    """Print the line of `write_plot`; ends the benchmark with the reason when matplotlib is not there."""
    try:
        print(write_plot(name, draw, title=title, height=height))
    except NotInstalled as error:
        sys.exit(str(error))


def pairs_of_bars(
    panel: Any, names: Sequence[str], pairs: Sequence[tuple[float, float]], labels: tuple[str, str]
) -> None:
    """Draw two bars for each name, without kvplace above the one with it; the first name is at the top."""
    for of_pair, color in ((0, "#b0b7bf"), (1, "#2a6f97")):
        heights = [place + 0.2 - 0.4 * of_pair for place in reversed(range(len(names)))]
        panel.barh(
            heights, [pair[of_pair] for pair in pairs], height=0.38, color=color, label=labels[of_pair]
        )
    panel.set_yticks(list(reversed(range(len(names)))), names)
    panel.grid(visible=False, axis="y")


def legend_beside(figure: Figure, panel: Any, *, columns: int) -> None:
    """Explain the marks of a panel below all panels, where no mark can be."""
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
