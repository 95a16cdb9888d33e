"""docs/migrate.md: what is called the same is read as the same, and every word on the right exists."""

from __future__ import annotations

import re

import pytest

from kvplace.core.annotations import read_options
from kvplace.core.well_known_names import CPU_POLICY, CRANE_MANAGER, CRANE_POLICY, OPTING_IN
from tests.docs.reading import in_code_marks, page, section

_WORD = re.compile(r"((?:kvplace\.io/|topology\.crane\.io/|qos\.gocrane\.io/)[a-z-]+|cpu-set): ([a-z0-9-]+)")


def rows(heading: str) -> list[tuple[str, str]]:
    """Left and right cell of each row of the table below a heading."""
    lines = section(page("migrate.md"), heading).splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return [(left, right) for left, right in cells[1:]]


def words(cell: str) -> list[dict[str, str]]:
    return [{m[1]: m[2]} for mark in sorted(in_code_marks(cell)) if (m := _WORD.fullmatch(mark))]


CRANES_POLICIES = [
    (*in_code_marks(key), value)
    for key, values in rows("From Crane")
    for value in sorted(in_code_marks(values))
]


@pytest.mark.parametrize(("key", "value"), CRANES_POLICIES)
def test_a_policy_of_crane_is_read_as_ours_of_the_same_name(key: str, value: str) -> None:
    assert read_options({key: value}) == read_options({CPU_POLICY: value}) is not None


def test_cranes_other_key_asks_for_the_same_as_ours() -> None:
    (sentence,) = re.findall(
        r"^.*is the same as.*\.$", section(page("migrate.md"), "From Crane"), re.MULTILINE
    )
    one, other = words(sentence)
    assert read_options(one) == read_options(other) is not None


def test_both_keys_of_crane_are_listed_with_their_policies() -> None:
    assert len(CRANES_POLICIES) == 7
    assert {key for key, _ in CRANES_POLICIES} == {CRANE_MANAGER, CRANE_POLICY}


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
