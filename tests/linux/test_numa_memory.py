"""Memory by NUMA node: read from cgroups, numa_maps and the node's files, and moved to other nodes."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvplace.core.free_resources import Used
from kvplace.core.scalars import Bytes, NumaId
from kvplace.linux.cgroups import UNIFIED, folders_of
from kvplace.linux.kernel_files import Gone, KernelError, NotPermitted, read_cpu_list
from kvplace.linux.numa_memory import (
    MOST_NUMA_MAPS,
    READ_WITHIN_S,
    memory_of_cgroup,
    memory_of_process,
    memory_use,
    migrate_memory,
)

MIB = 1 << 20
N0, N1 = NumaId(0), NumaId(1)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_version_2_counts_anonymous_shared_and_huge_pages_in_bytes(tmp_path: Path) -> None:
    write(
        tmp_path / "memory.numa_stat",
        f"anon N0={3 * MIB} N1={MIB}\nfile N0={99 * MIB} N1={99 * MIB}\nshmem N0={5 * MIB} N1=0\n"
        f"anon_thp N0={2 * MIB} N1=0\nactive_anon N0={3 * MIB} N1=0\nslab_reclaimable N0=7 N1=7\n",
    )
    write(tmp_path / "hugetlb.2MB.numa_stat", f"total={64 * MIB} N0=0 N1={64 * MIB}\n")
    write(tmp_path / "hugetlb.1GB.numa_stat", "total=0 N0=0 N1=0\n")
    assert memory_of_cgroup({"unified": tmp_path}) == {N0: 8 * MIB, N1: 65 * MIB}


def test_version_1_counts_the_whole_tree_in_pages(tmp_path: Path) -> None:
    write(
        tmp_path / "memory/memory.numa_stat",
        "total=9 N0=9 N1=0\nfile=1 N0=1 N1=0\nanon=8 N0=8 N1=0\nunevictable=0 N0=0 N1=0\n"
        "hierarchical_total=900 N0=300 N1=600\nhierarchical_file=100 N0=0 N1=100\n"
        "hierarchical_anon=700 N0=250 N1=450\nhierarchical_unevictable=100 N0=50 N1=50\n",
    )
    write(
        tmp_path / "hugetlb/hugetlb.2MB.numa_stat",
        f"total=0 N0=0 N1=0\nhierarchical_total={2 * MIB} N0={2 * MIB} N1=0\n",
    )
    folders = {"memory": tmp_path / "memory", "hugetlb": tmp_path / "hugetlb", "unified": tmp_path}
    assert memory_of_cgroup(folders) == {N0: 300 * 4096 + 2 * MIB, N1: 500 * 4096}


def test_a_cgroup_that_is_gone_is_not_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(Gone, match=r"memory\.numa_stat does not exist"):
        memory_of_cgroup({"unified": tmp_path / "gone"})


def test_a_cgroup_without_the_memory_controller_is_there_and_its_memory_is_not_known(tmp_path: Path) -> None:
    assert memory_of_cgroup({"unified": tmp_path}) == {}


def test_a_process_counts_guest_memory_of_every_kind_and_no_programs(tmp_path: Path) -> None:
    write(
        tmp_path / "numa_maps",
        "55d0 default file=/usr/bin/qemu-kvm mapped=900 N0=450 N1=450 kernelpagesize_kB=4\n"
        "55d1 default heap anon=10 dirty=10 N0=10 kernelpagesize_kB=4\n"
        "7f00 bind:1 anon=512 dirty=512 N1=512 kernelpagesize_kB=4\n"
        "7f01 bind:0 file=/dev/hugepages/ram\\040(deleted) huge dirty=16 N0=16 kernelpagesize_kB=2048\n"
        "7f02 bind:0 file=/memfd:memory-backend-memfd\\040(deleted) dirty=4 N0=4 kernelpagesize_kB=4\n"
        "7f03 default stack:7 anon=1 dirty=1 N0=1 kernelpagesize_kB=4\n"
        "7f04 default\n",
    )
    assert memory_of_process(tmp_path) == {N0: 15 * 4096 + 32 * MIB, N1: 512 * 4096}


@pytest.mark.parametrize("flags", [mmap.MAP_SHARED, mmap.MAP_PRIVATE])
def test_memory_that_a_real_process_writes_is_counted(flags: int) -> None:
    process = Path(f"/proc/{os.getpid()}")
    before = sum(memory_of_process(process).values())
    with mmap.mmap(-1, 64 * MIB, flags=flags | mmap.MAP_ANONYMOUS) as memory:
        memory.write(b"x" * 64 * MIB)
        assert sum(memory_of_process(process).values()) - before >= 64 * MIB


def test_the_cgroup_of_this_process_has_memory_on_nodes_that_exist() -> None:
    folders = folders_of(Path("/proc/self"), Path("/sys/fs/cgroup"))
    folder = folders.get("memory", folders.get(UNIFIED, Path("/none")))
    if not (folder / "memory.numa_stat").exists():
        pytest.skip(f"the kernel does not count memory by NUMA node here: no memory.numa_stat in {folder}")
    found = memory_of_cgroup(folders)
    online = read_cpu_list(Path("/sys/devices/system/node/online"))
    assert sum(found.values()) > MIB
    assert all(online >> node & 1 for node in found)


def test_a_memory_map_that_is_larger_than_any_qemus_is_not_read_to_its_end(tmp_path: Path) -> None:
    line = "7f00 default anon=1 N0=1 kernelpagesize_kB=4\n"
    (tmp_path / "numa_maps").write_text(line * (MOST_NUMA_MAPS // len(line) + 2000))
    with pytest.raises(KernelError, match=rf"numa_maps is larger than {MOST_NUMA_MAPS} bytes"):
        memory_of_process(tmp_path)


def test_a_memory_map_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "numa_maps").write_text("7f00 default anon=1 N0=1 kernelpagesize_kB=4\n" * 10_000)
    moments = iter((0.0, 1.0, READ_WITHIN_S + 1.0))
    with pytest.raises(KernelError, match=r"numa_maps takes too long to be read: 131072 bytes until now"):
        memory_of_process(tmp_path, lambda: next(moments))


def write_node(sys: Path, node: int, meminfo: str, **pages: tuple[int, int]) -> None:
    folder = sys / "devices/system/node" / f"node{node}"
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
    write_node(tmp_path, 1, meminfo, kib2048=(1024, 1000), kib1048576=(0, 0))
    mib = 1 << 20
    assert memory_use(tmp_path) == {
        NumaId(1): Used(
            memory=Bytes(6144 * mib),
            taken=Bytes((6144 - 1024 - 1024 - 100) * mib),
            pages={Bytes(2 * mib): (1024, 24)},
        )
    }


def test_a_machine_that_shows_no_numa_nodes_reports_nothing(tmp_path: Path) -> None:
    assert memory_use(tmp_path) == {}


@pytest.mark.parametrize("meminfo", ["", "Node 0 MemTotal: 5 kB\n", "junk"])
def test_a_file_without_its_numbers_is_named(tmp_path: Path, meminfo: str) -> None:
    write_node(tmp_path, 0, meminfo)
    with pytest.raises(KernelError, match=r"node0/meminfo does not contain MemTotal and MemFree"):
        memory_use(tmp_path)


def test_this_machine_uses_some_of_its_memory_and_not_more_than_it_has() -> None:
    found = memory_use(Path("/sys"))
    assert found or not Path("/sys/devices/system/node").exists()
    for use in found.values():
        assert 0 < use.taken < use.memory


NODE = NumaId(0)


@pytest.fixture
def ended() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_a_process_whose_memory_is_where_it_should_be_keeps_it() -> None:
    assert migrate_memory(os.getpid(), [NODE], [NODE]) == 0


def test_without_sources_or_targets_nothing_is_asked_of_the_kernel(ended: int) -> None:
    assert migrate_memory(ended, [], [NODE]) == migrate_memory(ended, [NODE], []) == 0


def test_a_process_that_has_ended_is_gone(ended: int) -> None:
    with pytest.raises(Gone, match=str(ended)):
        migrate_memory(ended, [NODE], [NODE])


def test_a_node_that_the_machine_does_not_have_is_an_error_that_names_it() -> None:
    assert not Path("/sys/devices/system/node/node63").exists()
    with pytest.raises((KernelError, NotPermitted), match="NUMA node 63"):
        migrate_memory(os.getpid(), [NODE], [NumaId(63)])


_AS_NOBODY = """
import os
from kvplace.linux.numa_memory import migrate_memory
os.setuid(65534)
try:
    migrate_memory(1, [0], [0])
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give its rights up for a child")
def test_without_the_right_the_error_names_the_capability() -> None:
    child = subprocess.run([sys.executable, "-c", _AS_NOBODY], capture_output=True, text=True, check=True)
    assert child.stdout.startswith("NotPermitted")
    assert "CAP_SYS_NICE" in child.stdout
