"""Printing that all commands share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvplace.cli.output import cpu_lines
from kvplace.core.cpuset import format_cpu_list, mask_of


@given(st.sets(st.integers(0, 300), max_size=60), st.integers(1, 40))
def test_a_cpu_list_is_broken_only_between_its_entries(cpus: set[int], width: int) -> None:
    mask = mask_of(cpus)
    lines = cpu_lines(mask, width).split("\n")
    assert "".join(lines) == format_cpu_list(mask)
    assert all(line.endswith(",") for line in lines[:-1])
    assert all(len(line) <= width or line.count(",") <= 1 for line in lines)
