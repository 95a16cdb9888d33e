"""The NUMA nodes of memory, of a cgroup (cheap, everything in it) or of one process (exact, dear)."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from kvplace.core.huge_pages import bytes_in_pages
from kvplace.core.quantity import parse_bytes
from kvplace.core.scalars import Bytes, NumaId
from kvplace.linux.cgroup import UNIFIED
from kvplace.linux.kernel_files import Gone, read_text

BASE_PAGE = 4096
READ_WITHIN_S = 30.0
"""For the memory of one process."""
MOST_NUMA_MAPS = 4 * 1024 * 1024
"""Bytes of the memory map of one process: tens of thousands of mappings, and QEMU has some hundred."""
_NODE = re.compile(r"\bN(\d+)=(\d+)")
_PAGE_KIB = re.compile(r"\bkernelpagesize_kB=(\d+)")
_MEMORY_FILES = (" file=/memfd:", " file=/dev/shm/", " file=/dev/zero")
"""Shared memory that QEMU asks for by name, in a folder or by MAP_SHARED alone."""
_HUGETLB = "hugetlb.*.numa_stat"


def memory_of_cgroup(folders: Mapping[str, Path]) -> dict[NumaId, Bytes]:
    """Add up the anonymous, shared and huge pages that the processes of a cgroup use, by NUMA node.

    `folders` are its folders by controller, as `kvplace.linux.cgroup.folders_of` finds them. The kernel keeps
    these sums, so the size of the memory does not matter. What a cgroup without the memory controller uses is
    not known. Raises Gone, NotPermitted or Unreadable.
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
    """The mappings that may be guest memory: those without a file on disk, and those in huge pages."""
    for line in text.splitlines():
        if " file=" not in line or " huge" in line or any(file in line for file in _MEMORY_FILES):
            yield line


def _add(total: dict[NumaId, Bytes], line: str, size: int) -> None:
    for node, count in _NODE.findall(line):
        if int(count):
            number = NumaId(int(node))
            total[number] = total.get(number, Bytes(0)) + Bytes(int(count) * size)
