"""The code blocks of a page, in their order."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_BLOCK_OR_HEADING = re.compile(
    r"^```(?P<language>\w*)\n(?P<text>.*?)^```$|^## (?P<heading>.*?)$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Block:
    """One block between fences."""

    page: str
    """Named as from the top of the project."""
    line: int
    """Where its first fence stands in the page."""
    section: str
    """The heading of second rank above it."""
    language: str
    """Empty for commands of a shell."""
    text: str

    def has_line(self, beginning: str) -> bool:
        """Whether one of its lines begins so; `beginning` may be several lines."""
        return f"\n{beginning}" in f"\n{self.text}"


def read_blocks(project: Path, page: str) -> list[Block]:
    """Read all blocks of a page of a checkout."""
    text = (project / page).read_text(encoding="utf-8")
    section, found = "", []
    for match in _BLOCK_OR_HEADING.finditer(text):
        if match["heading"] is not None:
            section = match["heading"]
        else:
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(page, line, section, match["language"], match["text"]))
    return found
