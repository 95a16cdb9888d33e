"""A shell in which the commands of the pages run as they stand there: `kubectl kvplace` and the like."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from harness.control_plane.cluster import ControlPlane
from tests.docs.blocks import command_lines
from tests.docs.reading import PROJECT

_FOLDERS = ("manifests", "vm-templates")
_FOLLOWS = re.compile(r" -w\b")


class Shell:
    """Runs commands in a folder that holds what a checkout does; with a cluster, as its administrator."""

    def __init__(self, folder: Path, plane: ControlPlane | None = None, namespace: str = "default") -> None:
        self.folder = folder / "checkout"
        self.folder.mkdir()
        for name in _FOLDERS:
            (self.folder / name).symlink_to(PROJECT / name)
        programs = folder / "bin"
        programs.mkdir()
        for name in ("kvplace", "kubectl-kvplace"):
            _write_program(programs / name, f'exec {sys.executable} -m kvplace "$@"')
        environment = {**os.environ, "PYTHONPATH": str(PROJECT), "KUBECONFIG": str(folder / "none")}
        if plane is not None:
            _write_program(programs / "kubectl", f'exec {plane.programs}/kubernetes kubectl "$@"')
            kubeconfig = folder / "kubeconfig"
            kubeconfig.write_text(plane.kubectl("config", "view", "--raw", "--flatten"))
            plane.kubectl(
                "config", "set-context", "--current", f"--namespace={namespace}", kubeconfig=kubeconfig
            )
            environment = plane.kubectl_environment(kubeconfig) | {"PYTHONPATH": str(PROJECT)}
        self._environment = {**environment, "PATH": f"{programs}:{environment['PATH']}"}

    def run(
        self,
        block: str,
        *,
        instead: Mapping[str, str] | None = None,
        codes: Mapping[str, set[int]] | None = None,
    ) -> list[str]:
        """Run each line of a block and return what each printed; a line that follows runs until it prints.

        Args:
            block: its text, comments included.
            instead: what takes the place of words that a reader fills in, such as a name of a node.
            codes: other exit codes than 0 that a command may end with, by how it begins.
        """
        for word, value in (instead or {}).items():
            assert word in block, f"{word!r} does not stand in the block any more"
            block = block.replace(word, value)
        return [
            self._first_line(line) if _FOLLOWS.search(line) else self._whole(line, codes or {})
            for line in command_lines(block)
        ]

    def _whole(self, line: str, codes: Mapping[str, set[int]]) -> str:
        done = subprocess.run(
            ["sh", "-c", line],
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        expected = {0}.union(*(allowed for begin, allowed in codes.items() if line.startswith(begin)))
        assert done.returncode in expected, f"{line}: {done.returncode}: {done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr, f"{line}: {done.stderr}"
        return done.stdout

    def _first_line(self, line: str) -> str:
        with subprocess.Popen(
            ["sh", "-c", f"exec {line}"],
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            printed = process.stdout.readline()
            process.send_signal(signal.SIGINT)
            process.stdout.read()
        assert printed, line
        return printed


def _write_program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
