"""How much of each NUMA node is used, read from files of the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvplace.core.scalars import Bytes, NumaId
from kvplace.linux.kernel_files import KernelError
from kvplace.linux.numa_memory import NodeUse, memory_use

NODE = "devices/system/node/node{}"


def write(sys: Path, node: int, meminfo: str, **pages: tuple[int, int]) -> None:
    folder = sys / NODE.format(node)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meminfo").write_text(meminfo)
    for size, (total, free) in pages.items():
        of_size = folder / "hugepages" / f"hugepages-{size.removeprefix('kib')}kB"
        of_size.mkdir(parents=True)
        (of_size / "nr_hugepages").write_text(f"{total}\n")
        (of_size / "free_hugepages").write_text(f"{free}\n")


def test_the_page_cache_counts_as_free_and_huge_pages_are_counted_apart(tmp_path: Path) -> None:
    meminfo = (
        "Node 1 MemTotal:       8388608 kB\nNode 1 MemFree:        1048576 kB\n"
        "Node 1 Active(anon):    524288 kB\nNode 1 Active(file):    524288 kB\n"
        "Node 1 Inactive(file):  524288 kB\nNode 1 SReclaimable:    102400 kB\n"
    )
    write(tmp_path, 1, meminfo, kib2048=(1024, 1000), kib1048576=(0, 0))
    mib = 1 << 20
    assert memory_use(tmp_path) == {
        NumaId(1): NodeUse(
            memory=Bytes(6144 * mib),
            used=Bytes((6144 - 1024 - 1024 - 100) * mib),
            pages={Bytes(2 * mib): (1024, 24)},
        )
    }


def test_a_machine_that_shows_no_numa_nodes_reports_nothing(tmp_path: Path) -> None:
    assert memory_use(tmp_path) == {}


@pytest.mark.parametrize("meminfo", ["", "Node 0 MemTotal: 5 kB\n", "junk"])
def test_a_file_without_its_numbers_is_named(tmp_path: Path, meminfo: str) -> None:
    write(tmp_path, 0, meminfo)
    with pytest.raises(KernelError, match=r"node0/meminfo does not contain MemTotal and MemFree"):
        memory_use(tmp_path)


def test_this_machine_uses_some_of_its_memory_and_not_more_than_it_has() -> None:
    for use in memory_use(Path("/sys")).values():
        assert 0 < use.used < use.memory
