"""Plots for the page, as SVG that is equal byte for byte when its numbers are.

Each has a title, its grid is behind what it shows, and its legend stands beside the panels, never on them. A
bar begins at zero, so its axis is never logarithmic; what spans powers of ten is drawn as points.
"""

from __future__ import annotations

from collections.abc import Callable
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


def legend_beside(figure: Figure, panel: Any, *, columns: int) -> None:
    """Explain the marks of a panel below all panels, where no mark can be."""
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
