"""The page that the benchmarks write."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import _plots
from benchmarks.__main__ import INTRODUCTION, PAGE, method_of, page_sections, printed_block


def test_tables_are_quoted_and_pictures_are_shown() -> None:
    printed = "a  1\nb  2\n![Two letters](plots/letters.svg)"
    assert printed_block(printed) == "```\na  1\nb  2\n```\n\n![Two letters](plots/letters.svg)\n"
    assert printed_block("a  1") == "```\na  1\n```\n"


def test_a_missing_package_is_named_with_the_extra_that_brings_it() -> None:
    assert str(_plots.NotInstalled("matplotlib", "bench")) == (
        "matplotlib is not installed: pip install 'kvplace[bench]'"
    )


def test_equal_numbers_make_equal_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `bench`")
    monkeypatch.setattr(_plots, "PLOTS", tmp_path)

    def draw(figure: _plots.Figure) -> None:
        figure.subplots().barh(range(3), [1, 2, 3])

    line = _plots.write_plot("three", draw, title="Three bars")
    first = (tmp_path / "three.svg").read_bytes()
    _plots.write_plot("three", draw, title="Three bars")
    assert line == "![Three bars](plots/three.svg)"
    assert (tmp_path / "three.svg").read_bytes() == first
    assert b"<dc:date>" not in first


@pytest.mark.parametrize("name", sorted(page_sections()))
def test_the_page_describes_each_method_in_the_words_of_the_benchmark(name: str) -> None:
    assert method_of(name) in page_sections()[name]


def test_the_page_begins_with_the_introduction_of_the_program_that_writes_it() -> None:
    assert PAGE.read_text().startswith(INTRODUCTION)
