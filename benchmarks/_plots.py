"""Plots for the page, as SVG that is equal byte for byte when its numbers are."""

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

    Raises NotInstalled when matplotlib is not there.
    """
    try:
        matplotlib, figures = import_module("matplotlib"), import_module("matplotlib.figure")
    except ImportError as error:
        raise NotInstalled("matplotlib", "bench") from error
    PLOTS.mkdir(parents=True, exist_ok=True)
    # A fixed salt names the parts of the picture, and text stays text: nothing depends on day or fonts.
    fixed = {"svg.hashsalt": "kvplace", "svg.fonttype": "none", "font.size": 9.0, "axes.grid": True}
    with matplotlib.rc_context(fixed):
        figure = figures.Figure(figsize=(width, height), layout="constrained")
        draw(figure)
        figure.savefig(PLOTS / f"{name}.svg", metadata={"Date": None, "Creator": None})
    return f"![{title}](plots/{name}.svg)"
