"""Compares the output that docs/quickstart.md shows with the output of its commands.

Most of its commands are on the installation page, too. A follower of that page has already run
them; the others are run here. Numbers, ages and generated names differ on every machine and are not compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from harness.install_page.newcomer import Newcomer, Step
from harness.install_page.page import Block, read_blocks

PAGE = "docs/quickstart.md"
CONSOLE = "console"
_VARIES = (
    (r"sha256:[0-9a-f]+", "DIGEST"),
    (r"virt-launcher-([\w-]+)-\w+", r"virt-launcher-\1-POD"),
    (r"(\d+[dhms])+\b", "AGE"),
    (r"\d+([.,-]\d+)*", "N"),
    (r'"N"(, ?"N")*', "CPUS"),
    (r"\s+", " "),
)


def commands_and_output(block: Block) -> tuple[str, list[str]]:
    """Split a block into its commands, and the lines that it shows of their output."""
    lines = block.text.splitlines()
    commands = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    shown = [line for line in lines if not line.startswith("$ ") and line not in ("", "...")]
    return "".join(f"{command}\n" for command in commands), shown


def lines_not_printed(newcomer: Newcomer, checkout: Path, followed: Iterable[Step]) -> list[str]:
    """List the lines that the page shows and its commands do not print, in their order.

    Args:
        newcomer: runs the commands that the installation page does not have.
        checkout: where the pages are.
        followed: the blocks of the installation page that have been run.

    Raises `CommandOfThePageFailed`.
    """
    printed = {step.text: step.printed for step in followed}
    missing = []
    for block in read_blocks(checkout, PAGE):
        if block.language == CONSOLE:
            commands, shown = commands_and_output(block)
            output = _output(newcomer, checkout, commands, printed)
            lines = iter([masked(line) for line in output.splitlines()])
            expected = [line.replace("worker-1", newcomer.node) for line in shown]
            missing += [f"{PAGE}:{block.line}: {line}" for line in expected if masked(line) not in lines]
    return missing


def _output(newcomer: Newcomer, checkout: Path, commands: str, printed: Mapping[str, str]) -> str:
    """Collect the output of commands; run commands that have not been run."""
    output = ""
    while commands:
        block = next((text for text in printed if commands.startswith(text)), None)
        if block is None:
            command, _, commands = commands.partition("\n")
            output += newcomer.run(checkout, command.replace("worker-1", newcomer.node))
        else:
            output += printed[block]
            commands = commands.removeprefix(block)
    return output


def masked(line: str) -> str:
    """Replace the words that differ from machine to machine."""
    for pattern, word in _VARIES:
        line = re.sub(pattern, word, line)
    return line.strip()
