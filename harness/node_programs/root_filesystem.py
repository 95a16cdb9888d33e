"""A container's root file system in a folder, put together from this machine's own files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from harness.build_cache import BuildFailed
from harness.go_build import tail

_MERGED = ("bin", "sbin", "lib", "lib64")


class RootFilesystem:
    """Files laid out below a folder; paths given to it are absolute, as the container sees them.

    It is merged-usr: /bin, /sbin, /lib and /lib64 are links into /usr, which the lowest layer has.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._programs: list[Path] = []

    def skeleton(self) -> None:
        """Make what the lowest layer of an image has: the folders and links that every program expects."""
        for name in _MERGED:
            self.folder(f"/usr/{name}")
            self.link(f"/{name}", f"usr/{name}")
        for name in ("dev", "etc", "proc", "sys", "run", "var"):
            self.folder(f"/{name}")
        self.link("/var/run", "../run")
        self.folder("/tmp", mode=0o1777)

    def at(self, path: str | Path) -> Path:
        """Return where a path of the container is on this machine."""
        words = Path(path).parts[1:]
        if len(words) > 1 and words[0] in _MERGED:
            words = ("usr", *words)
        return self.root.joinpath(*words)

    def folder(self, path: str, mode: int = 0o755) -> None:
        """Make a folder and those above it."""
        self.at(path).mkdir(parents=True, exist_ok=True)
        self.at(path).chmod(mode)

    def file(self, source: Path, path: str | Path | None = None) -> None:
        """Copy a file to a path, or to where it is here; it is made readable for all."""
        target = self.at(path or source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
        target.chmod(target.stat().st_mode | 0o444)

    def program(self, source: Path, path: str | Path | None = None) -> None:
        """Copy a program or shared library; `add_libraries` then adds what it is linked to."""
        self.file(source, path)
        self._programs.append(source)

    def text(self, path: str, content: str, mode: int = 0o644) -> None:
        """Write a file."""
        target = self.at(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)
        target.chmod(mode)

    def link(self, path: str, target: str) -> None:
        """Make a symbolic link."""
        self.at(path).parent.mkdir(parents=True, exist_ok=True)
        self.at(path).symlink_to(target)

    def users(self, *entries: tuple[str, int, str]) -> None:
        """Write /etc/passwd and /etc/group: root and (name, user and group id, home) of each other user."""
        everybody = (("root", 0, "/"), *entries)
        self.text("/etc/passwd", "".join(f"{n}:x:{i}:{i}:{n}:{home}:/bin/sh\n" for n, i, home in everybody))
        self.text("/etc/group", "".join(f"{name}:x:{number}:\n" for name, number, _ in everybody))
        self.text("/etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n")

    def add_libraries(self, *, present: Iterable[Path] = (), besides: Path | None = None) -> None:
        """Add the shared libraries of all programs so far.

        Libraries of a lower layer, and of the folder `besides`, which came with it, are left out.
        """
        for library in sorted(libraries_of(self._programs).difference(present)):
            came_along = besides is not None and library.is_relative_to(besides)
            if not came_along and not self.at(library).exists():
                self.file(library)

    def index_libraries(self) -> None:
        """Write what the dynamic linker reads to find libraries."""
        self.text("/etc/ld.so.conf", "/usr/local/lib\n/usr/lib/x86_64-linux-gnu\n")
        subprocess.run(["/sbin/ldconfig", "-r", self.root], check=True, stdin=subprocess.DEVNULL)


def libraries_of(programs: Iterable[Path]) -> set[Path]:
    """Return the shared libraries that programs and libraries are linked to, each with all of its own."""
    named = [str(program) for program in programs]
    # One program that is not dynamic makes the exit code 1.
    answer = subprocess.run(["ldd", *named], capture_output=True, text=True, check=False)
    missing = re.findall(r"^\s+(\S+ => not found)$", answer.stdout, re.MULTILINE)
    if missing:
        raise BuildFailed(f"libraries of {', '.join(named)} are missing here: {', '.join(set(missing))}")
    if not answer.stdout:
        raise BuildFailed(f"ldd stated nothing of {', '.join(named)}:\n{tail(answer.stderr)}")
    found = re.findall(r"(?:=> |^\s+)(/\S+) \(0x", answer.stdout, re.MULTILINE)
    return {Path(os.path.normpath(path)) for path in found}
