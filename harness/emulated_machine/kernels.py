"""Debian's kernels, fetched once and kept; nothing is installed, and no root is needed.

`python -m harness.emulated_machine.kernels` fetches them ahead of a test run.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from harness.emulated_machine import initramfs as initramfs_parts
from harness.emulated_machine.initramfs import MODULES, in_loading_order, initramfs

_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_PROGRAMS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "apt-get": "apt",
    "dpkg-deb": "dpkg",
    "setpriv": "util-linux",
}


_TARGET, _PACKAGES = "$(REPO_URI) $(RELEASE)", "Created-By: Packages"


class NoMachineHere(Exception):
    """Machines cannot be emulated here; the message names the missing program."""


class FetchFailed(Exception):
    """A kernel could not be fetched; the message ends with the output of apt."""


class Kernel(Enum):
    """The kernels to boot, by Debian's suite; a shrinking cpuset changes affinities in different ways."""

    V6_1 = "bookworm"
    """Forgets a thread's own affinity when its cpuset leaves no CPU of it."""
    V6_12 = "bookworm-backports"
    """Remembers it, as every kernel since 6.2 does."""


@dataclass(frozen=True, slots=True)
class Boot:
    """The two files that QEMU boots."""

    kernel: Path
    initramfs: Path


def fetched(kernel: Kernel) -> Boot:
    """Give a kernel to boot, fetching it when it is not there yet.

    Raises NoMachineHere where it cannot be had, FetchFailed where Debian's mirror does not give it.
    """
    if platform.machine() != "x86_64":
        raise NoMachineHere(f"only shapes of x86_64 are described, and this machine is {platform.machine()}")
    for program, package in _PROGRAMS.items():
        if shutil.which(program) is None:
            raise NoMachineHere(f"no {program} (Debian: {package})")
    recipe = hashlib.sha256(repr((kernel.value, MODULES)).encode()).hexdigest()[:16]
    image = _kept(kernel.name, recipe, lambda folder: _fetch(kernel, folder))
    busybox = Path(shutil.which("busybox") or "")
    parts = hashlib.sha256(Path(initramfs_parts.__file__).read_bytes())
    parts.update(busybox.read_bytes())
    parts.update(recipe.encode())

    def build(folder: Path) -> None:
        (folder / "initramfs").write_bytes(initramfs(busybox, image / "modules"))

    built = _kept(f"{kernel.name}_initramfs", parts.hexdigest()[:16], build)
    return Boot(image / "vmlinuz", built / "initramfs")


def cache_folder() -> Path:
    """Return the folder of all kernels, made when missing."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "kvplace" / "emulated-machine"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _fetch(kernel: Kernel, folder: Path) -> None:
    """Download a kernel's package with package lists of its own, and unpack the parts for a guest."""
    print(f"fetching Debian's kernel of {kernel.value} (70 to 110 MB)", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="kvplace-kernel-") as name:
        apt = Path(name)
        for part in ("state/lists/partial", "cache/archives/partial", "files"):
            (apt / part).mkdir(parents=True)
        sources = _sources(kernel, _run(["apt-get", "indextargets", "--format", _TARGET, _PACKAGES], apt))
        lines = [f"deb [arch=amd64 signed-by={_KEYRING}] {source} main\n" for source in sources]
        (apt / "sources.list").write_text("".join(lines))
        options = [f"Dir::State={apt}/state", f"Dir::Cache={apt}/cache", "APT::Sandbox::User="]
        options += [f"Dir::Etc::sourcelist={apt}/sources.list", "Dir::Etc::sourceparts=/dev/null"]
        options += ["Dir::State::status=/dev/null", "APT::Default-Release=", "Acquire::Languages=none"]
        own = [word for option in options for word in ("-o", option)]
        _run(["apt-get", "-qq", *own, "update"], apt)
        depends = _run(["apt-cache", *own, "depends", "linux-image-amd64"], apt)
        package = next(line.split()[1] for line in depends.splitlines() if line.split()[0] == "Depends:")
        _run(["apt-get", "-qq", *own, "download", package], apt)
        (archive,) = apt.glob("*.deb")
        _run(["dpkg-deb", "-x", str(archive), str(apt / "files")], apt)
        (release,) = (apt / "files" / "lib" / "modules").iterdir()
        shutil.copyfile(apt / "files" / "boot" / f"vmlinuz-{release.name}", folder / "vmlinuz")
        (folder / "modules").mkdir()
        for number, (module, content) in enumerate(in_loading_order(release).items()):
            (folder / "modules" / f"{number:02}-{module}.ko").write_bytes(content)


def _sources(kernel: Kernel, targets: str) -> list[str]:
    """Name the kernel's suites on the mirrors that this machine's own apt uses, with any suites."""
    mirrors = {"": "", "security": ""}
    for line in targets.splitlines():
        uri, release = line.split()
        kind = release.partition("-")[2]
        mirrors[kind] = mirrors.get(kind) or uri
    found = [f"{mirrors['']} {kernel.value}"] if mirrors[""] else []
    if kernel is Kernel.V6_1 and mirrors["security"]:
        found.append(f"{mirrors['security']} {kernel.value}-security")
    return found


def _run(command: list[str], folder: Path) -> str:
    finished = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    if finished.returncode != 0:
        raise FetchFailed(
            f"`{' '.join(command)}` ended with {finished.returncode}:\n{finished.stderr.strip()[-2000:]}"
        )
    return finished.stdout


def _kept(name: str, version: str, make: Callable[[Path], None]) -> Path:
    """Give the folder of a name and version, filled by `make` where it is not there; older versions go."""
    place = cache_folder() / f"{name}-{version}"
    if place.is_dir():
        return place
    with (cache_folder() / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.is_dir():
            for left in cache_folder().glob(f"{name}-{'?' * len(version)}*"):
                shutil.rmtree(left)
            unfinished = cache_folder() / f"{name}-{version}.unfinished"
            unfinished.mkdir()
            make(unfinished)
            unfinished.rename(place)
    return place


def main() -> int:
    """Fetch every kernel, or state why that cannot be."""
    try:
        for kernel in Kernel:
            fetched(kernel)
    except (NoMachineHere, FetchFailed) as reason:
        print(f"no emulated machines: {reason}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
