"""Every plot of the page can be read: a title, nothing over a bar, and no bar whose length misleads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from benchmarks import (
    _plots,
    across_nodes,
    bound_per_second,
    cost_per_vm,
    devices,
    fragmentation,
    neighbours,
    placement,
    preemption,
)
from benchmarks._device_load import LAYOUTS
from benchmarks._load import MIXES
from benchmarks._timed_job import Timing
from kvplace.simulate.simulated_cluster import ClusterState

SHARES = {mix.name: dict.fromkeys(fragmentation.WAYS, (7.5, 0.5)) for mix in MIXES}
STATE = ClusterState(cpus_used=0.83, memory_used=0.8, cpus_stranded=0.17, memory_stranded=0.2)
ENDS = [across_nodes.End(STATE, vms=100, split=0, far=0)]
MEDIANS = {kind: [1e-5 * (number + 1) for number in range(len(placement.ASKED))] for kind in ("a", "b", "c")}
CLUSTERS = ("50 nodes", "5000 nodes, 90% full")
RATES = {"pods bound per second": [(540.0, 222.0)] * 2, "CPU seconds per 1,000 pods": [(3.8, 8.5)] * 2}
COSTS = {name: dict.fromkeys(cost_per_vm.PROCESSES, 10.0) for name in CLUSTERS}
TIMINGS = {
    (kind, title): [Timing(1.0, 30, 400, 9000)] for kind in neighbours.KINDS for title in neighbours.TITLES
}
COUNTS = devices.Counts({"VMs with devices": 100, "refused": 10, "running": 90, "local": 60})
BESIDE = {devices.Trial(LAYOUTS[0], 1, 100, way): COUNTS for way in devices.WAYS}
PLOTS = {
    "devices": partial(devices.draw, BESIDE),
    "neighbours": partial(neighbours.draw, TIMINGS),
    "bound_per_second": partial(bound_per_second.draw, CLUSTERS, RATES),
    "cost_per_vm": partial(cost_per_vm.draw, COSTS),
    "preemption": partial(preemption.draw, dict.fromkeys(preemption.ASKED, (33.0, 100.0))),
    "across_nodes": partial(across_nodes.draw, dict.fromkeys(across_nodes.FILLINGS, ENDS)),
    "fragmentation": partial(fragmentation.draw, SHARES),
    "placement": partial(placement.draw, MEDIANS),
}


@pytest.mark.parametrize("name", PLOTS)
def test_a_plot_has_a_title_its_grid_behind_and_its_legend_beside_the_data(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `bench`")
    monkeypatch.setattr(_plots, "PLOTS", tmp_path)
    figure = _drawn(PLOTS[name], name)
    assert figure.get_suptitle() == "What it shows"
    assert figure.axes
    boxes = [panel.get_tightbbox() for panel in figure.axes]
    for panel in figure.axes:
        assert panel.get_axisbelow() is True
        assert panel.get_legend() is None
        if panel.patches:
            assert (panel.get_xscale(), panel.get_xlim()[0]) == ("linear", 0)
    for legend in figure.legends:
        assert not legend.get_window_extent().count_overlaps(boxes)


def test_the_page_shows_these_plots_and_no_others() -> None:
    page = (_plots.PLOTS.parent / "benchmarks.md").read_text(encoding="utf-8")
    pictures = {path.stem for path in _plots.PLOTS.iterdir()}
    assert pictures == set(PLOTS)
    assert all(f"](plots/{name}.svg)" in page for name in pictures)


def _drawn(draw: Callable[[_plots.Figure], None], name: str) -> _plots.Figure:
    figures: list[_plots.Figure] = []

    def kept(figure: _plots.Figure) -> None:
        draw(figure)
        figures.append(figure)

    _plots.write_plot(name, kept, title="What it shows")
    (figure,) = figures
    figure.draw_without_rendering()
    return figure
