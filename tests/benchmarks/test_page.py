"""The page of the benchmarks agrees with the results that they have written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import _plots
from benchmarks.__main__ import HERE, PAGE, RESULTS, TITLES, method_of, printed_block
from tests.docs.reading import PAGES, section

PAGE_TEXT = PAGE.read_text(encoding="utf-8")
MEASURED = sorted(path.stem for path in RESULTS.iterdir())


def test_tables_are_quoted_without_the_lines_that_show_plots() -> None:
    printed = "a  1\nb  2\n![Two letters](plots/letters.svg)"
    assert printed_block(printed) == "```\na  1\nb  2\n```\n"
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


def test_the_page_names_every_benchmark() -> None:
    known = {path.stem for path in HERE.glob("[!_]*.py")}
    assert known == TITLES.keys()
    assert {name for name in known if not re.search(rf"\b{name}\b", PAGE_TEXT)} == set()


@pytest.mark.parametrize("name", MEASURED)
def test_a_result_describes_its_method_in_the_words_of_the_benchmark(name: str) -> None:
    """After a change of the docstring, change the file in benchmarks/results/ too."""
    assert method_of(name) in (RESULTS / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", MEASURED)
def test_an_answer_gives_only_figures_that_its_result_contains(name: str) -> None:
    answer = section(PAGE_TEXT, TITLES[name])
    assert f"[Results](../benchmarks/results/{name}.md)" in answer
    given = _figures(re.sub(r"\]\([^)]*\)|`[^`]*`", " ", answer))
    assert given
    assert given - _figures((RESULTS / f"{name}.md").read_text(encoding="utf-8")) == set()


def test_figures_that_link_to_a_benchmark_are_printed_by_it() -> None:
    name_of = {re.sub(r"[^\w\- ]", "", TITLES[name].lower()).replace(" ", "-"): name for name in MEASURED}
    checked, wrong = 0, []
    for path in PAGES:
        for text, heading, result in re.findall(
            r"\[([^]]+)\]\([\w/.]*benchmarks(?:\.md#([\w-]+)|/results/(\w+)\.md)\)", path.read_text()
        ):
            figures, name = _figures(text), result or name_of[heading]
            checked += len(figures)
            if figures and figures - _figures((RESULTS / f"{name}.md").read_text()):
                wrong.append(f"{path.name}: {text}")
    assert wrong == []
    assert checked > 20


def _figures(text: str) -> set[str]:
    """Find all numbers, without the commas between their thousands."""
    return {found.replace(",", "") for found in re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", text)}
