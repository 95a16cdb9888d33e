"""The files that the Containerfile of `kvplace serve` cuts and copies are there."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
CONTAINERFILE = (PROJECT / "images" / "serve" / "Containerfile").read_text()


def test_the_selected_constraints_contain_every_dependency_and_the_build_tools() -> None:
    declared = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    for file, wanted in (
        ("runtime.txt", declared["project"]["dependencies"]),
        ("build.txt", declared["build-system"]["requires"]),
    ):
        program = re.search(rf"sed -n '([^']+)' constraints.txt >{file}", CONTAINERFILE)
        assert program is not None
        cut = subprocess.run(
            ["sed", "-n", program[1], str(PROJECT / "constraints.txt")],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        pinned = set(re.findall(r"^([\w.-]+)==\S+ \\\n    --hash=sha256:", cut, re.MULTILINE))
        names = {re.split(r"[<>=\[]", requirement)[0].lower() for requirement in wanted}
        assert names <= {name.lower() for name in pinned}


def test_copied_files_exist_and_are_not_ignored_by_the_build() -> None:
    allowed = re.findall(r"^!(\S+)$", (PROJECT / ".dockerignore").read_text(), re.MULTILINE)
    copies = re.findall(r"^COPY (?!--from)(.+) \S+$", CONTAINERFILE, re.MULTILINE)
    sources = [source for words in copies for source in words.split()]
    assert sources
    for source in sources:
        assert (PROJECT / source).exists(), source
        assert source in allowed
