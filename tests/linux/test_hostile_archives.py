"""Archives and folders from strangers are read within limits, or refused in one sentence."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.errors import BadTopology
from kvplace.linux.sysfs import discover
from kvplace.linux.tree import FolderTree, open_tree, read_archive
from kvplace.machines.server_types import read_machine
from tests.core.invalid_input import answer_or_sentence
from tests.linux.written_tree import sysfs_of

CPU = "sys/devices/system/cpu"
ONE_CPU = {f"{CPU}/online": "0\n", f"{CPU}/cpu0/topology/core_cpus_list": "0\n"}
TREE = sysfs_of(read_machine("epyc-7502p")).files


def member(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0, link: str = "") -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type, found.size, found.linkname = kind, size, link
    return found


def archive(files: dict[str, str], *more: tarfile.TarInfo) -> bytes:
    """Pack files, and after them members that have a header alone."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, text in files.items():
            tar.addfile(member(name, size=len(text)), io.BytesIO(text.encode()))
        for info in more:
            tar.addfile(info)
    return packed.getvalue()


def cpus(content: bytes) -> int:
    return discover(read_archive("here.tar", content)).topology.cpus


def refused(content: bytes) -> str:
    with pytest.raises(BadTopology) as raised:
        cpus(content)
    said = str(raised.value)
    assert said.startswith("here.tar")
    assert "\n" not in said
    return said


@pytest.mark.parametrize(
    "pack", [bytes, gzip.compress, bz2.compress, lzma.compress], ids=["tar", "gz", "bz2", "xz"]
)
def test_an_archive_is_read_however_it_is_compressed(pack: Callable[[bytes], bytes]) -> None:
    assert cpus(pack(archive({f"host/{name}": text for name, text in TREE.items()}))).bit_count() == 64


def test_links_devices_pipes_and_paths_that_lead_outside_are_ignored() -> None:
    content = archive(
        ONE_CPU,
        member(f"{CPU}/cpu1/topology", tarfile.SYMTYPE, link="/etc"),
        member(
            f"{CPU}/cpu2/topology/core_cpus_list", tarfile.SYMTYPE, link="../../../../../../../etc/passwd"
        ),
        member(
            f"{CPU}/cpu3/topology/core_cpus_list", tarfile.LNKTYPE, link=f"{CPU}/cpu3/topology/core_cpus_list"
        ),
        member(f"{CPU}/cpu4/topology/core_cpus_list", tarfile.FIFOTYPE),
        member(f"{CPU}/cpu5/topology/core_cpus_list", tarfile.CHRTYPE),
        member(f"../{CPU}/cpu6/topology/core_cpus_list"),
        member(f"{CPU}/../../../../{CPU}/cpu7/topology/core_cpus_list"),
    )
    assert cpus(content) == 1


def test_an_absolute_path_is_relative_to_the_root_of_the_machine() -> None:
    assert cpus(archive({f"/{name}": text for name, text in ONE_CPU.items()})) == 1


def test_a_folder_in_place_of_a_file_is_a_missing_file() -> None:
    tree = dict(TREE)
    del tree[f"{CPU}/online"]
    whole = archive(tree, member(f"{CPU}/online", tarfile.DIRTYPE))
    assert cpus(whole).bit_count() == 64


def test_an_archive_of_several_machines_is_refused(tmp_path: Path) -> None:
    two = {f"{host}/{name}": text for host in ("w1", "w2") for name, text in ONE_CPU.items()}
    assert "contains 2 machines: w1, w2; give one of them" in refused(archive(two))
    assert cpus(archive(two | ONE_CPU)) == 1
    for name, text in two.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="ascii")
    with pytest.raises(BadTopology, match="contains 2 machines: w1, w2"):
        open_tree(tmp_path)
    assert discover(open_tree(tmp_path / "w1")).topology.cpus == 1


class Zeros(io.RawIOBase):
    """So many zeros, without holding them."""

    def __init__(self, count: int) -> None:
        self._left = count

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        count = min(len(buffer), self._left)
        buffer[:count] = bytes(count)
        self._left -= count
        return count


def bomb(info: tarfile.TarInfo, size: int) -> bytes:
    """Compress a member of zeros that is far larger than its archive."""
    packed = io.BytesIO()
    info.size = size
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=1) as stream:
        stream.write(info.tobuf(tarfile.GNU_FORMAT))
        source = Zeros(min(size, 4 << 20))
        while chunk := source.read(1 << 20):
            stream.write(chunk)
    return packed.getvalue()


def test_a_decompression_bomb_is_refused_at_the_limit() -> None:
    assert "it decompresses to more than 512 MiB" in refused(bomb(member("big"), 1 << 40))
    long_name = member("././@LongLink", tarfile.GNUTYPE_LONGNAME)
    assert "one of its headers is too long" in refused(bomb(long_name, 1 << 29))
    headers = member("././@PaxHeader", tarfile.XHDTYPE)
    assert "one of its headers is too long" in refused(bomb(headers, 1 << 29))


def test_an_endless_chain_of_headers_is_refused() -> None:
    chain = b"".join(
        member("x", tarfile.GNUTYPE_LONGNAME, 1).tobuf() + b"x".ljust(512, b"\0") for _ in range(3000)
    )
    refused(chain)


def test_a_file_longer_than_any_of_sysfs_is_refused_with_its_name() -> None:
    said = refused(archive(TREE | {f"{CPU}/online": "0," * 200_000}))
    assert f"{CPU}/online is longer than 262144 bytes" in said


def test_an_archive_without_a_machine_is_refused_with_the_folders_it_should_contain() -> None:
    assert "contains no sys/devices/system/cpu" in refused(archive({"etc/passwd": "root"}))


WHOLE = {pack: pack(archive(TREE)) for pack in (gzip.compress, bz2.compress, lzma.compress)}
PLAIN = archive(ONE_CPU)


@given(st.data())
def test_a_damaged_archive_is_read_or_refused_in_one_sentence(data: st.DataObject) -> None:
    content = bytearray(data.draw(st.sampled_from([PLAIN, *WHOLE.values()])))
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    del content[data.draw(st.integers(0, len(content))) :]
    answer_or_sentence(cpus, bytes(content), BadTopology)


@given(st.binary(max_size=600))
def test_random_bytes_are_refused_in_one_sentence(content: bytes) -> None:
    assert answer_or_sentence(cpus, content, BadTopology)[0] is None


def lay(folder: Path) -> Path:
    for name, text in ONE_CPU.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="ascii")
    return folder


def test_pipes_devices_folders_and_dead_links_in_a_folder_are_missing_files(tmp_path: Path) -> None:
    base = lay(tmp_path) / CPU
    os.mkfifo(base / "isolated")
    (base / "cpu0" / "online").symlink_to("/dev/zero")
    (base / "cpu0" / "topology" / "package_cpus_list").mkdir()
    (base / "cpu0" / "cache").symlink_to(tmp_path / "nowhere")
    assert discover(FolderTree(tmp_path)).topology.cpus == 1


def test_circular_links_end(tmp_path: Path) -> None:
    base = lay(tmp_path) / CPU
    (base / "cpu0" / "cache").symlink_to(base / "cpu0" / "cache")
    (base / "cpu1").symlink_to(base)
    assert discover(open_tree(tmp_path)).topology.cpus == 1


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    for path, words in (
        (tmp_path / "gone", "cannot be read: No such file"),
        (lay(tmp_path) / CPU / "online" / "below", "cannot be read: Not a directory"),
        (tmp_path / ("long" * 100), "cannot be read: File name too long"),
    ):
        with pytest.raises(BadTopology, match=words):
            open_tree(path)
