"""The machine that a file or folder describes, in one of several forms, recognised by the content.

    folder, tar archive           the sys/ (and proc/, var/lib/kubelet/) of a machine
    {"packages": ...}, {"spec"}   the output of `kvplace topology`, or a NodeTopology; JSON or YAML
    <capabilities>                the output of `virsh capabilities`
    # CPU,Core,Socket,...         the output of `lscpu -p`, `lscpu -e` or `lscpu -e -J`
    {"socket0": ["2", "3"]}       a node's hand-written cpu-map

The file is read once and within limits, so that it may also be a pipe.
"""

from __future__ import annotations

import codecs
import json
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvplace.core.cpuset import format_cpu_list, parse_cpu_list
from kvplace.core.drawing.occupancy import printable
from kvplace.core.errors import BadAnnotation, BadBody, BadTopology
from kvplace.core.free_resources import NOTHING_IN_USE, MemoryInUse, read_memory_in_use
from kvplace.core.json_fields import Fields
from kvplace.core.node_devices import NodeDevices
from kvplace.core.node_topology import KIND, read_node_topology, read_stated_devices
from kvplace.core.scalars import NO_CPUS, CpuMask
from kvplace.core.strict_json import kind_of, shown
from kvplace.core.topology import Topology
from kvplace.documents.reading import read_stdin, source_name
from kvplace.linux.cpu_manager_state import read_cpu_manager_state
from kvplace.linux.lscpu import is_table_of_lscpu, read_lscpu
from kvplace.linux.sysfs import discover
from kvplace.linux.tree import (
    CPU_MANAGER_STATE,
    MAX_ARCHIVE_BYTES,
    looks_like_archive,
    open_tree,
    read_archive,
)
from kvplace.machines.server_types import read_machine

_BEGINNING = 4096
_EXPECTED = (
    "a folder or tar archive with a machine's sys/, a NodeTopology, the output of `virsh capabilities` or"
    " `lscpu -p`, or a node's cpu-map"
)
_NOT_READ = (
    (r"CPU(?: model|-Modell):\s", "virsh nodeinfo"),
    (r"CPUs present:\s|CPU map:\s", "virsh nodecpumap"),
    (r"\s*\d+:\s+\d+ KiB$", "virsh freecell"),
    (r"Architecture:\s|CPU op-mode\(s\):\s|CPU\(s\):\s", "lscpu"),
    (r"NAME +ONE-SIZE +ALL-SIZE\b", "lscpu --caches"),
    (r'\{\s*"(?:lscpu|caches)"', "lscpu --json"),
    (r"available: \d+ nodes?\b|node distances:$", "numactl --hardware"),
    (r"physcpubind:\s", "numactl --show"),
    (r"processor\s*:\s*\d", "cat /proc/cpuinfo"),
    (r"MemTotal:\s", "cat /proc/meminfo"),
    (r"Machine \(", "lstopo"),
    (r"<!DOCTYPE topology\b|<topology version=", "lstopo --of xml"),
)
"""Lines near the beginning of other programs' output, also below a prompt."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine and its name."""

    name: str
    topology: Topology
    notes: tuple[str, ...] = ()
    """Gaps and contradictions of its description."""
    kubelet_cpus: CpuMask = NO_CPUS
    """CPUs that the kubelet's static policy has given to containers; they are not free."""
    in_use: MemoryInUse = NOTHING_IN_USE
    """Memory and huge pages that an agent has measured outside of claims; they are not free."""
    devices: NodeDevices | None = None
    """None where the description names no devices."""

    def with_reserved(self, cpu_list: str, what: str) -> Machine:
        """Reserve other CPUs for the host; raises BadTopology that names `what`."""
        try:
            cpus = parse_cpu_list(cpu_list, what="the CPU list")
            return replace(self, topology=replace(self.topology, reserved=cpus))
        except (ValueError, BadTopology) as error:
            raise BadTopology(f"{what}: {error}") from None

    def with_kubelet_cpus(self, text: str, what: str) -> Machine:
        """Take the kubelet's CPUs from its cpu_manager_state; raises BadBody that names `what`."""
        return self._holding(CpuMask(read_cpu_manager_state(text, what=what).held), what)

    def _holding(self, held: CpuMask, what: str) -> Machine:
        absent = held & ~self.topology.cpus
        note = f"{what} names CPU {format_cpu_list(absent)}, which the machine does not have"
        return replace(
            self,
            kubelet_cpus=held & self.topology.cpus,
            notes=(*self.notes, note) if absent else self.notes,
        )


def find_machine(name: str | None) -> Machine:
    """Read a machine from a file or, for `-`, stdin; or one that comes with kvplace by its name, or this one.

    Raises BadTopology or BadBody that names the file or machine.
    """
    if name is None:
        return _of_tree(Path("/"), None, platform.node() or "localhost")
    if name == "-":
        return _of_content(Path(source_name(name)), read_stdin(MAX_ARCHIVE_BYTES))
    if not name:
        raise BadTopology("the name of the machine is empty; give a file, or leave it out for this machine")
    path = Path(name)
    try:
        is_file = path.exists() or "/" in name or "." in name
    except OSError:
        is_file = True  # no file can have such a name: reading it reports it
    if is_file:
        return read_machine_at(path)
    try:
        return Machine(name, read_machine(name))
    except BadTopology as error:
        raise BadTopology(f"there is no file {name!r}, and {error}") from None


def read_machine_at(path: Path) -> Machine:
    """Read the machine that a file or folder describes; raises BadTopology or BadBody that names the file."""
    try:
        if path.is_dir():
            return _of_tree(path, None, _stem(path))
        with path.open("rb") as file:
            content = file.read(MAX_ARCHIVE_BYTES + 1)
    except FileNotFoundError:
        raise BadTopology(f"{path} does not exist; give {_EXPECTED}") from None
    except OSError as error:
        raise BadTopology(f"{path} cannot be read: {error.strerror}; give {_EXPECTED}") from None
    return _of_content(path, content)


def _of_content(path: Path, content: bytes) -> Machine:
    if len(content) > MAX_ARCHIVE_BYTES:
        raise BadTopology(f"{path} is longer than {MAX_ARCHIVE_BYTES >> 20} MiB; give {_EXPECTED}")
    text = content.removeprefix(codecs.BOM_UTF8).lstrip()
    if not text:
        raise BadTopology(f"{path} is empty; give {_EXPECTED}")
    if looks_like_archive(content):
        return _of_tree(path, content, _stem(path))
    _refuse_other_output(path, text[:_BEGINNING].decode("utf-8", "replace"))
    if text.startswith(b"<"):
        from kvplace.libvirt.capabilities import read_capabilities

        found = read_capabilities(text, what=str(path))
        return Machine(_stem(path), found.topology, found.notes)
    if is_table_of_lscpu(table := text.decode("utf-8", "replace")):
        found = read_lscpu(table, what=str(path))
        return Machine(_stem(path), found.topology, found.notes)
    return _of_document(path, _document(path, text))


def _refuse_other_output(path: Path, beginning: str) -> None:
    for line, program in _NOT_READ:
        if re.search(f"^(?:{line})", beginning.replace("\r", ""), re.MULTILINE):
            raise BadTopology(
                f"{path} is the output of `{program}`, which kvplace does not read; give {_EXPECTED}"
            )


def _of_tree(path: Path, archive: bytes | None, name: str) -> Machine:
    tree = open_tree(path) if archive is None else read_archive(str(path), archive)
    found = discover(tree)
    machine = Machine(name, found.topology, found.notes)
    state = tree.read(CPU_MANAGER_STATE)
    return machine if state is None else machine.with_kubelet_cpus(state, f"{tree.name}: {CPU_MANAGER_STATE}")


def _document(path: Path, content: bytes) -> Mapping[str, Any]:
    from kvplace.documents.reading import read_document

    try:
        text = content.decode("utf-8")
        if ":" not in text:
            raise BadTopology(f"{path} does not describe a machine; give {_EXPECTED}")
        return read_document(text, str(path))
    except UnicodeDecodeError:
        raise BadTopology(f"{path} is neither text nor an archive; give {_EXPECTED}") from None
    except BadBody as error:
        raise BadTopology(f"{error}; give {_EXPECTED}") from None


def _of_document(path: Path, document: Mapping[str, Any]) -> Machine:
    from kvplace.core.cpu_map import read_node_cpu_map
    from kvplace.core.topology import topology_of_cpu_map

    try:
        document = _one_object(document)
        if any(key.startswith("socket") for key in document):
            note = (
                "a cpu-map has no siblings, caches, NUMA nodes or memory: each socket counts as one NUMA node"
            )
            return Machine(_stem(path), topology_of_cpu_map(read_node_cpu_map(json.dumps(document))), (note,))
        if not document.keys() & {"spec", "packages", "numaNodes", "l3Groups", "cores"}:
            raise BadTopology(f"it does not describe a machine; give {_EXPECTED}")
        name, topology = read_node_topology(document)
        machine = Machine(name or _stem(path), topology, devices=read_stated_devices(document, topology))
        status = document.get("status")
        if not isinstance(status, Mapping):
            return machine
        machine = replace(machine, in_use=read_memory_in_use(Fields(status, "status"), "inUse"))
        held = status.get("kubeletCpus")
        if held is None:
            return machine
        return machine._holding(parse_cpu_list(_text(held), what="status.kubeletCpus"), "status.kubeletCpus")
    except (BadTopology, BadAnnotation, ValueError) as error:
        raise BadTopology(f"{path}: {error}") from None


def _one_object(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Take the only object of a list, as `kubectl get` writes lists; raises BadTopology for a longer list."""
    items = document.get("items")
    if str(document.get("kind")).endswith("List") and isinstance(items, list):
        if len(items) != 1:
            raise BadTopology(f"it lists {len(items)} objects; give the {KIND} of one machine alone")
        if not isinstance(items[0], Mapping):
            raise BadTopology(f"items[0] is {kind_of(items[0])}; give {_EXPECTED}")
        document = items[0]
    kind = document.get("kind", KIND)
    if kind != KIND:
        raise BadTopology(f"it is a {shown(kind)}, not a {KIND}; give {_EXPECTED}")
    return document


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise BadTopology(f"status.kubeletCpus must be a CPU list, not {kind_of(value)}")
    return value


def _stem(path: Path) -> str:
    name = path.resolve().name
    name = name.partition(".tar")[0].removesuffix(".tgz")
    for ending in (".json", ".yaml", ".yml", ".xml", ".txt"):
        name = name.removesuffix(ending)
    return printable(name) or "machine"
