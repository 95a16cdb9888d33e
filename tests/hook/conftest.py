"""The pod that the hook of each test is in, and the hook itself as a process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from harness.waiting import PATIENCE_S
from kvplace.hook.process import PodEnvironment
from tests.hook.machine import NODE, PodFolder, pod_environment, two_socket_machine

PROJECT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    two_socket_machine(tmp_path)
    return tmp_path


@pytest.fixture
def env(machine: Path) -> PodEnvironment:
    return pod_environment(machine)


@pytest.fixture
def pod(env: PodEnvironment) -> PodFolder:
    return PodFolder(Path(env.pod_folder))


@dataclass
class HookProcess:
    """`kvplace-hook serve` in a pod on this machine."""

    root: Path
    pod: PodFolder
    environ: dict[str, str]
    program: list[str] = field(default_factory=lambda: [sys.executable, "-m", "kvplace.hook"])
    process: subprocess.Popen[str] | None = field(default=None, repr=False)

    @property
    def socket(self) -> Path:
        return self.root / "hooks/kvplace-hook-sidecar-0.sock"

    def start(self) -> None:
        """Start it and wait until it reports that it serves."""
        command = [*self.program, "serve"]
        self.process = subprocess.Popen(command, env=self.environ, stderr=subprocess.PIPE, text=True)
        assert "serving on" in self.next_log_line()

    def next_log_line(self) -> str:
        assert self.process is not None
        assert self.process.stderr is not None
        return self.process.stderr.readline()

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run another `kvplace-hook` command at the same time, as a probe does."""
        command = [*self.program, *words]
        return subprocess.run(
            command, env=self.environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait(timeout=PATIENCE_S)


@pytest.fixture
def hook() -> Iterator[HookProcess]:
    """A hook that is not started yet; its folder is short, because socket paths must be."""
    root = Path(tempfile.mkdtemp(prefix="hook"))
    environ = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(PROJECT),
        "KVPLACE_POD_FOLDER": str(root / "pod"),
        "KVPLACE_HOOK_FOLDER": str(root / "hooks"),
        "CONTAINER_NAME": "hook-sidecar-0",
        "NODE_NAME": NODE,
    }
    hook = HookProcess(root, PodFolder(root / "pod"), environ)
    yield hook
    if hook.process is not None:
        hook.process.kill()
        hook.process.wait()
        if hook.process.stderr is not None:
            hook.process.stderr.close()
    shutil.rmtree(root)
