"""The `cpu-map` annotation: CPU ids by socket, the view that people and foreign tools share.

On a pod it lists the VM's CPUs in vCPU order, on a node the CPUs that may be given out:
`{"socket0": ["2", "34"], "socket1": ["1"]}`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvplace.core.cpuset import MAX_CPU, mask_of, parse_id
from kvplace.core.errors import BadAnnotation
from kvplace.core.scalars import CpuId, CpuMask, PackageId
from kvplace.core.well_known_names import CPU_MAP

if TYPE_CHECKING:
    from kvplace.core.topology import Topology  # costs the hook a fifth of its start

_SOCKET = re.compile(r"socket(\d{1,6})", re.ASCII)
_MAX_TEXT = 256 * 1024


def read_cpu_map(text: str) -> dict[PackageId, tuple[CpuId, ...]]:
    """Read CPU ids by socket number, ids in the order written, sockets ascending.

    Raises BadAnnotation when it is not such a map, names a CPU twice, or is empty.
    """
    if len(text) > _MAX_TEXT:
        raise BadAnnotation(CPU_MAP, text, f"is longer than {_MAX_TEXT} characters")
    try:
        raw = json.loads(text, object_pairs_hook=tuple)  # pairs: a dict would hide a key written twice
    except (ValueError, RecursionError):
        raise BadAnnotation(CPU_MAP, text, 'is not JSON; write {"socket0": ["2", "3"]}') from None
    if not isinstance(raw, tuple):
        raise BadAnnotation(CPU_MAP, text, 'must be an object like {"socket0": ["2", "3"]}')
    sockets: dict[PackageId, tuple[CpuId, ...]] = {}
    seen: set[CpuId] = set()
    for name, ids in raw:
        match = _SOCKET.fullmatch(name)
        if match is None:
            raise BadAnnotation(CPU_MAP, text, f"key {name[:60]!r} must be socket0, socket1, ...")
        number = PackageId(int(match[1]))
        if number in sockets:
            raise BadAnnotation(CPU_MAP, text, f"names socket {number} twice")
        if not isinstance(ids, list):
            raise BadAnnotation(CPU_MAP, text, f"the value of {name} must be a list of CPU ids")
        cpus = tuple(_cpu_id(entry, name, text) for entry in ids)
        for cpu in cpus:
            if cpu in seen:
                raise BadAnnotation(CPU_MAP, text, f"names CPU {cpu} twice; each CPU belongs to one place")
            seen.add(cpu)
        if cpus:
            sockets[number] = cpus
    if not sockets:
        raise BadAnnotation(CPU_MAP, text, "names no CPU")
    return dict(sorted(sockets.items()))


def read_node_cpu_map(text: str) -> dict[PackageId, CpuMask]:
    """Read a node's hand-written `cpu-map` as a CPU set by socket number; raises BadAnnotation."""
    return {socket: mask_of(cpus) for socket, cpus in read_cpu_map(text).items()}


def cpu_map_of(topology: Topology, cpus: Sequence[CpuId]) -> dict[str, list[str]]:
    """Group the CPUs of a VM, given in vCPU order, by the number of their socket."""
    sockets: dict[PackageId, list[str]] = {}
    for cpu in cpus:
        sockets.setdefault(topology.package_of[cpu], []).append(str(cpu))
    return {f"socket{number}": ids for number, ids in sorted(sockets.items())}


def write_cpu_map(topology: Topology, cpus: Sequence[CpuId]) -> str:
    """Write the annotation's one line."""
    return json.dumps(cpu_map_of(topology, cpus), separators=(",", ":"))


def _cpu_id(entry: object, socket: str, text: str) -> CpuId:
    if isinstance(entry, bool) or not isinstance(entry, int | str):
        raise BadAnnotation(CPU_MAP, text, f"{socket} holds {repr(entry)[:60]}, which is not a CPU id")
    cpu = parse_id(str(entry))
    if cpu is None:
        raise BadAnnotation(
            CPU_MAP, text, f"{socket} holds {repr(entry)[:60]}, which is not a CPU id from 0 to {MAX_CPU}"
        )
    return CpuId(cpu)
