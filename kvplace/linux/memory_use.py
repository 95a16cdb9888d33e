"""How much memory and how many huge pages of each NUMA node are used, by any process."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvplace.core.scalars import Bytes, NumaId
from kvplace.linux.kernel_files import Gone, KernelError, read_text

_NODE = re.compile(r"node(\d{1,5})")
_PAGES = re.compile(r"hugepages-(\d{1,12})kB")
_LINE = re.compile(r"^(?:Node \d+ )?(\w+(?:\(\w+\))?):\s*(\d+)(?: kB)?$", re.MULTILINE)
_GIVEN_BACK = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
"""What is free, and what the kernel frees on demand: the page cache."""


@dataclass(frozen=True, slots=True)
class NodeUse:
    """One NUMA node."""

    memory: Bytes
    """All of it outside huge pages."""
    used: Bytes
    """Of that, what is not free and would not be freed at once."""
    pages: Mapping[Bytes, tuple[int, int]]
    """Huge pages by size: all, and those that hold something."""


def memory_use(sys: Path) -> dict[NumaId, NodeUse]:
    """Read every NUMA node below a folder like /sys; none where the kernel shows none.

    Takes some ten small files for each node. Raises NotPermitted or KernelError.
    """
    found: dict[NumaId, NodeUse] = {}
    for folder in sorted((sys / "devices/system/node").glob("node[0-9]*")):
        if match := _NODE.fullmatch(folder.name):
            with suppress(Gone):  # taken offline
                found[NumaId(int(match[1]))] = _node(folder)
    return found


def _node(folder: Path) -> NodeUse:
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
    return NodeUse(Bytes(memory), Bytes(max(0, memory - given_back)), pages)


def _count(path: Path) -> int:
    text = read_text(path).strip()
    if not text.isdigit():
        raise KernelError(f"{path} contains {text[:40]!r}; it must be a number")
    return int(text)
