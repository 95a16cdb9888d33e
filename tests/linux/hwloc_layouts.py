"""Reads what hwloc found of a machine, as `lstopo` writes it: console text or XML."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

_LINE = re.compile(r"(Machine|Package|NUMANode|L3Cache|Core|PU)(?:\(\w+\))?(?: L#\d+)(?: \(P#(\d+))?")


def read_layout(path: Path) -> dict[str, set[int]]:
    """Read an expectation of hwloc's own tests: sets of CPUs by hwloc's name of the level.

    A memory-only node has the CPUs that hwloc counts as near to it.
    """
    if path.suffix == ".xml":
        return layout_of_xml(path.read_text(encoding="utf-8"))
    return _by_level(_of_console(path))


def layout_of_xml(text: str) -> dict[str, set[int]]:
    """Read what `lstopo --of xml` prints."""
    things = ET.fromstring(text).iter("object")
    return _by_level([(thing.get("type", ""), _mask(thing.get("cpuset") or "0")) for thing in things])


def _by_level(found: list[tuple[str, int]]) -> dict[str, set[int]]:
    layout: dict[str, set[int]] = {}
    for level, cpus in found:
        if cpus:
            layout.setdefault(level, set()).add(cpus)
    return layout


def _mask(words: str) -> int:
    mask = 0
    for word in words.split(","):
        mask = mask << 32 | int(word or "0", 16)
    return mask


def _of_console(path: Path) -> list[tuple[str, int]]:
    """An object's CPUs are written below it; a NUMA node has the CPUs of the object around it."""
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if text.startswith("depth"):
            break
        lines.append((len(text) - len(text.lstrip()), _LINE.match(text.lstrip())))
    found = []
    for at, (indent, match) in enumerate(lines):
        if match and match[1] == "NUMANode":
            parent = next(above for above in range(at - 1, -1, -1) if lines[above][0] < indent)
            found.append(("NUMANode", _below(lines, parent)))
        elif match:
            found.append((match[1], _below(lines, at)))
    return found


def _below(lines: list[tuple[int, re.Match[str] | None]], at: int) -> int:
    cpus = 0
    for indent, match in lines[at:]:
        if cpus and indent <= lines[at][0]:
            break
        if match and match[1] == "PU":
            cpus |= 1 << int(match[2])
    return cpus
