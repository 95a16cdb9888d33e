"""Reads the topology of a machine from the tables of lscpu: `lscpu -p`, `lscpu -e` and `lscpu -e -J`.

These tables have one row for each CPU, with its core, socket, NUMA node and caches. The summary that `lscpu`
and `lscpu -J` print has only numbers of cores and sockets, so it does not describe a machine. lscpu reports
neither memory nor distances, and it numbers sockets from 0, not by the ids of the kernel.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvplace.core.cpuset import MAX_CPU, mask_of, union
from kvplace.core.errors import BadBody, BadTopology
from kvplace.core.quantity import counted
from kvplace.core.scalars import NO_BYTES, NO_CPUS, CpuId, CpuMask, NumaId
from kvplace.core.strict_json import json_object
from kvplace.core.topology import NumaNode
from kvplace.core.topology_levels import CpusOf, Discovery, Levels

_PARSABLE = re.compile(r"# The following is the parsable format|# CPU,", re.IGNORECASE)
_COLUMN = r"[A-Z]\w*(?::\w+)*%?"
_EXTENDED = re.compile(
    rf"(?=.*\bCPU\b)(?=.*\b(?:NODE|SOCKET|CORE|L1d)\b){_COLUMN}(?: +{_COLUMN})* *$", re.MULTILINE
)
_JSON = re.compile(r'\{\s*"cpus"\s*:')
_NO_MEMORY = "lscpu reports no memory and no huge pages: they are not counted"


def is_table_of_lscpu(text: str) -> bool:
    """Whether a text begins as one of the tables that `read_lscpu` reads."""
    return any(form.match(text) for form in (_PARSABLE, _EXTENDED, _JSON))


def read_lscpu(text: str, *, what: str) -> Discovery:
    """Read a machine; raises BadTopology with one sentence that begins with `what`."""
    try:
        return _discover(list(_rows(text)))
    except (BadTopology, BadBody) as error:
        raise BadTopology(f"{what}: {error}") from None


def _rows(text: str) -> Iterator[Mapping[str, str]]:
    """Yield the columns of each CPU by their lower-case names; a value that is unknown is empty."""
    if _JSON.match(text):
        yield from _json_rows(text)
        return
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if _EXTENDED.match(text):
        names, rows = lines[0].split(), [line.split() for line in lines[1:]]
    else:
        comments = [line for line in lines if line.startswith("#")]
        names = comments[-1].lstrip("# ").split(",")
        rows = [line.split(",") for line in lines if not line.startswith("#")]
    for row in rows:
        if len(row) != len(names):
            raise BadTopology(
                f"the row {' '.join(row)[:60]!r} has {counted(len(row), 'value')} for"
                f" {counted(len(names), 'column')}; save the output of `lscpu -p`"
            )
        yield _split_caches(zip(names, row, strict=True))


def _json_rows(text: str) -> Iterator[Mapping[str, str]]:
    cpus = json_object(text, what="the output of lscpu")["cpus"]
    if not isinstance(cpus, list) or not all(isinstance(cpu, Mapping) for cpu in cpus):
        raise BadTopology("cpus must be a list of objects, as `lscpu -e -J` prints it")
    for cpu in cpus:
        yield _split_caches((str(key), _written(value)) for key, value in cpu.items())


def _written(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def _split_caches(values: Iterable[tuple[str, str]]) -> Mapping[str, str]:
    """Divide a column such as `L1d:L1i:L2:L3` into one for each cache."""
    columns: dict[str, str] = {}
    for key, value in values:
        names, parts = key.lower().split(":"), value.split(":")
        if len(parts) == len(names):
            columns.update(zip(names, parts, strict=True))
    return {name: "" if value == "-" else value for name, value in columns.items()}


def _discover(rows: list[Mapping[str, str]]) -> Discovery:
    by_cpu: dict[CpuId, Mapping[str, str]] = {}
    for row in rows:
        if row.get("online", "y").lower() in ("n", "no", "false"):
            continue
        cpu = CpuId(_number(row, "cpu"))
        if cpu > MAX_CPU:
            raise BadTopology(f"CPU {cpu} is above the highest id {MAX_CPU}")
        if cpu in by_cpu:
            raise BadTopology(f"CPU {cpu} has two rows; save the table of one machine alone")
        by_cpu[cpu] = row
    if not by_cpu:
        raise BadTopology("it has no row of an online CPU; save the output of `lscpu -p`")
    _refuse_repeated_ids(by_cpu)
    online = mask_of(by_cpu)
    levels = Levels("lscpu", online)
    topology = levels.topology(
        core_of=_set_of(by_cpu, "core"),
        socket_of=_set_of(by_cpu, "socket"),
        socket_id_of=lambda cpu: _number(by_cpu[cpu], "socket") if by_cpu[cpu].get("socket") else None,
        l3_of=_set_of(by_cpu, "l3"),
        nodes=_numa_nodes(by_cpu),
        whole=NumaNode(NumaId(0), online, memory=NO_BYTES),
        name_of_cores="cores",
    )
    return Discovery(topology, (_NO_MEMORY, *levels.notes))


def _numa_nodes(by_cpu: Mapping[CpuId, Mapping[str, str]]) -> list[NumaNode]:
    set_of = _set_of(by_cpu, "node")
    found = {
        NumaId(_number(row, "node")): set_of(cpu) or NO_CPUS for cpu, row in by_cpu.items() if row.get("node")
    }
    return [NumaNode(number, cpus, memory=NO_BYTES) for number, cpus in sorted(found.items())]


def _refuse_repeated_ids(by_cpu: Mapping[CpuId, Mapping[str, str]]) -> None:
    """Raise BadTopology for ids of the kernel (`-y`), which repeat in each socket or NUMA node."""
    found: dict[str, tuple[str, str]] = {}
    for row in by_cpu.values():
        where = (row.get("socket", ""), row.get("node", ""))
        if row.get("core") and found.setdefault(row["core"], where) != where:
            raise BadTopology(
                f"core {row['core'][:20]} is in several sockets or NUMA nodes; save the table without"
                " --physical (-y)"
            )


def _set_of(by_cpu: Mapping[CpuId, Mapping[str, str]], column: str) -> CpusOf:
    """Give the CPUs that have the same value in this column; None where it is unknown."""
    sets: dict[str, CpuMask] = {}
    for cpu, row in by_cpu.items():
        if value := row.get(column):
            sets[value] = union((sets.get(value, NO_CPUS), mask_of([cpu])))
    return lambda cpu: sets.get(by_cpu[cpu].get(column, ""))


def _number(row: Mapping[str, str], column: str) -> int:
    text = row.get(column, "")
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise BadTopology(f"{text[:40]!r} in the column {column.upper()} is not a number")
    return int(text)
