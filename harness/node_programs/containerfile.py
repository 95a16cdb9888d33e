"""The Containerfiles of kvplace's images, read as far as the tests build the same images without an engine.

Not a shell: of a RUN instruction only two things are understood. These are the pins that it cuts from
constraints.txt and installs below /opt/kvplace, and the Debian packages that it installs.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from string import Template

from packaging.requirements import Requirement

from harness.node_programs.oci_archive import ImageConfiguration

_BASE_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
}
"""The variables that docker.io/library/python sets."""
_CUT = re.compile(r"(?P<command>awk|sed -n) '(?P<program>[^']+)' constraints\.txt >(?P<file>\S+)")
_INSTALLS = re.compile(
    r"pip .*(?:--python /opt/kvplace/bin/python .*install|install .*--target /opt/kvplace)\b"
)
_APT = re.compile(r"apt-get install (?:-\S+ )*(?P<names>[a-z0-9.+ -]+?)(?= &&|$)")
_PIN = re.compile(r"^(?P<pin>[A-Za-z0-9._-]+==[^\\\n]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Copy:
    """One COPY instruction that takes files from the project: sources, and the folder or path they go to."""

    sources: tuple[str, ...]
    target: str


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction with its lines joined, and the number of the stage that it belongs to."""

    stage: int
    word: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Containerfile:
    """A Containerfile: its last stage is the image, its first one fills /opt/kvplace."""

    path: Path
    instructions: tuple[Instruction, ...]

    @classmethod
    def read(cls, path: Path) -> Containerfile:
        """Read a file."""
        return cls(path, tuple(_instructions(path.read_text())))

    def configuration(self) -> ImageConfiguration:
        """Return the command of a container of the image."""
        environment = dict(_BASE_ENVIRONMENT)
        labels: dict[str, str] = {}
        found: dict[str, str] = {}
        for instruction in self._last_stage():
            match instruction.word:
                case "ENV":
                    for name, value in _pairs(instruction.arguments):
                        environment[name] = Template(value).substitute(environment)
                case "LABEL":
                    labels |= dict(_pairs(instruction.arguments))
                case _:
                    found[instruction.word] = instruction.arguments
        return ImageConfiguration(
            entrypoint=tuple(json.loads(found.get("ENTRYPOINT", "[]"))),
            command=tuple(json.loads(found.get("CMD", "[]"))),
            environment=environment,
            user=found.get("USER", ""),
            labels=labels,
            ports=tuple(found.get("EXPOSE", "").split()),
        )

    def copies(self, *, of_last_stage: bool) -> list[Copy]:
        """Return the files copied from the project into the image itself, or into the stage that builds."""
        last = self.instructions[-1].stage
        return [
            Copy(tuple(words[:-1]), words[-1])
            for instruction in self.instructions
            if instruction.word == "COPY" and (instruction.stage == last) == of_last_stage
            for words in [instruction.arguments.split()]
            if not words[0].startswith("--from")
        ]

    def pins(self, constraints: Path) -> list[Requirement]:
        """Return the pins that are installed below /opt/kvplace and hold for this Python."""
        cuts = {cut["file"]: (cut["command"], cut["program"]) for cut in _CUT.finditer(self._run())}
        text = ""
        for step in filter(_INSTALLS.search, self._run().split("&&")):
            for file in re.findall(r"(?<= -r )\S+", step):
                command, program = cuts[file]
                text += subprocess.run(
                    [*command.split(), program, constraints], capture_output=True, text=True, check=True
                ).stdout
        read = [Requirement(found["pin"].strip()) for found in _PIN.finditer(text)]
        if not read:
            raise ValueError(f"{self.path} installs no pins of constraints.txt below /opt/kvplace")
        return [pin for pin in read if pin.marker is None or pin.marker.evaluate()]

    def debian_packages(self) -> list[str]:
        """Return the names of the Debian packages that are installed into the image itself."""
        steps = (step.arguments for step in self._last_stage() if step.word == "RUN")
        return [name for step in steps for found in _APT.finditer(step) for name in found["names"].split()]

    def installs_kvplace_itself(self) -> bool:
        """Whether a wheel of kvplace is built and installed; otherwise its folders are copied."""
        return "pip wheel" in self._run()

    def _run(self) -> str:
        return " && ".join(step.arguments for step in self.instructions if step.word == "RUN")

    def _last_stage(self) -> Iterator[Instruction]:
        last = self.instructions[-1].stage
        return (instruction for instruction in self.instructions if instruction.stage == last)


def _instructions(text: str) -> Iterator[Instruction]:
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    stage = -1
    for line in lines.replace("\\\n", " ").splitlines():
        word, _, arguments = line.strip().partition(" ")
        if word == "FROM":
            stage += 1
        if word:
            yield Instruction(stage, word, " ".join(arguments.split()))


def _pairs(arguments: str) -> Iterator[tuple[str, str]]:
    for word in shlex.split(arguments):
        name, _, value = word.partition("=")
        yield name, value
