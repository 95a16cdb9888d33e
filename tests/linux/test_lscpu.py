"""The tables of lscpu describe a machine, whichever of them was saved."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.cpuset import cpus_of, format_cpu_list
from kvplace.core.errors import BadTopology
from kvplace.core.scalars import NO_BYTES, NO_CPUS
from kvplace.core.topology import Topology
from kvplace.linux.lscpu import is_table_of_lscpu, read_lscpu
from kvplace.linux.sysfs import discover
from kvplace.linux.tree import open_tree
from kvplace.machines.server_types import read_machine
from tests.core.invalid_input import answer_or_sentence

Row = Mapping[str, int]
NOTES = (
    "lscpu reports no memory and no huge pages: they are not counted",
    "lscpu does not describe distances between NUMA nodes: each counts as 20",
)


def rows_of(machine: Topology) -> list[Row]:
    return [
        {
            "cpu": cpu,
            "node": next(node.id for node in machine.numa_nodes if node.cpus >> cpu & 1),
            "socket": next(package.id for package in machine.packages if package.cpus >> cpu & 1),
            "core": next(i for i, core in enumerate(machine.cores) if core >> cpu & 1),
            "l3": next(i for i, cache in enumerate(machine.l3_groups) if cache >> cpu & 1),
        }
        for cpu in cpus_of(machine.cpus)
    ]


def parsable(rows: Sequence[Row]) -> str:
    lines = [
        "# The following is the parsable format, which can be fed to other",
        "# CPU,Core,Socket,Node,,L2,L3",
    ]
    lines += [f"{r['cpu']},{r['core']},{r['socket']},{r['node']},,{r['core']},{r['l3']}" for r in rows]
    return "\n".join(lines) + "\n"


def extended(rows: Sequence[Row]) -> str:
    lines = ["CPU NODE SOCKET CORE L2:L3 ONLINE    MAXMHZ"]
    lines += [
        f"{r['cpu']:3} {r['node']} {r['socket']} {r['core']} {r['core']}:{r['l3']}  yes 3100.0000"
        for r in rows
    ]
    return "\n".join([*lines, f"{len(rows)} - - - - no -"]) + "\n"


def json_table(rows: Sequence[Row]) -> str:
    cpus = [
        {
            **{key: row[key] for key in ("cpu", "node", "socket", "core")},
            "l2:l3": f"{row['core']}:{row['l3']}",
            "online": True,
            "maxmhz": 3100.0,
        }
        for row in rows
    ]
    return json.dumps({"cpus": [*cpus, {"cpu": len(rows), "node": None, "online": False}]}, indent=3)


def old_json_table(rows: Sequence[Row]) -> str:
    """Write all values as strings, as util-linux did before 2.33."""
    return json.dumps({"cpus": [{key: str(value) for key, value in row.items()} for row in rows]})


@pytest.mark.parametrize("form", [parsable, extended, json_table, old_json_table])
@pytest.mark.parametrize("name", ["2x-epyc-9354-nps2", "epyc-7502p"])
def test_each_table_describes_the_machine_without_memory(
    name: str, form: Callable[[Sequence[Row]], str]
) -> None:
    machine = read_machine(name)
    text = form(rows_of(machine))
    assert is_table_of_lscpu(text)
    found = read_lscpu(text, what="table")
    nodes = tuple(
        replace(node, memory=NO_BYTES, huge_pages={}, distances={node.id: 10} if name == "epyc-7502p" else {})
        for node in machine.numa_nodes
    )
    assert found.topology == replace(machine, numa_nodes=nodes, reserved=NO_CPUS, isolated=NO_CPUS)
    assert found.notes == NOTES[: min(2, len(nodes))]


def test_levels_that_lscpu_leaves_empty_are_replaced_with_a_note() -> None:
    found = read_lscpu("CPU SOCKET CORE\n0 - 0\n1 - 1\n", what="table")
    assert (
        len(found.topology.packages) == len(found.topology.numa_nodes) == len(found.topology.l3_groups) == 1
    )
    assert found.notes == (
        NOTES[0],
        "lscpu does not describe NUMA nodes: the machine counts as one",
        "lscpu does not describe the sockets: the machine counts as one socket",
        "lscpu does not describe the L3 caches: the NUMA node stands in for them",
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# CPU,Core,Socket,Node\n", "it has no row of an online CPU"),
        ("# CPU,Core,Socket,Node\n0,0,0\n", "the row '0 0 0' has 3 values for 4 columns"),
        ("# CPU,Core\n0,0\n0,1\n", "CPU 0 has two rows"),
        ("# CPU,Core\nx,0\n", "'x' in the column CPU is not a number"),
        ("# CPU,Core,Node\n0,0,0x1\n", "'0x1' in the column NODE is not a number"),
        ("# CPU,Core\n99999999,0\n", "CPU 99999999 is above the highest id"),
        ("# CPU,Core,Socket\n0,0,0\n1,0,1\n", "core 0 is in several sockets or NUMA nodes; save the table"),
        ("CPU NODE\n", "it has no row of an online CPU"),
        ('{"cpus": 3}', "cpus must be a list of objects"),
        ('{"cpus": [3]}', "cpus must be a list of objects"),
        ('{"cpus": [', "is not valid JSON"),
        ('{"cpus": [{"core": 1}]}', "'' in the column CPU is not a number"),
    ],
)
def test_a_damaged_table_is_refused_in_one_sentence(text: str, said: str) -> None:
    with pytest.raises(BadTopology) as raised:
        read_lscpu(text, what="saved.txt")
    assert str(raised.value).startswith("saved.txt: ")
    assert said in str(raised.value)


@given(st.text(max_size=60), st.sampled_from(["# CPU,Core,Node\n0,0,0\n", "CPU CORE\n", '{"cpus": [']))
def test_any_end_of_a_table_is_read_or_refused(end: str, beginning: str) -> None:
    found, said = answer_or_sentence(
        lambda text: read_lscpu(text, what="saved.txt"), beginning + end, BadTopology
    )
    assert found is not None or said.startswith("saved.txt: ")


@pytest.mark.parametrize(
    "options", [["-p"], ["-e"], ["-J", "-e"], ["-p=CPU,SOCKET,CORE,NODE,CACHE,ONLINE", "-a"]]
)
def test_the_output_of_lscpu_here_gives_this_machine(options: list[str]) -> None:
    program = shutil.which("lscpu")
    if program is None:
        pytest.skip("lscpu is not installed")
    text = subprocess.run([program, *options], check=True, capture_output=True, text=True).stdout
    assert is_table_of_lscpu(text)
    found, here = read_lscpu(text, what="lscpu").topology, discover(open_tree(Path("/"))).topology
    assert found.cores == here.cores
    assert [package.cpus for package in found.packages] == [package.cpus for package in here.packages]
    assert [node.cpus for node in found.numa_nodes] == [node.cpus for node in here.numa_nodes if node.cpus]


def test_the_columns_may_stand_in_any_order() -> None:
    text = "SOCKET NODE CORE L3 CPU ONLINE\n0 0 0 0 0 yes\n0 0 0 0 2 yes\n1 1 1 1 1 yes\n1 1 1 1 3 yes\n"
    assert is_table_of_lscpu(text)
    found = read_lscpu(text, what="lscpu").topology
    assert [format_cpu_list(core) for core in found.cores] == ["0,2", "1,3"]
    assert not is_table_of_lscpu("CPU NODE: a\nCORE\n")


def test_a_table_with_names_of_several_words_is_refused_with_the_form_that_is_read() -> None:
    text = "CPU SOCKET CORE MODELNAME\n0 0 0 Some CPU of 2020\n"
    assert is_table_of_lscpu(text)
    with pytest.raises(BadTopology, match="has 7 values for 4 columns; save the output of `lscpu -p`"):
        read_lscpu(text, what="lscpu")
