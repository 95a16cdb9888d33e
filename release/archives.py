"""Archives that hold the same bytes whenever they are written."""

from __future__ import annotations

import gzip
import tarfile
from datetime import datetime
from pathlib import Path


def write_tar_gz(target: Path, folder: Path, top: str, date: datetime) -> None:
    """Pack a folder as `top/`; every file has that date and belongs to root."""

    def described(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        member.mtime = int(date.timestamp())
        executable = member.isdir() or member.mode & 0o100
        member.mode = 0o755 if executable else 0o644
        return member

    with (
        target.open("wb") as raw,
        gzip.GzipFile(fileobj=raw, filename="", mode="wb", compresslevel=6, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        archive.add(folder, arcname=top, recursive=False, filter=described)
        for path in sorted(folder.rglob("*")):
            archive.add(path, arcname=f"{top}/{path.relative_to(folder)}", recursive=False, filter=described)
