"""The files of a machine: its live root, a copied folder, or a tar archive of one.

A captured machine was packed by somebody else, so an archive is never unpacked: only the small files
below `sys/devices/system`, `sys/kernel/mm` and `proc` are read, into memory and within limits.
"""

from __future__ import annotations

import tarfile
from pathlib import Path, PurePosixPath
from typing import Protocol

from kvplace.core.errors import BadTopology

CPU_FOLDER = "sys/devices/system/cpu"
_WANTED = ("sys/devices/system/cpu/", "sys/devices/system/node/", "sys/kernel/mm/hugepages/", "proc/meminfo")
_MAX_MEMBERS = 2_000_000
_MAX_FILE = 256 * 1024
_MAX_TOTAL = 256 * 1024 * 1024


class Tree(Protocol):
    """Files by their path from the machine's root, without a leading slash."""

    name: str
    """What a person calls it, for errors."""

    def read(self, path: str) -> str | None:
        """Read a file; None when it is missing or cannot be read now, as sysfs files sometimes cannot."""
        ...

    def entries(self, path: str) -> list[str]:
        """List the names in a folder; empty when there is no such folder."""
        ...


def open_tree(path: Path) -> Tree:
    """Open a folder or a tar archive that holds `sys/`, at its top or in one folder below.

    Raises BadTopology that names the file and says what it should hold.
    """
    if path.is_dir():
        return FolderTree(_root_of(path))
    if not path.exists():
        raise BadTopology(
            f"{path} does not exist; give a folder or tar archive that holds the machine's sys/"
        )
    try:
        with tarfile.open(path, "r:*") as archive:
            return ArchiveTree(str(path), archive)
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        # With no compression known to it, tarfile lists what it tried, a line for each.
        why = str(error).partition("\n")[0].rstrip(":")
        raise BadTopology(f"{path} is no folder and cannot be read as a tar archive: {why}") from None


class FolderTree:
    """A machine's root in the file system; `/` is this machine."""

    def __init__(self, root: Path) -> None:
        self.name = str(root)
        self._root = root

    def read(self, path: str) -> str | None:
        try:
            with (self._root / path).open("rb") as file:
                return file.read(_MAX_FILE).decode("utf-8", "replace")
        except OSError:
            return None

    def entries(self, path: str) -> list[str]:
        try:
            return [entry.name for entry in (self._root / path).iterdir()]
        except OSError:
            return []


class ArchiveTree:
    """A machine's root in a tar archive, read once."""

    def __init__(self, name: str, archive: tarfile.TarFile) -> None:
        self.name = name
        self._files: dict[str, bytes] = {}
        self._folders: dict[str, dict[str, None]] = {}
        self._load(archive)

    def read(self, path: str) -> str | None:
        content = self._files.get(path)
        return None if content is None else content.decode("utf-8", "replace")

    def entries(self, path: str) -> list[str]:
        return list(self._folders.get(path, ()))

    def _load(self, archive: tarfile.TarFile) -> None:
        total = 0
        for count, member in enumerate(archive):
            if count >= _MAX_MEMBERS:
                raise BadTopology(
                    f"{self.name} holds more than {_MAX_MEMBERS} files: that is no machine's sys/"
                )
            path = _inside(member.name)
            if path is None or not (member.isreg() or member.isdir()):
                continue
            self._remember(path)
            if not member.isreg():
                self._folders.setdefault(path, {})
                continue
            total += min(member.size, _MAX_FILE)
            if total > _MAX_TOTAL:
                raise BadTopology(
                    f"{self.name} unpacks to more than {_MAX_TOTAL >> 20} MiB: give only its sys/ and proc/"
                )
            content = archive.extractfile(member)
            if content is not None:
                self._files[path] = content.read(_MAX_FILE)
        if CPU_FOLDER not in self._folders:
            raise BadTopology(_no_sys(self.name))

    def _remember(self, path: str) -> None:
        while "/" in path:
            path, _, name = path.rpartition("/")
            self._folders.setdefault(path, {})[name] = None


def _inside(name: str) -> str | None:
    """The path from the machine's root, when the file is one that we read."""
    parts = [part for part in PurePosixPath(name).parts if part not in (".", "/")]
    for start in (0, 1):
        path = "/".join(parts[start:])
        if any(path.startswith(wanted) or wanted == path + "/" for wanted in _WANTED):
            return path
    return None


def _root_of(folder: Path) -> Path:
    candidates = (
        [folder, *sorted(entry for entry in folder.iterdir() if entry.is_dir())]
        if folder != Path("/")
        else [folder]
    )
    for candidate in candidates:
        if (candidate / CPU_FOLDER).is_dir():
            return candidate
    raise BadTopology(_no_sys(str(folder)))


def _no_sys(name: str) -> str:
    return (
        f"{name} holds no {CPU_FOLDER}; give a folder or tar archive with the sys/ (and proc/) of a machine"
    )
