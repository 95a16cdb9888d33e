"""The job of the benchmark `neighbours`: its program, its image for pods and guests, and its answers."""

from __future__ import annotations

import hashlib
import json
import math
import stat
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from harness.build_cache import BuildFailed, built_once
from harness.emulated_machine.initramfs import Entry, cpio
from harness.emulated_machine.kernels import Kernel, fetched
from harness.node_programs.image import Image, Layer
from harness.node_programs.oci_archive import Attributes, ImageConfiguration

REFERENCE = "docker.io/kvplace/timed-job:1"
PROGRAM, KERNEL, INITRAMFS = "/timed_job", "/boot/vmlinuz", "/boot/initramfs"
"""The files of the image; a pod runs the first, a VM boots the others."""
EACH_LINE = "each-line"
"""The last argument; the program then does its job for each line of its input."""
READY = "timed_job is ready"
"""The answer of the program to an empty line."""
_SOURCE = Path(__file__).with_suffix(".c")


@dataclass(frozen=True, slots=True)
class Size:
    """How much the job does."""

    iterations: int
    """Of the computation."""
    wake_ups: int
    interval_us: int

    def arguments(self) -> list[str]:
        """Return it as the program's arguments."""
        return [str(self.iterations), str(self.wake_ups), str(self.interval_us)]


@dataclass(frozen=True, slots=True)
class Timing:
    """One run of the job, or the medians of several."""

    run_s: float
    p50_us: float
    p99_us: float
    max_us: float

    @classmethod
    def read(cls, line: str) -> Timing:
        """Read the line that the program prints; raises `ValueError` for another one."""
        printed = json.loads(line)
        if not isinstance(printed, dict) or not printed.get("lateUs"):
            raise ValueError(f"not an answer of the job: {line[:80]!r}")
        late = sorted(printed["lateUs"])
        return cls(printed["runUs"] / 1e6, _percentile(late, 50), _percentile(late, 99), late[-1])

    @classmethod
    def median(cls, timings: Sequence[Timing]) -> Timing:
        """Return the median of each figure."""
        return cls(
            statistics.median(one.run_s for one in timings),
            statistics.median(one.p50_us for one in timings),
            statistics.median(one.p99_us for one in timings),
            statistics.median(one.max_us for one in timings),
        )


def _percentile(in_order: Sequence[float], percent: int) -> float:
    """Return the smallest value that `percent` of all values do not exceed."""
    return in_order[math.ceil(len(in_order) * percent / 100) - 1]


@cache
def program() -> Path:
    """Compile the program, statically, where that is not done yet; raises `BuildFailed`."""

    def build(folder: Path) -> None:
        command: list[str | Path] = ["gcc", "-static", "-O2", "-o", folder / "timed_job", _SOURCE]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BuildFailed(f"{_SOURCE.name} could not be compiled:\n{done.stderr}")

    fingerprint = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()
    built = built_once("timed-job", fingerprint, build, contents="the timed job", unused_days=7)
    return built / "timed_job"


def image() -> Image:
    """Return the image: the program, and a kernel with an initramfs that starts the program."""
    job, kernel = program(), fetched(Kernel.V6_1).kernel

    def lay_out(root: Path) -> Attributes:
        first_process = Entry("init", stat.S_IFREG | 0o755, job.read_bytes())
        files = {
            PROGRAM: job.read_bytes(),
            KERNEL: kernel.read_bytes(),
            INITRAMFS: cpio([first_process]),
        }
        for path, content in files.items():
            place = root / path.lstrip("/")
            place.parent.mkdir(exist_ok=True)
            place.write_bytes(content)
            place.chmod(0o755)
        return Attributes()

    layer = Layer("timed-job", (job.parent.name, kernel.parent.name), lay_out)
    return Image(REFERENCE, (layer,), ImageConfiguration(entrypoint=(PROGRAM,)))
