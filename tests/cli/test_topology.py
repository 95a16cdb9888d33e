"""`kvplace topology` shows a machine in every form, and reports on stderr what its description lacks."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from kvplace.core.cpuset import format_cpu_list, mask_of
from kvplace.core.node_topology import read_topology, topology_document
from kvplace.core.scalars import NO_BYTES, NO_CPUS, Bytes, NumaId
from kvplace.machines.server_types import machine_names, read_machine
from tests.captured import captured_files, captured_folder
from tests.cli.calls import Caller, on_a_terminal
from tests.core.machines import make_numa_node, make_package, make_topology
from tests.libvirt.written_capabilities import capabilities_of

STATE = '{"policyName":"static","defaultCpuSet":"0","entries":{"p":{"c":"4-6"}},"checksum":0}'
SOURCES = [
    *captured_files("libvirt/capabilities", "*.xml"),
    *captured_files("topologies", "lscpu/*.tar.gz"),
]


def _written(folder: Path, text: str, name: str = "machine") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_json_and_yaml_are_the_same_document_and_either_can_be_read_again(
    kvplace: Caller, tmp_path: Path
) -> None:
    arguments = ("topology", "2x-epyc-9354-nps2", "--reserved", "0,64")
    as_json, as_yaml = kvplace(*arguments, "-o", "json").out, kvplace(*arguments, "-o", "yaml").out
    document = json.loads(as_json)
    assert yaml.safe_load(as_yaml) == document
    assert document["spec"]["reserved"] == "0,64"
    for text in (as_json, as_yaml):
        assert json.loads(kvplace("topology", _written(tmp_path, text), "-o", "json").out) == document


def test_the_help_names_the_server_types_however_narrow_the_terminal(
    kvplace: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    for columns in range(50, 90):
        monkeypatch.setenv("COLUMNS", str(columns))
        shown = kvplace("topology", "--help").out
        assert all(name in shown for name in machine_names())


def test_name_prints_the_name_of_the_object(kvplace: Caller) -> None:
    assert kvplace("topology", "epyc-7502p", "-o", "name").out == "nodetopology.kvplace.io/epyc-7502p\n"


def test_the_wide_table_names_the_threads_of_every_core(kvplace: Caller) -> None:
    lines = kvplace("topology", "2x-epyc-7763-nps4", "-o", "wide").out.splitlines()
    assert lines[0].startswith(
        "2x-epyc-7763-nps4: 2 sockets, 8 NUMA nodes, 16 L3 caches, 128 cores, 256 CPUs"
    )
    third = next(line for line in lines if line.startswith("2  ") and "144-151" in line)
    assert third.split()[:6] == ["2", "0", "1", "16-23,144-151", "16,144", "17,145"]
    machine = read_machine("2x-epyc-7763-nps4")
    shown = " ".join(lines)
    assert all(format_cpu_list(core) in shown for core in machine.cores)


def test_in_a_file_every_numa_node_and_its_distances_have_one_line(kvplace: Caller, tmp_path: Path) -> None:
    count, distances = 40, dict.fromkeys(range(40), 20)
    cpus = [mask_of(range(number, 4 * count, count)) for number in range(count)]
    machine = make_topology(
        packages=(make_package(0, (1 << 4 * count) - 1),),
        numa_nodes=tuple(
            make_numa_node(n, mask, 1 << 34, distances=distances) for n, mask in enumerate(cpus)
        ),
        l3_groups=tuple(cpus),
        cores=tuple(1 << cpu for cpu in range(4 * count)),
    )
    file = _written(tmp_path, json.dumps(topology_document(machine)))
    lines = [line.split() for line in kvplace("topology", file).out.splitlines()]
    for node in machine.numa_nodes:
        assert [str(node.id), "0", format_cpu_list(node.cpus)] in [line[:3] for line in lines]
        assert ["from", str(node.id), *["20"] * count] in lines


@pytest.mark.parametrize("columns", [20, 50, 90])
def test_no_column_of_a_table_is_lost_on_a_narrow_terminal(columns: int) -> None:
    shown = on_a_terminal("topology", "2x-epyc-9354-nps2", COLUMNS=str(columns)).replace("\r", "")
    head, *rows = shown.split("\n\n")[1].splitlines()
    assert head.split() == [
        "NUMA",
        "SOCKET",
        "CPUS",
        "L3",
        "CORES",
        "THREADS/CORE",
        "MEMORY",
        "HUGE",
        "PAGES",
    ]
    assert [row.split()[-3:] for row in rows if row[0].isdigit()] == [["189.0", "GiB", "-"]] * 4
    cpus = re.findall(r"\d+-\d+", shown.split("\n\n")[1])
    assert len(cpus) == 8


def test_distances_are_shown_as_they_were_given(kvplace: Caller, tmp_path: Path) -> None:
    machine = read_machine("2x-epyc-9354")
    first, second = machine.numa_nodes
    odd = replace(
        machine,
        numa_nodes=(
            replace(first, distances={NumaId(0): 10, NumaId(1): 21}),
            replace(second, distances={NumaId(1): 11}),
        ),
    )
    called = kvplace("topology", _written(tmp_path, json.dumps(topology_document(odd))))
    assert [line.split() for line in called.out.splitlines()[-3:]] == [
        ["DISTANCE", "to", "0", "to", "1"],
        ["from", "0", "10", "21"],
        ["from", "1", "-", "11"],
    ]


def test_nodes_without_cpus_or_memory_have_their_lines(kvplace: Caller, tmp_path: Path) -> None:
    machine = read_machine("epyc-7502p")
    nodes = (
        replace(machine.numa_nodes[0], memory=NO_BYTES, huge_pages={}),
        make_numa_node(7, 0, 3 << 30, {Bytes(2 << 20): 5}),
    )
    text = json.dumps(topology_document(replace(machine, numa_nodes=nodes)))
    lines = kvplace("topology", _written(tmp_path, text)).out.splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines if line[:1].isdigit()}
    assert rows["0"] == ["0", "0-63", "8", "32", "2", "-", "-"]
    assert rows["7"] == ["-", "-", "0", "0", "-", "3.0", "GiB", "5", "x", "2Mi"]


def test_cpus_held_by_the_kubelet_are_shown_and_part_of_the_status(kvplace: Caller, tmp_path: Path) -> None:
    state = _written(tmp_path, STATE, "state")
    shown = kvplace("topology", "epyc-7502p", "--cpu-manager-state", state)
    assert "held by the kubelet's static policy: 4-6" in shown.out.splitlines()
    printed = kvplace("topology", "epyc-7502p", "--cpu-manager-state", state, "-o", "json").out
    assert json.loads(printed)["status"] == {"kubeletCpus": "4-6"}
    again = kvplace("topology", _written(tmp_path, printed)).out
    assert "held by the kubelet's static policy: 4-6" in again


def test_a_damaged_cpu_manager_state_is_an_error(kvplace: Caller, tmp_path: Path) -> None:
    for text, words in ((STATE.replace("0}", "1}"), "does not fit its content"), ("", "it is empty")):
        state = _written(tmp_path, text, "state")
        called = kvplace("topology", "epyc-7502p", "--cpu-manager-state", state)
        assert (called.code, called.out) == (2, "")
        assert called.err.startswith(f"kvplace: {state} is not a cpu_manager_state")
        assert words in called.err
    gone = kvplace("topology", "epyc-7502p", "--cpu-manager-state", str(tmp_path / "gone"))
    assert (gone.code, gone.out) == (2, "")
    assert "gone cannot be read: No such file" in gone.err


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_every_captured_machine_is_shown_and_its_json_is_the_same_machine(
    kvplace: Caller, tmp_path: Path, path: Path
) -> None:
    printed = kvplace("topology", str(path), "-o", "json")
    assert printed.code == 0
    again = kvplace("topology", _written(tmp_path, printed.out), "-o", "json")
    assert json.loads(again.out) == json.loads(printed.out)
    assert kvplace("topology", str(path)).out.startswith(path.name.partition(".tar")[0].removesuffix(".xml"))


def test_a_machine_from_libvirt_works_with_place_and_map(kvplace: Caller, tmp_path: Path) -> None:
    path = _written(tmp_path, capabilities_of(replace(read_machine("epyc-7502p"), reserved=NO_CPUS)))
    placed = kvplace("place", "--topology", path, "-o", "json", stdin='{"vcpus": 8, "cpuSet": "one-l3"}\n')
    assert json.loads(placed.out)["placement"]["l3"] == [0]
    assert "64 CPUs, 64 free" in kvplace("map", path).out


def test_the_cpu_manager_state_in_a_machines_folder_is_read(kvplace: Caller, tmp_path: Path) -> None:
    import tarfile

    with tarfile.open(captured_folder("topologies") / "lscpu" / "vmware_fpe.tar.gz") as archive:
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(tmp_path, **safely)  # type: ignore[arg-type]
    state = tmp_path / "vmware_fpe" / "var" / "lib" / "kubelet" / "cpu_manager_state"
    state.parent.mkdir(parents=True)
    state.write_text(STATE, encoding="utf-8")
    document = json.loads(kvplace("topology", str(tmp_path), "-o", "json").out)
    assert document["status"] == {"kubeletCpus": "4-6"}
    assert read_topology(document).cpus.bit_count() == 16
    state.write_text(STATE[:-9], encoding="utf-8")
    called = kvplace("topology", str(tmp_path))
    assert (called.code, called.out) == (2, "")
    assert "vmware_fpe: var/lib/kubelet/cpu_manager_state is not a cpu_manager_state" in called.err
