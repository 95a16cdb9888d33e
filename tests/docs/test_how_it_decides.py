"""The commands of docs/how-it-decides.md print what the page shows, and draw its pictures."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import blocks
from tests.docs.reading import PROJECT, page

TRANSCRIPT = "".join(one.text for one in blocks("docs/how-it-decides.md"))
COMMANDS = [line.removeprefix("$ ") for line in TRANSCRIPT.splitlines() if line.startswith("$ ")]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that should be a checkout to the commands, without the pictures that they draw."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(PROJECT / "docs" / "examples", folder / "docs" / "examples")
    (folder / "docs" / "pictures").mkdir()
    program = folder / "kvplace"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kvplace "$@"\n')
    program.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def printed(checkout: Path) -> str:
    """The outputs for a person who types all commands of the page, one after the other, into one shell."""
    done = subprocess.run(
        ["bash", "-c", "\n".join(f"cat <<'END'\n$ {command}\nEND\n{command}" for command in COMMANDS)],
        cwd=checkout,
        env={"PATH": f"{checkout}:/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": str(PROJECT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout


def test_the_commands_print_the_output_on_the_page(printed: str) -> None:
    assert len(COMMANDS) >= 10
    assert [line.rstrip() for line in printed.splitlines()] == TRANSCRIPT.splitlines()


@pytest.mark.usefixtures("printed")
def test_the_commands_draw_the_pictures_of_the_page(checkout: Path) -> None:
    shown = set(re.findall(r"\]\(pictures/([a-z-]+\.svg)\)", page("how-it-decides.md")))
    drawn = {path.name: path.read_bytes() for path in (checkout / "docs" / "pictures").iterdir()}
    assert drawn == {name: (PROJECT / "docs" / "pictures" / name).read_bytes() for name in shown}
