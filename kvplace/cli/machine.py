"""Finding the machine that a user means: this one, a file, or one that comes with kvplace."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass, replace
from pathlib import Path

from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.errors import BadTopology
from kvplace.core.topology import Topology

MEANT = "a NodeTopology as JSON, a folder or tar archive with a machine's sys/, or one of these names"

_MOST_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine and what to call it."""

    name: str
    topology: Topology
    notes: tuple[str, ...] = ()
    """What its kernel did not say."""


def this_machine(reserved: str | None = None) -> Machine:
    """Read the machine that we run on."""
    return _discovered(Path("/"), platform.node() or "localhost", reserved)


def find_machine(text: str, reserved: str | None = None) -> Machine:
    """Read a machine from a file, or one that comes with kvplace by its name.

    `reserved` (a CPU list) replaces the CPUs that a description keeps for the host. Raises BadTopology
    that names the file or the CPUs.
    """
    path = Path(text)
    if path.is_file() and _is_json(path):
        name, topology = _described(path)
        return Machine(name, _with_reserved(topology, reserved))
    if path.exists():
        return _discovered(path, _stem(path), reserved)
    from kvplace.simulate.machine_files import machine_names, read_machine

    if "/" in text or "." in text:
        raise BadTopology(f"{text} does not exist; give {MEANT}: {', '.join(machine_names())}")
    return Machine(text, _with_reserved(read_machine(text), reserved))


def _discovered(root: Path, name: str, reserved: str | None) -> Machine:
    from kvplace.linux.sysfs import discover
    from kvplace.linux.tree import open_tree

    found = discover(open_tree(root), reserved=_cpus(reserved) if reserved is not None else 0)
    return Machine(name, found.topology, found.notes)


def _described(path: Path) -> tuple[str, Topology]:
    from kvplace.core.topology_document import read_topology

    try:
        text = path.read_text(encoding="utf-8")
        document = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise BadTopology(f"{path} cannot be read as JSON: {error}") from None
    try:
        topology = read_topology(document)
    except BadTopology as error:
        raise BadTopology(f"{path}: {error}") from None
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return name if isinstance(name, str) and name else _stem(path), topology


def _is_json(path: Path) -> bool:
    """Tell a description from an archive by how it begins: no archive begins with a brace."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            return False
        with path.open("rb") as file:
            return file.read(512).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[")
    except OSError as error:
        raise BadTopology(f"{path} cannot be read: {error.strerror}") from None


def _with_reserved(topology: Topology, reserved: str | None) -> Topology:
    return topology if reserved is None else replace(topology, reserved=_cpus(reserved))


def _cpus(text: str) -> int:
    try:
        return parse_cpu_list(text, what="--reserved")
    except ValueError as error:
        raise BadTopology(str(error)) from None


def _stem(path: Path) -> str:
    name = path.resolve().name
    return name.partition(".tar")[0].removesuffix(".tgz").removesuffix(".json") or name
