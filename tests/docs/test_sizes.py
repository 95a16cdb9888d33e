"""Pages stay short: each has a limit in words, and so has a cell of a table. Tables end where they seem to.

A word has a letter or a digit, so the bars of a table do not count. A page at its limit loses a sentence for
each new one; a limit is raised only together with what the page is about.
"""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from tests.docs.reading import DOCS, PROJECT

MOST_WORDS = {
    "README.md": 1500,
    "CHANGELOG.md": 600,
    "CONTRIBUTING.md": 650,
    "SECURITY.md": 300,
    "docs/README.md": 300,
    "docs/agent.md": 1050,
    "docs/alerts.md": 1050,
    "docs/annotations.md": 2750,
    "docs/architecture.md": 2110,
    "docs/benchmarks.md": 1575,
    "docs/decisions.md": 2950,
    "docs/devices.md": 1100,
    "docs/how-it-decides.md": 1550,
    "docs/inspect.md": 1350,
    "docs/install.md": 1300,
    "docs/kubelet.md": 200,
    "docs/limits.md": 800,
    "docs/measure.md": 600,
    "docs/migrate.md": 550,
    "docs/quickstart.md": 400,
    "docs/releasing.md": 500,
    "docs/rollout.md": 900,
    "docs/scheduler.md": 500,
    "docs/security.md": 1050,
    "docs/troubleshoot.md": 2450,
    "docs/web.md": 600,
    "docs/reference/bounds.md": 1225,
    "docs/reference/cli.md": 1250,
    "docs/reference/configuration.md": 900,
    "docs/reference/metrics.md": 750,
    "docs/reference/objects.md": 1150,
}
MOST_WORDS_OF_A_CELL = 25


def words(text: str) -> int:
    return sum(re.search(r"\w", word) is not None for word in text.split())


def test_every_page_has_a_limit() -> None:
    pages = [*DOCS, *PROJECT.glob("*.md")]
    assert {str(path.relative_to(PROJECT)) for path in pages} == MOST_WORDS.keys()


@pytest.mark.parametrize("page", MOST_WORDS)
def test_a_page_has_not_grown_past_its_limit(page: str) -> None:
    assert words((PROJECT / page).read_text()) <= MOST_WORDS[page]


@pytest.mark.parametrize("page", MOST_WORDS)
def test_cells_of_tables_are_short(page: str) -> None:
    rows = [line for line in (PROJECT / page).read_text().splitlines() if line.startswith("| ")]
    cells = [re.sub(r"\]\([^)]*\)", "]", cell) for row in rows for cell in row.strip("| ").split(" | ")]
    assert [cell for cell in cells if words(cell) > MOST_WORDS_OF_A_CELL] == []


def test_words_are_counted_without_bars_and_dashes() -> None:
    assert words("| a word | `-` |\n|---|---|\n– 5 %") == 3


@pytest.mark.parametrize("page", MOST_WORDS)
def test_a_table_is_followed_by_an_empty_line(page: str) -> None:
    """Otherwise the text behind it is shown as one more row."""
    lines = (PROJECT / page).read_text().splitlines()
    followers = [after for row, after in pairwise(lines) if row.startswith("|")]
    assert [line for line in followers if line and not line.startswith("|")] == []
