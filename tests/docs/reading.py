"""The pages, and how tests read tables and sections in them."""

from __future__ import annotations

import re
from pathlib import Path

from kvplace.core import well_known_names as keys
from tests.core.option_values import VALUES

PROJECT = Path(__file__).resolve().parents[2]
DOCS = sorted([*(PROJECT / "docs").glob("*.md"), *(PROJECT / "docs" / "reference").glob("*.md")])
PAGES = sorted(
    [*DOCS, *PROJECT.glob("*.md"), *(PROJECT / folder / "README.md" for folder in ("manifests", "tests"))]
)
SOURCES = sorted((PROJECT / "kvplace").rglob("*.py"))


def page(name: str) -> str:
    return (PROJECT / "docs" / name).read_text()


def section(text: str, heading: str) -> str:
    """Cut out what stands below the one heading that holds these words, down to the next of its rank."""
    (start,) = (match for match in re.finditer(r"^(#+) (.*)$", text, re.MULTILINE) if heading in match[2])
    following = re.compile(rf"^#{{1,{len(start[1])}}} ", re.MULTILINE).search(text, start.end())
    return text[start.end() : following.start() if following else len(text)]


def in_code_marks(text: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", text))


def first_cells(text: str) -> set[str]:
    """Collect what stands in code marks in the first column of the tables."""
    return {
        word
        for line in text.splitlines()
        if line.startswith("| `")
        for word in in_code_marks(line.split("|")[1])
    }


WORDS = {
    row.key: field
    for row in VALUES
    for field in row.sets
    if row.key != keys.KVPLACE_CPU_SET and "crane.io" not in row.key
}
"""The field of `PinningOptions` that each annotation with words sets."""
