"""Memory by NUMA node: how much a node, a cgroup (cheap) or a process (exact, dear) uses, and its migration.

A migration is migrate_pages(2): the kernel copies the pages that exist. Where new ones are taken from is
decided by the process's own memory policy and by its cpuset. The call walks all page tables and may take
seconds for a large VM.
"""

from __future__ import annotations

import ctypes
import platform
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from kvplace.core.cpuset import format_cpu_list, mask_of
from kvplace.core.free_resources import Used
from kvplace.core.quantity import bytes_in_pages, parse_bytes
from kvplace.core.scalars import Bytes, NumaId
from kvplace.linux.cgroups import UNIFIED
from kvplace.linux.kernel_files import Gone, KernelError, explained_call, read_text

BASE_PAGE = 4096
READ_WITHIN_S = 30.0
"""For the memory of one process."""
MOST_NUMA_MAPS = 4 * 1024 * 1024
"""Bytes of the memory map of one process: tens of thousands of mappings, and QEMU has some hundred."""
_AMOUNT = re.compile(r"\bN(\d+)=(\d+)")
_PAGE_KIB = re.compile(r"\bkernelpagesize_kB=(\d+)")
_MEMORY_FILES = (" file=/memfd:", " file=/dev/shm/", " file=/dev/zero")
"""Shared memory that QEMU asks for by name, in a folder or by MAP_SHARED alone."""
_HUGETLB = "hugetlb.*.numa_stat"


def memory_of_cgroup(folders: Mapping[str, Path]) -> dict[NumaId, Bytes]:
    """Add up the anonymous, shared and huge pages that the processes of a cgroup use, by NUMA node.

    `folders` are its folders by controller, as `folders_of` in `kvplace.linux.cgroups` finds them. The kernel
    keeps these sums, so the size of the memory does not matter. The use of a cgroup without the memory
    controller is not known. Raises Gone, NotPermitted or Unreadable.
    """
    total = dict(plain_memory_of_cgroup(folders) or {})
    for node, pages in (huge_pages_of_cgroup(folders) or {}).items():
        total[node] = Bytes(total.get(node, 0) + bytes_in_pages(pages))
    return total


def plain_memory_of_cgroup(folders: Mapping[str, Path]) -> dict[NumaId, Bytes] | None:
    """Add up the anonymous and shared memory of a cgroup outside huge pages; None where nothing counts it."""
    lines = _memory_lines(folders.get("memory", folders.get(UNIFIED)))
    if lines is None:
        return None
    total: dict[NumaId, Bytes] = {}
    for line in lines:
        kind = re.split(r"[ =]", line, maxsplit=1)[0]
        if kind in ("anon", "shmem") and f"{kind}=" not in line:
            _add(total, line, 1)
        elif kind in ("hierarchical_anon", "hierarchical_unevictable"):  # version 1 counts pages
            _add(total, line, BASE_PAGE)
    return total


def huge_pages_of_cgroup(folders: Mapping[str, Path]) -> dict[NumaId, dict[Bytes, int]] | None:
    """Count the huge pages of a cgroup by NUMA node and size; None where nothing counts them."""
    hugetlb = folders.get("hugetlb", folders.get(UNIFIED))
    files = sorted(hugetlb.glob(_HUGETLB)) if hugetlb is not None else []
    if not files:
        return None
    total: dict[NumaId, dict[Bytes, int]] = {}
    for path in files:
        size = parse_bytes(path.name.split(".")[1].removesuffix("B") + "i")
        held: dict[NumaId, Bytes] = {}
        with suppress(Gone):
            lines = read_text(path).splitlines()
            _add(held, lines[-1] if lines else "", 1)  # the last line has the sum of the whole tree
        for node, amount in held.items():
            total.setdefault(node, {})[size] = amount // size
    return total


def _memory_lines(folder: Path | None) -> list[str] | None:
    if folder is None:
        return None
    try:
        return read_text(folder / "memory.numa_stat").splitlines()
    except Gone:
        if folder.is_dir():
            return None  # the memory controller is not enabled there
        raise


def memory_of_process(process: Path, clock: Callable[[], float] = time.monotonic) -> dict[NumaId, Bytes]:
    """Add up the anonymous, shared and huge pages of one process, by NUMA node.

    `process` is its folder in /proc. The kernel walks all page tables for it: about a second for 64 GiB
    without huge pages. A process may map the same memory thousands of times, so no more is read after
    `READ_WITHIN_S` or `MOST_NUMA_MAPS`. Raises Gone, NotPermitted, or Unreadable, also for these limits.
    """
    total: dict[NumaId, Bytes] = {}
    ends = clock() + READ_WITHIN_S
    text = read_text(process / "numa_maps", MOST_NUMA_MAPS, goes_on=lambda: clock() < ends)
    for line in _guest_mappings(text):
        size = _PAGE_KIB.search(line)
        _add(total, line, int(size[1]) * 1024 if size else BASE_PAGE)
    return total


def _guest_mappings(text: str) -> Iterator[str]:
    """The mappings that may be guest memory: mappings without a file on disk, and mappings in huge pages."""
    for line in text.splitlines():
        if " file=" not in line or " huge" in line or any(file in line for file in _MEMORY_FILES):
            yield line


def _add(total: dict[NumaId, Bytes], line: str, size: int) -> None:
    for node, count in _AMOUNT.findall(line):
        if int(count):
            number = NumaId(int(node))
            total[number] = total.get(number, Bytes(0)) + Bytes(int(count) * size)


_NODE_FOLDER = re.compile(r"node(\d{1,5})")
_PAGES = re.compile(r"hugepages-(\d{1,12})kB")
_LINE = re.compile(r"^(?:Node \d+ )?(\w+(?:\(\w+\))?):\s*(\d+)(?: kB)?$", re.MULTILINE)
_GIVEN_BACK = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
"""Free memory, and memory that the kernel frees on demand: the page cache."""


def memory_use(sys: Path) -> dict[NumaId, Used]:
    """Read every NUMA node below a folder like /sys; none where the kernel shows none.

    Memory that is not free and would not be freed at once is taken.
    Takes some ten small files for each node. Raises NotPermitted or KernelError.
    """
    found: dict[NumaId, Used] = {}
    for folder in sorted((sys / "devices/system/node").glob("node[0-9]*")):
        if match := _NODE_FOLDER.fullmatch(folder.name):
            with suppress(Gone):  # taken offline
                found[NumaId(int(match[1]))] = _node(folder)
    return found


def _node(folder: Path) -> Used:
    kib = {name: int(value) for name, value in _LINE.findall(read_text(folder / "meminfo"))}
    if "MemTotal" not in kib or "MemFree" not in kib:
        raise KernelError(f"{folder / 'meminfo'} does not contain MemTotal and MemFree")
    pages: dict[Bytes, tuple[int, int]] = {}
    for path in (folder / "hugepages").glob("hugepages-*kB"):
        if (match := _PAGES.fullmatch(path.name)) and (count := _count(path / "nr_hugepages")):
            pages[Bytes(int(match[1]) * 1024)] = (count, max(0, count - _count(path / "free_hugepages")))
    in_pages = sum(size * total for size, (total, _) in pages.items())
    memory = max(0, kib["MemTotal"] * 1024 - in_pages)
    given_back = sum(kib.get(name, 0) for name in _GIVEN_BACK) * 1024
    return Used(Bytes(memory), Bytes(max(0, memory - given_back)), pages)


def _count(path: Path) -> int:
    text = read_text(path).strip()
    if not text.isdigit():
        raise KernelError(f"{path} contains {text[:40]!r}; it must be a number")
    return int(text)


_MIGRATE_PAGES = {"x86_64": 256, "aarch64": 238, "s390x": 287, "ppc64le": 258, "riscv64": 238}
"""The number of the system call, by architecture: the C library has no function for it."""
_WORD = 8 * ctypes.sizeof(ctypes.c_ulong)


def migrate_memory(pid: int, sources: Iterable[NumaId], targets: Iterable[NumaId]) -> int:
    """Move the pages of a process from some NUMA nodes to others; returns how many stayed.

    The n-th source goes to the n-th target, in ascending order; further sources begin with the first target
    again. The targets must be in the process's cpuset. Blocks until it is done. Raises Gone, NotPermitted, or
    KernelError where the kernel cannot do it at all.
    """
    old, new = mask_of(sources), mask_of(targets)
    if not old or not new:
        return 0
    words = max(old, new).bit_length() // _WORD + 1
    number = _MIGRATE_PAGES.get(platform.machine())
    if number is None:
        raise KernelError(f"memory cannot be moved on {platform.machine()}: its system call is not known")
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel reads one bit less than it is given.
    stayed = int(
        libc.syscall(number, pid, ctypes.c_ulong(words * _WORD + 1), _words(old, words), _words(new, words))
    )
    if stayed >= 0:
        return stayed
    what = f"memory of process {pid} cannot be moved to NUMA node {format_cpu_list(new)}"
    raise explained_call(ctypes.get_errno(), what, "process", "CAP_SYS_NICE and CAP_SYS_PTRACE")


def _words(mask: int, count: int) -> ctypes.Array[ctypes.c_ulong]:
    return (ctypes.c_ulong * count)(*(mask >> _WORD * word & (1 << _WORD) - 1 for word in range(count)))
