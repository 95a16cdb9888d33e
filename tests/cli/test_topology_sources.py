"""`kvplace topology` reads every kind of description."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvplace.core.node_topology import read_topology
from kvplace.machines.server_types import read_machine
from tests.captured import captured_folder
from tests.cli.calls import Caller

MACHINE = read_machine("2x-epyc-9354-nps2")


def test_a_printed_machine_can_be_read_again_and_is_the_same(kvplace: Caller, tmp_path: Path) -> None:
    printed = kvplace("topology", "2x-epyc-9354-nps2", "-o", "json")
    document = json.loads(printed.out)
    assert (document["kind"], document["metadata"]) == ("NodeTopology", {"name": "2x-epyc-9354-nps2"})
    assert read_topology(document) == MACHINE
    path = tmp_path / "machine.json"
    path.write_text(printed.out, encoding="utf-8")
    assert kvplace("topology", str(path), "-o", "json").out == printed.out
    path.write_text(json.dumps(document["spec"]), encoding="utf-8")
    bare = json.loads(kvplace("topology", str(path), "-o", "json").out)
    assert (bare["metadata"], bare["spec"]) == ({"name": "machine"}, document["spec"])


def test_this_machine_is_shown_without_a_file(kvplace: Caller) -> None:
    document = json.loads(kvplace("topology", "-o", "json").out)
    assert read_topology(document).cpus
    assert document["metadata"]["name"]


def test_gaps_in_the_description_of_a_captured_machine_are_reported_on_stderr(kvplace: Caller) -> None:
    path = captured_folder("topologies") / "lscpu" / "s390-nested-virt.tar.gz"
    called = kvplace("topology", str(path), "-o", "json")
    assert json.loads(called.out)["metadata"]["name"] == "s390-nested-virt"
    assert called.err == (
        "kvplace: the kernel does not describe the L3 caches: the NUMA node stands in for them\n"
    )


def test_reserved_cpus_replace_those_of_the_description(kvplace: Caller) -> None:
    document = json.loads(kvplace("topology", "epyc-7502p", "--reserved", "0,32", "-o", "json").out)
    assert document["spec"]["reserved"] == "0,32"


def test_the_table_has_a_line_for_every_numa_node(kvplace: Caller) -> None:
    lines = kvplace("topology", "2x-xeon-8480plus-snc4").out.splitlines()
    assert lines[0] == "2x-xeon-8480plus-snc4: 2 sockets, 8 NUMA nodes, 2 L3 caches, 112 cores, 224 CPUs"
    last_node = next(line for line in lines if line.startswith("7 "))
    assert last_node.split() == [
        *("7", "1", "98-111,210-223", "1", "14", "2", "126.0", "GiB", "64", "x", "1Gi"),
    ]
    assert lines[-1].split() == ["from", "7", "21", "21", "21", "21", "12", "12", "12", "10"]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"{}", b"[1, 2]", b'{"spec": 3}', b"\x1f\x8b broken", b"{\xff}"]
)
def test_a_file_that_is_not_a_machine_is_named(kvplace: Caller, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "machine.json"
    path.write_bytes(content)
    called = kvplace("topology", str(path))
    assert called.code == 2
    assert str(path) in called.err
    assert called.err.count("\n") == 1
