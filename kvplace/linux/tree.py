"""The files of a machine: its live root, a copied folder, or a tar archive of one.

An archive may come from a stranger, so it is never extracted: only the small files below
`sys/devices/system`, `sys/kernel/mm`, `proc` and the kubelet's folder are read, within limits.
Links, devices and paths that lead outside are ignored.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import stat
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from kvplace.core.errors import BadTopology

CPU_FOLDER = "sys/devices/system/cpu"
CPU_MANAGER_STATE = "var/lib/kubelet/cpu_manager_state"
_WANTED_BELOW = ("sys/devices/system/cpu/", "sys/devices/system/node/", "sys/kernel/mm/hugepages/")
_WANTED = ("proc/meminfo", CPU_MANAGER_STATE)
MAX_ARCHIVE_BYTES = 64 * 1024 * 1024
"""Largest archive that is read; the archive of a machine with 96 CPUs has 60 KiB."""

_MAX_MEMBERS = 400_000
_MAX_FILE = 256 * 1024
_MAX_TOTAL = 64 * 1024 * 1024
_MAX_UNPACKED = 512 * 1024 * 1024
_MAX_AT_ONCE = 1024 * 1024
"""Largest single read; only a forged header needs more."""

_COMPRESSIONS = ((b"\x1f\x8b", gzip.open), (b"BZh", bz2.open), (b"\xfd7zXZ", lzma.open))
_BROKEN = (tarfile.TarError, EOFError, OSError, ValueError, zlib.error, lzma.LZMAError, RecursionError)
"""Errors of reading a damaged or hostile archive."""


class Tree(Protocol):
    """Files by their path from the machine's root, without a leading slash."""

    name: str
    """Its name in errors."""

    def read(self, path: str) -> str | None:
        """Read a file; None when it is missing or cannot be read now, as sysfs files sometimes cannot.

        Raises BadTopology for one that is longer than any such file.
        """
        ...

    def entries(self, path: str) -> list[str]:
        """List the names in a folder; empty when there is no such folder."""
        ...


def open_tree(path: Path) -> Tree:
    """Open a folder or a tar archive that holds `sys/`, at its top or in one folder below.

    Raises BadTopology, which names the file and its proper content.
    """
    try:
        if path.is_dir():
            return FolderTree(_root_of(path))
        with path.open("rb") as file:
            return read_archive(str(path), file.read(MAX_ARCHIVE_BYTES + 1))
    except OSError as error:
        raise BadTopology(f"{path} cannot be read: {error.strerror}") from None


def read_archive(name: str, content: bytes) -> Tree:
    """Read a tar archive, plain or compressed; raises BadTopology as `open_tree` does."""
    if len(content) > MAX_ARCHIVE_BYTES:
        raise BadTopology(f"{name} is longer than {MAX_ARCHIVE_BYTES >> 20} MiB; pack only sys/ and proc/")
    try:
        machines = _machines_in(name, content)
    except _BROKEN as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise BadTopology(f"{name} cannot be read as a tar archive: {why}") from None
    return _ArchiveTree(
        name, machines[_only_machine(name, [root for root in machines if _is_one(machines[root])])]
    )


def looks_like_archive(content: bytes) -> bool:
    """Recognise a tar archive, plain or compressed, by its first bytes."""
    return content[257:262] == b"ustar" or any(content.startswith(magic) for magic, _ in _COMPRESSIONS)


class FolderTree:
    """A machine's root in the file system; `/` is this machine."""

    def __init__(self, root: Path) -> None:
        self.name = str(root)
        self._root = root

    def read(self, path: str) -> str | None:
        try:
            # O_NONBLOCK: a pipe in place of a file must not block until a writer opens it.
            descriptor = os.open(self._root / path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    return None
                with os.fdopen(descriptor, "rb", closefd=False) as file:
                    content = file.read(_MAX_FILE + 1)
            finally:
                os.close(descriptor)
        except OSError:
            return None
        return _text(self.name, path, content)

    def entries(self, path: str) -> list[str]:
        try:
            return [entry.name for entry in (self._root / path).iterdir()]
        except OSError:
            return []


class _ArchiveTree:
    """A machine's root in a tar archive, read once."""

    def __init__(self, name: str, files: Mapping[str, bytes | None]) -> None:
        self.name = name
        self._files = files
        self._folders: dict[str, dict[str, None]] = {}
        for path in files:
            while "/" in path:
                path, _, entry = path.rpartition("/")
                self._folders.setdefault(path, {})[entry] = None

    def read(self, path: str) -> str | None:
        content = self._files.get(path)
        return None if content is None else _text(self.name, path, content)

    def entries(self, path: str) -> list[str]:
        return list(self._folders.get(path, ()))


class _Bounded:
    """A stream that raises ReadError beyond the limits, as for a decompression bomb."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _MAX_AT_ONCE:
            raise tarfile.ReadError("one of its headers is too long")
        self._check(self._stream.tell() + size)
        return self._stream.read(size)

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        self._check(position)
        return self._stream.seek(position, whence)

    def tell(self) -> int:
        return self._stream.tell()

    def _check(self, position: int) -> None:
        if position > _MAX_UNPACKED:
            raise tarfile.ReadError(
                f"it decompresses to more than {_MAX_UNPACKED >> 20} MiB; pack only sys/ and proc/"
            )


def _machines_in(name: str, content: bytes) -> dict[str, dict[str, bytes | None]]:
    """Read the wanted files of an archive by the root folder of their machine; folders are None."""
    opened = next((open_ for magic, open_ in _COMPRESSIONS if content.startswith(magic)), None)
    packed = io.BytesIO(content)
    stream = cast(BinaryIO, packed if opened is None else opened(packed))
    machines: dict[str, dict[str, bytes | None]] = {}
    total = 0
    with tarfile.open(fileobj=cast(BinaryIO, _Bounded(stream)), mode="r:") as archive:
        for count, member in enumerate(archive):
            if count >= _MAX_MEMBERS:
                raise tarfile.ReadError(
                    f"it contains more than {_MAX_MEMBERS} files; pack only sys/ and proc/"
                )
            place = _place_of(member.name)
            if place is None or not (member.isreg() or member.isdir()):
                continue
            root, path = place
            file = archive.extractfile(member) if member.isreg() else None
            found = None if file is None else file.read(_MAX_FILE + 1)
            total += len(found or b"")
            if total > _MAX_TOTAL:
                raise tarfile.ReadError(f"it contains more than {_MAX_TOTAL >> 20} MiB below sys/")
            machines.setdefault(root, {})[path] = found
    return machines


def _place_of(name: str) -> tuple[str, str] | None:
    """Split a path into the machine's root and the path below it; None for files that are not read."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        return None
    for depth in (0, 1):
        path = "/".join(parts[depth:])
        if path in _WANTED or (path + "/").startswith(_WANTED_BELOW):
            return "/".join(parts[:depth]), path
    return None


def _is_one(files: Mapping[str, bytes | None]) -> bool:
    return any(path.startswith(CPU_FOLDER + "/") for path in files)


def _root_of(folder: Path) -> Path:
    if (folder / CPU_FOLDER).is_dir() or folder == Path("/"):
        return folder
    below = [entry.name for entry in folder.iterdir() if (entry / CPU_FOLDER).is_dir()]
    return folder / _only_machine(str(folder), below)


def _only_machine(name: str, roots: list[str]) -> str:
    """Choose the top folder if a machine is there, else the only folder with one."""
    if not roots:
        raise BadTopology(
            f"{name} contains no {CPU_FOLDER}; give a folder or tar archive with the sys/ (and proc/)"
            " of a machine"
        )
    if "" in roots:
        return ""
    if len(roots) > 1:
        raise BadTopology(
            f"{name} contains {len(roots)} machines: {', '.join(sorted(roots)[:8])}; give one of them"
        )
    return roots[0]


def _text(name: str, path: str, content: bytes) -> str:
    if len(content) > _MAX_FILE:
        raise BadTopology(f"{name}: {path} is longer than {_MAX_FILE} bytes, more than any such file")
    return content.decode("utf-8", "replace")
