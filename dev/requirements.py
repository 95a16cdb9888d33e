"""Reads and writes constraints.txt: every dependency pinned, with the hashes of its files.

The file is cut into sections, so that `demo` does not install a compiler's worth of test tools. A
section holds what the sections above it do not; pip checks the hash of every file it takes
(`--require-hashes`), and no address of an index is written down, so the file serves any mirror.
"""

import hashlib
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Section(StrEnum):
    """The purpose of a block of pins, in the order of the file."""

    RUNTIME = "runtime"
    BUILD = "build"
    AGENT = "agent"
    RELEASE = "release"
    TESTS = "tests"
    LIBVIRT = "libvirt"
    LINT = "lint"
    BENCH = "bench"
    MUTATION = "mutation"
    DEV = "dev"


_SELECTIONS: dict[Section, tuple[str, ...]] = {
    Section.RUNTIME: (),
    Section.BUILD: ("--group", "build"),
    Section.AGENT: ("--extra", "agent"),
    Section.RELEASE: ("--group", "release"),
    Section.TESTS: ("--group", "tests"),
    Section.LIBVIRT: ("--group", "libvirt"),
    Section.LINT: ("--group", "lint"),
    Section.BENCH: ("--extra", "bench"),
    Section.MUTATION: ("--group", "mutation"),
    Section.DEV: ("--group", "dev"),
}
_HEAD = """\
# Every dependency of kvplace, of its tests and of its tools, pinned and with the hashes of its files.
# Written by `./make constraints` from pyproject.toml; do not edit by hand.
"""
_SECTION_LINE = re.compile(r"^# -- (?P<name>[a-z]+) --$")
_PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==")


@dataclass(frozen=True, slots=True)
class Constraints:
    """The pins of constraints.txt by section, as the text that pip reads."""

    sections: dict[Section, str]

    @classmethod
    def read(cls, path: Path) -> "Constraints":
        """Reads the file that `write` made."""
        found: dict[Section, list[str]] = {}
        current: list[str] | None = None
        for line in path.read_text(encoding="utf-8").splitlines():
            if match := _SECTION_LINE.match(line):
                current = found.setdefault(Section(match["name"]), [])
            elif current is not None:
                current.append(line)
        return cls({name: "\n".join(lines).strip() + "\n" for name, lines in found.items()})

    def text(self, sections: Iterable[Section]) -> str:
        """Gives the requirements file that holds these sections."""
        return "\n".join(self.sections[section] for section in sections)

    def fingerprint(self, section: Section) -> str:
        """Gives a name of the section's content that changes when a pin does."""
        return hashlib.sha256(self.sections[section].encode()).hexdigest()


def write(project: Path, uv: Path, *, upgrade: bool) -> None:
    """Resolves pyproject.toml and writes constraints.txt.

    Without `upgrade` every pin is kept that still fits; one that no longer does is an error that names it.
    """
    target = project / "constraints.txt"
    everything = tuple(word for selection in _SELECTIONS.values() for word in selection)
    keep = () if upgrade or not target.exists() else ("--constraints", str(target))
    pins = _pins(_compile(project, uv, (*everything, *keep)))
    full = project / ".venv" / "all-pins.txt"
    full.write_text("\n".join(block.split(" ", 1)[0] for block in pins.values()) + "\n", encoding="utf-8")
    written: set[str] = set()
    parts = [_HEAD]
    for section, selection in _SELECTIONS.items():
        names = _pins(_compile(project, uv, (*selection, "--constraints", str(full)))).keys() - written
        blocks = [pins[name] for name in sorted(names)]
        parts.append(f"# -- {section} --\n" + "\n".join(blocks) + "\n")
        written |= names
    full.unlink()
    target.write_text("\n".join(parts), encoding="utf-8")


def _compile(project: Path, uv: Path, selection: tuple[str, ...]) -> str:
    command = [
        str(uv), "pip", "compile", "--quiet", "--universal", "--generate-hashes", "--no-header",
        "--no-annotate", "--no-emit-index-url", "--python-version", "3.11", *selection, "pyproject.toml",
    ]  # fmt: skip
    return subprocess.run(command, cwd=project, check=True, capture_output=True, text=True).stdout


def _pins(text: str) -> dict[str, str]:
    """Cuts a compiled file into one block per distribution."""
    blocks: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        if match := _PIN.match(line):
            current = blocks.setdefault(match["name"], [])
        current.append(line)
    return {name: "\n".join(lines) for name, lines in blocks.items()}
