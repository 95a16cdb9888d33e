"""The JSON form of a machine: the spec of a NodeTopology and what `kvplace topology -o json` prints.

CPU sets are Linux cpu lists, memory is a quantity, huge pages are counts by page size:

    {"packages": [{"id": 0, "cpus": "0-3"}],
     "numaNodes": [{"id": 0, "cpus": "0-3", "memory": "16Gi", "hugePages": {"1Gi": 4},
                    "distances": {"0": 10}}],
     "l3Groups": ["0-3"], "cores": ["0,2", "1,3"], "reserved": "0", "isolated": "",
     "fingerprint": "sha256:..."}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvplace.core.cpuset import format_cpu_list, parse_cpu_list
from kvplace.core.errors import BadTopology
from kvplace.core.quantity import format_bytes, parse_bytes, parse_page_counts
from kvplace.core.strict_json import kind_of, shown
from kvplace.core.topology import NumaNode, Package, Topology

_MAX_ENTRIES = 16384


def topology_document(topology: Topology) -> dict[str, Any]:
    """Write a machine as JSON; `read_topology` gives it back unchanged."""
    return {
        "packages": [{"id": p.id, "cpus": format_cpu_list(p.cpus)} for p in topology.packages],
        "numaNodes": [
            {
                "id": node.id,
                "cpus": format_cpu_list(node.cpus),
                "memory": format_bytes(node.memory),
                "hugePages": {format_bytes(size): count for size, count in sorted(node.huge_pages.items())},
                "distances": {str(other): value for other, value in sorted(node.distances.items())},
            }
            for node in topology.numa_nodes
        ],
        "l3Groups": [format_cpu_list(mask) for mask in topology.l3_groups],
        "cores": [format_cpu_list(mask) for mask in topology.cores],
        "reserved": format_cpu_list(topology.reserved),
        "isolated": format_cpu_list(topology.isolated),
        "fingerprint": topology.fingerprint,
    }


def read_topology(document: object) -> Topology:
    """Read a machine from its JSON form, as a bare spec or a whole NodeTopology object.

    Raises BadTopology that names the field. A fingerprint in the document is not trusted: it is
    computed anew.
    """
    root = _object(document, "the machine description")
    if "spec" in root:
        root = _object(root["spec"], "spec")
    packages = tuple(
        Package(_number(entry, "id", where), _cpus(entry, "cpus", where))
        for where, entry in _entries(root, "packages")
    )
    nodes = tuple(
        NumaNode(
            id=_number(entry, "id", where),
            cpus=_cpus(entry, "cpus", where),
            memory=_bytes(entry.get("memory", 0), f"{where}.memory"),
            huge_pages=_page_counts(entry.get("hugePages") or {}, f"{where}.hugePages"),
            distances={
                _count(other, f"{where}.distances"): _count(value, f"{where}.distances.{other}")
                for other, value in _object(entry.get("distances") or {}, f"{where}.distances").items()
            },
        )
        for where, entry in _entries(root, "numaNodes")
    )
    return Topology(
        packages=packages,
        numa_nodes=nodes,
        l3_groups=_cpu_lists(root, "l3Groups"),
        cores=_cpu_lists(root, "cores"),
        reserved=_cpus(root, "reserved", "", ""),
        isolated=_cpus(root, "isolated", "", ""),
    )


def _object(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise BadTopology(f"{where} must be a JSON object, not {kind_of(value)}")
    return value


def _list(root: Mapping[str, Any], key: str) -> list[Any]:
    value = root.get(key)
    if not isinstance(value, list):
        raise BadTopology(f"{key} must be a list; see `kvplace topology -o json` for the form")
    if len(value) > _MAX_ENTRIES:
        raise BadTopology(f"{key} has {len(value)} entries, more than {_MAX_ENTRIES}")
    return value


def _entries(root: Mapping[str, Any], key: str) -> list[tuple[str, Mapping[str, Any]]]:
    return [
        (f"{key}[{index}]", _object(entry, f"{key}[{index}]")) for index, entry in enumerate(_list(root, key))
    ]


def _cpu_lists(root: Mapping[str, Any], key: str) -> tuple[int, ...]:
    masks = []
    for index, entry in enumerate(_list(root, key)):
        mask = _parse(entry, f"{key}[{index}]")
        if not mask:
            raise BadTopology(f"{key}[{index}] names no CPU")
        masks.append(mask)
    return tuple(masks)


def _cpus(entry: Mapping[str, Any], key: str, where: str, default: str | None = None) -> int:
    return _parse(entry.get(key, default), f"{where}.{key}" if where else key)


def _parse(value: object, where: str) -> int:
    if not isinstance(value, str):
        raise BadTopology(f"{where} must be a CPU list such as '0-3,8', not {shown(value)}")
    try:
        return parse_cpu_list(value, what=where)
    except ValueError as error:
        raise BadTopology(str(error)) from None


def _number(entry: Mapping[str, Any], key: str, where: str) -> int:
    return _count(entry.get(key), f"{where}.{key}")


def _count(value: object, where: str) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 18:
        return int(value)
    if type(value) is not int or value < 0:
        raise BadTopology(f"{where} must be a whole number from 0 up, not {shown(value)}")
    return value


def _page_counts(value: object, where: str) -> dict[int, int]:
    try:
        return parse_page_counts(value)
    except ValueError as error:
        raise BadTopology(f"{where}: {error}") from None


def _bytes(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise BadTopology(f"{where} must be a quantity such as 16Gi, not {shown(value)}")
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise BadTopology(f"{where}: {error}") from None
