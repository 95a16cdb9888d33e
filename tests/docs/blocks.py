"""The examples of the pages: the fenced blocks, and which tests take them.

A test takes the commands of a page from the page, by `block` or `blocks`, and keeps no copy of them. So each
call of these two in a test names the examples that it runs; `takers` reads the calls from the sources.

Not `sybil` or `pytest-examples`: they run a page's blocks one after the other in one place. Ours need unlike
surroundings (a terminal, an API server, KubeVirt, a real node), which the folders of the tests have already.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from harness.install_page import quickstart
from harness.install_page.newcomer import ELSEWHERE
from harness.install_page.page import Block, read_blocks
from tests.docs.reading import DOCS, PROJECT

PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    *(str(path.relative_to(PROJECT)) for path in DOCS),
    "manifests/README.md",
    "vm-templates/README.md",
)
TESTS = PROJECT / "tests"


@dataclass(frozen=True)
class Taker:
    """A call in a test that takes blocks of a page: those with a line that begins so, or all."""

    test: str
    page: str
    beginning: str | None

    def takes(self, one: Block) -> bool:
        return one.page == self.page and (self.beginning is None or one.has_line(self.beginning))


@dataclass(frozen=True)
class Newcomer(Taker):
    """The runner of the install page from its top to its end, on a real node."""

    test: str = "tests/real_node/test_install_page.py"
    page: str = "docs/install.md"
    beginning: str | None = None

    def takes(self, one: Block) -> bool:
        return one.page == self.page and not one.language and not one.text.startswith(tuple(ELSEWHERE))


@dataclass(frozen=True)
class QuickStart(Newcomer):
    """The same newcomer, who compares what the quick start shows with what its commands print."""

    page: str = quickstart.PAGE

    def takes(self, one: Block) -> bool:
        return one.page == self.page and one.language == quickstart.CONSOLE


def blocks(page: str) -> list[Block]:
    """Return all blocks of a page, named as from the top of the project."""
    return read_blocks(PROJECT, page)


def block(page: str, beginning: str) -> str:
    """Return the text of the block that has a line which begins so; the same block may stand there twice."""
    found = {one.text for one in blocks(page) if one.has_line(beginning)}
    assert len(found) == 1, f"{page} has {len(found)} blocks with a line that begins with {beginning!r}"
    return found.pop()


def command_lines(text: str) -> list[str]:
    """Return the commands of a block: one on each line, without what stands behind them as a comment."""
    commands = (re.sub(r"(^|\s+)#.*$", "", line) for line in text.splitlines())
    return [command for command in commands if command]


def takers() -> Iterator[Taker]:
    """Find the calls of `block` and `blocks` in the tests; only words that stand there count."""
    for path in sorted(TESTS.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                words = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
                match node.func.id, words:
                    case "block", [str(page), str(beginning)]:
                        yield Taker(f"{path.relative_to(PROJECT)}:{node.lineno}", page, beginning)
                    case "blocks", [str(page)]:
                        yield Taker(f"{path.relative_to(PROJECT)}:{node.lineno}", page, None)
