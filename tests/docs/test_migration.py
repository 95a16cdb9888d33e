"""docs/migrate.md: what is called the same is read as the same, and every word on the right exists."""

from __future__ import annotations

import re

import pytest

from kvplace.core.annotations import read_options
from kvplace.core.well_known_names import OPTING_IN
from tests.docs.reading import in_code_marks, page, section

_WORD = re.compile(r"((?:kvplace\.io/|topology\.crane\.io/|qos\.gocrane\.io/)[a-z-]+|cpu-set): ([a-z0-9-]+)")


def rows(heading: str) -> list[tuple[str, str]]:
    """Left and right cell of each row of the table below a heading."""
    lines = section(page("migrate.md"), heading).splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return [(left, right) for left, right in cells[1:]]


def words(cell: str) -> list[dict[str, str]]:
    return [{m[1]: m[2]} for mark in sorted(in_code_marks(cell)) if (m := _WORD.fullmatch(mark))]


@pytest.mark.parametrize(("crane", "ours"), rows("From Crane"))
def test_cranes_word_asks_for_the_same_as_ours(crane: str, ours: str) -> None:
    (theirs,), (own,) = words(crane), words(ours)
    assert read_options(theirs) == read_options(own) is not None


@pytest.mark.parametrize(
    ("theirs", "ours"), [*rows("From the kubelet's static policy"), *rows("From Koordinator")]
)
def test_every_annotation_on_the_right_is_one_that_kvplace_reads(theirs: str, ours: str) -> None:
    assert theirs
    found = words(ours)
    assert found or ours.startswith("none")
    for word in found:
        request = word if word.keys() & set(OPTING_IN) else {"cpu-set": "any", **word}
        assert read_options(request) is not None
