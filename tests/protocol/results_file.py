"""The file in which a long run notes what came of its stories, so that it can be ended and go on later.

One line of JSON for each part that has run, after a line that names the commit: all stories of a file
are informed about the same code.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.protocol.run_kind import Kind

PROJECT = Path(__file__).resolve().parents[2]


@dataclass
class Told:
    """The results of some stories."""

    happened: Counter[str] = field(default_factory=Counter)
    schedules: set[int] = field(default_factory=set)
    broken: dict[int, str] = field(default_factory=dict)
    """Why, by seed."""

    def add(self, other: Told) -> None:
        """Take in what came of further stories."""
        self.happened += other.happened
        self.schedules |= other.schedules
        self.broken |= other.broken


@dataclass(frozen=True)
class Part:
    """Stories of consecutive seeds, run by one process."""

    first: int
    count: int
    kind: Kind = Kind.PLAIN

    @property
    def seeds(self) -> range:
        return range(self.first, self.first + self.count)


class Record:
    """The parts that have run already."""

    def __init__(self, path: Path, commit: str) -> None:
        """Begin a file or read it again; raises ValueError if it is about another commit."""
        self.told: dict[Part, Told] = {}
        self._path = path
        if not path.exists():
            path.write_text(json.dumps({"commit": commit}) + "\n")
            return
        first, *lines = path.read_text().splitlines()
        if (known := json.loads(first)["commit"]) != commit:
            raise ValueError(f"{path} is about commit {known}, and this is {commit}: name another file")
        for line in lines:
            raw = json.loads(line)
            broken = {int(seed): why for seed, why in raw["broken"].items()}
            part = raw["part"]
            self.told[Part(part["first"], part["count"], Kind(part["kind"]))] = Told(
                Counter(raw["happened"]), set(raw["schedules"]), broken
            )

    def add(self, part: Part, told: Told) -> None:
        """Note what came of a part."""
        self.told[part] = told
        raw = {
            "part": {**vars(part), "kind": part.kind.value},
            "broken": told.broken,
            "happened": told.happened,
            "schedules": sorted(told.schedules),
        }
        with self._path.open("a") as file:
            file.write(json.dumps(raw) + "\n")


def commit() -> str:
    """Name the commit of this tree; ends with `-dirty` if something has been changed since."""
    command = ("git", "-C", str(PROJECT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
