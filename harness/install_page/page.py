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

    section: str
    """The heading of second rank above it."""
    language: str
    """Empty for commands of a shell."""
    text: str


def read_blocks(page: Path) -> list[Block]:
    """Read all blocks of a page."""
    section, found = "", []
    for match in _BLOCK_OR_HEADING.finditer(page.read_text()):
        if match["heading"] is not None:
            section = match["heading"]
        else:
            found.append(Block(section, match["language"], match["text"]))
    return found
