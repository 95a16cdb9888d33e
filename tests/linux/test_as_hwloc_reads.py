"""Machines recorded from real hosts are divided as hwloc's own tests expect them to be."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvplace.core.topology_levels import Discovery
from kvplace.linux.sysfs import discover
from kvplace.linux.tree import open_tree
from tests.captured import captured_files, captured_folder, recorded_machine
from tests.linux.hwloc_layouts import read_layout

EXPECTATIONS = captured_files("topologies", "hwloc/*.test")

# The lists and the masks of these files contradict each other: hwloc reads the masks and drops what
# conflicts, kvplace reads the lists.
CONFLICTING = "40intel64-4n10c+pci-conflicts"


def _expected(test: Path) -> tuple[Discovery, dict[str, set[int]], bool]:
    """The machine as we read it, as hwloc does, and whether hwloc was to show every cache."""
    lines = dict(
        line.split(":", 1)
        for line in test.read_text(encoding="utf-8").splitlines()
        if ":" in line and not line.startswith("#")
    )
    source, target = (test.parent / lines[key].strip() for key in ("source", "target"))
    options = lines.get("options", "")
    all_caches = "--merge" not in options and "--no-caches" not in options
    return recorded_machine(source), read_layout(target), all_caches


@pytest.mark.parametrize("test", EXPECTATIONS, ids=lambda path: path.stem)
def test_a_captured_machine_is_divided_as_hwloc_divides_it(test: Path) -> None:
    found, layout, all_caches = _expected(test)
    machine = found.topology
    shown = sum(layout["PU"])
    assert shown & ~machine.cpus == 0

    def within(sets: tuple[int, ...] | list[int]) -> set[int]:
        """The part of our sets that hwloc shows: all CPUs that the recording process might use."""
        return {cpus & shown for cpus in sets if cpus & shown}

    assert within(machine.cores) == layout.get("Core", within(machine.cores))
    nodes = within([node.cpus for node in machine.numa_nodes])
    # Nodes whose memory was forbidden to the recording process are missing in hwloc's view.
    assert layout["NUMANode"] >= nodes or "cpusets" in test.stem
    if test.stem == CONFLICTING:
        assert layout["Package"] < within([package.cpus for package in machine.packages])
        return
    assert within([package.cpus for package in machine.packages]) == layout.get("Package", {shown})
    if all_caches and not any("L3" in note for note in found.notes):
        assert within(machine.l3_groups) == layout["L3Cache"]


def test_the_cpuset_of_whoever_recorded_a_machine_does_not_make_it_smaller() -> None:
    folder = captured_folder("topologies") / "hwloc"
    for name, whole, allowed in (
        ("16amd64-8n2c-cpusets", 15, 10),
        ("16amd64-8n2c-cpusets-disallowed", 15, 15),
        ("32amd64-4s2n4c-cgroup2", 32, 6),
    ):
        found, layout, _ = _expected(folder / f"{name}.test")
        assert found.topology.cpus.bit_count() == whole
        assert sum(layout["PU"]).bit_count() == allowed


def test_masks_that_conflict_are_reported_and_hide_only_themselves() -> None:
    whole = open_tree(captured_folder("topologies") / "hwloc" / f"{CONFLICTING}.tar.bz2")

    class WithoutLists:
        """The same tree on a kernel that has masks alone."""

        name = "without lists"

        def read(self, name: str) -> str | None:
            return None if name.endswith("_list") else whole.read(name)

        def entries(self, name: str) -> list[str]:
            return whole.entries(name)

    found = discover(WithoutLists())
    assert len(found.topology.packages) == len(found.topology.l3_groups) == 4
    assert [note.partition(" of CPU ")[0] for note in found.notes] == [
        "the kernel contradicts itself about the sockets",
        "the kernel contradicts itself about the L3 caches",
    ]
