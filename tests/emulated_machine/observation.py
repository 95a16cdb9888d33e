"""One machine as kvplace, lscpu and hwloc see it; taken inside, compared outside."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from kvplace.core.node_topology import read_topology, topology_document
from kvplace.core.scalars import Bytes, CpuMask
from kvplace.core.topology import Topology
from kvplace.linux.sysfs import discover
from kvplace.linux.tree import open_tree

CPU_FOLDER = Path("/sys/devices/system/cpu")
NODE_FOLDER = Path("/sys/devices/system/node")


@dataclass(frozen=True)
class Observation:
    """The same machine three times, as found at one moment."""

    document: dict[str, Any]
    """Our own discovery."""
    notes: tuple[str, ...]
    lscpu: str
    hwloc: str

    @property
    def topology(self) -> Topology:
        return read_topology(self.document)


def observe() -> Observation:
    """Check the machine that this runs on; called inside."""
    found = discover(open_tree(Path("/")))
    return Observation(
        topology_document(found.topology),
        tuple(found.notes),
        _output("lscpu", "-p=CPU,CORE,SOCKET,NODE,CACHE"),
        _output("lstopo-no-graphics", "--of", "xml", "--no-io"),
    )


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def set_online(cpu: int, *, online: bool) -> None:
    """Plug or unplug a CPU; called inside."""
    (CPU_FOLDER / f"cpu{cpu}" / "online").write_text("1" if online else "0")


def set_huge_pages(node: int, kilobytes: int, count: int) -> int:
    """Reserve huge pages on one NUMA node, and give how many there are then; called inside."""
    file = NODE_FOLDER / f"node{node}" / "hugepages" / f"hugepages-{kilobytes}kB" / "nr_hugepages"
    file.write_text(str(count))
    return int(file.read_text())


def levels_of_lscpu(text: str) -> dict[str, set[CpuMask]]:
    """Read lscpu's table into the sets of CPUs of each level; levels that it leaves empty are left out."""
    lines = text.splitlines()
    columns = next(line for line in lines if line.startswith("# CPU,"))[2:].split(",")
    sets: dict[str, dict[str, int]] = {}
    for line in lines:
        if line.startswith("#"):
            continue
        cpu, *values = line.split(",")
        for column, value in zip(columns[1:], values, strict=True):
            if value:
                groups = sets.setdefault(column, {})
                groups[value] = groups.get(value, 0) | 1 << int(cpu)
    return {column: {CpuMask(mask) for mask in groups.values()} for column, groups in sets.items()}


@dataclass(frozen=True)
class HwlocNode:
    """A NUMA node as hwloc sees it."""

    memory: Bytes
    pages: dict[Bytes, int]
    """Huge pages by their size."""


def nodes_of_hwloc(xml: str) -> dict[int, HwlocNode]:
    """Read memory and huge pages of each NUMA node."""
    nodes = {}
    for found in ET.fromstring(xml).iter("object"):
        if found.get("type") != "NUMANode":
            continue
        pages = {
            Bytes(int(each.get("size", ""))): int(each.get("count", "")) for each in found.iter("page_type")
        }
        smallest = min(pages)
        nodes[int(found.get("os_index", ""))] = HwlocNode(
            Bytes(int(found.get("local_memory", ""))),
            {size: count for size, count in pages.items() if size != smallest and count},
        )
    return nodes


def shown(document: object) -> str:
    """Write a value so that two of them can be compared line by line."""
    return json.dumps(document, indent=1, sort_keys=True)
