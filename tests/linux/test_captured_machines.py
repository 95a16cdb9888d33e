"""Machines recorded from real hosts are read as hwloc and lscpu read them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from kvplace.core.cpuset import cpus_of, format_cpu_list, mask_of
from kvplace.core.errors import BadTopology
from kvplace.core.node_topology import read_topology, topology_document
from kvplace.core.scalars import NumaId
from kvplace.core.topology import Topology
from kvplace.linux.lscpu import read_lscpu
from kvplace.linux.sysfs import discover
from kvplace.linux.tree import FolderTree, open_tree
from tests.captured import CAPTURED_MACHINES, captured_files, captured_folder, recorded_machine

# The two tables that lscpu prints of the arm machine contradict each other.
LSCPU = [
    path for path in captured_files("topologies", "lscpu/*.expected") if not path.stem.startswith("arm-")
]

# Sockets, NUMA nodes (with CPUs), cores, CPUs on-line, L3 groups (0: the kernel does not describe them).
COUNTS = {
    "128ia64-17n4s2c": (64, 17, 16, 128, 128, 0),
    "16amd64-8n2c-cpusets": (8, 8, 8, 15, 15, 0),
    "16amd64-8n2c": (8, 8, 8, 16, 16, 0),
    "16em64t-4s2c2t-offlines": (4, 1, 1, 7, 12, 4),
    "16em64t-4s2c2t": (4, 1, 1, 8, 16, 4),
    "20em64t-hybrid-1p6c2t+2ca4co1t": (1, 1, 1, 14, 20, 1),
    "20s390-2g6s4c": (8, 1, 1, 20, 20, 0),
    "2arm-2c": (1, 1, 1, 2, 2, 0),
    "2i386-2c-nohugepage": (1, 1, 1, 2, 2, 0),
    "2i386-2t-hugepagesizecount": (1, 1, 1, 1, 2, 0),
    "2ps3-2t": (1, 1, 1, 1, 2, 0),
    "32amd64-4s2n4c-cgroup2": (4, 8, 8, 32, 32, 8),
    "40intel64-2g2n4c+pcilocality": (4, 4, 4, 40, 40, 4),
    "40intel64-4n10c+pci-conflicts": (4, 4, 4, 40, 40, 4),
    "48amd64-4pa2n6c-sparse": (4, 8, 8, 48, 48, 8),
    "96em64t-4no4pa3ca2co": (16, 4, 4, 96, 96, 16),
    "fakeheteromemtiers": (1, 7, 3, 6, 6, 1),
    "nvidia-dgx-gb10": (1, 1, 1, 20, 20, 2),
    "nvidiagpunumanodes": (2, 8, 2, 8, 32, 4),
    "arm-A510-A710-A715-X3": (3, 1, 1, 8, 8, 1),
    "armv7": (1, 1, 1, 2, 2, 0),
    "loongarch-kvm_on_loongson_3c6000": (32, 1, 1, 32, 32, 1),
    "loongarch-loongson_3a5000_hv": (1, 1, 1, 4, 4, 1),
    "ppc64-POWER7-64cpu": (16, 2, 1, 16, 64, 0),
    "rv64-linux": (1, 1, 1, 1, 2, 0),
    "rv64-milkvpioneer": (1, 4, 4, 64, 64, 0),
    "s390-lpar": (7, 1, 1, 17, 17, 0),
    "s390-nested-virt": (2, 1, 1, 2, 2, 0),
    "vbox-win": (1, 1, 1, 2, 2, 0),
    "vmware_fpe": (2, 4, 4, 8, 16, 4),
    "x86_64-64cpu-linux6.2": (1, 1, 1, 4, 8, 1),
    "x86_64-64cpu": (4, 3, 3, 32, 64, 4),
    "x86_64-epyc_7451": (2, 8, 8, 48, 96, 16),
}


def _name(path: Path) -> str:
    return path.name.partition(".tar")[0]


@pytest.mark.parametrize("path", CAPTURED_MACHINES, ids=_name)
def test_a_captured_machine_has_the_counts_that_its_kernel_gives(path: Path) -> None:
    found = recorded_machine(path)
    machine = found.topology
    says_nothing_of_l3 = any("L3" in note for note in found.notes)
    assert (
        len(machine.packages),
        len(machine.numa_nodes),
        sum(1 for node in machine.numa_nodes if node.cpus),
        len(machine.cores),
        machine.cpus.bit_count(),
        0 if says_nothing_of_l3 else len(machine.l3_groups),
    ) == COUNTS[_name(path)]


@pytest.mark.parametrize("path", CAPTURED_MACHINES, ids=_name)
def test_a_captured_machine_survives_being_written_down_and_read_again(path: Path) -> None:
    machine = recorded_machine(path).topology
    assert read_topology(topology_document(machine)) == machine


def test_every_capture_is_in_the_table_of_counts() -> None:
    captured_folder("topologies")
    assert {_name(path) for path in CAPTURED_MACHINES} == set(COUNTS)


def _groups(rows: Iterable[list[str]], column: int) -> set[int]:
    members: dict[str, list[int]] = {}
    for row in rows:
        members.setdefault(row[column], []).append(int(row[0]))
    return {mask_of(cpus) for cpus in members.values()}


@pytest.mark.parametrize("path", LSCPU, ids=lambda path: path.stem)
def test_a_captured_machine_is_divided_as_lscpu_divides_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    table = text.split("# CPU,Core,Socket,Node", 2)[1]
    columns = table.partition("\n")[0].split(",")
    rows = [line.split(",") for line in table.splitlines()[1:] if line and not line.startswith("#")]
    machine = recorded_machine(path.with_suffix(".tar.gz")).topology
    assert set(machine.cores) == _groups(rows, 1)
    assert {package.cpus for package in machine.packages} == _groups(rows, 2)
    assert {node.cpus for node in machine.numa_nodes if node.cpus} == _groups(rows, 3)
    if columns[-1] == "L3":
        assert set(machine.l3_groups) == _groups(rows, len(rows[0]) - 1)


@pytest.mark.parametrize("path", LSCPU, ids=lambda path: path.stem)
def test_the_table_of_lscpu_describes_the_captured_machine(path: Path) -> None:
    beginning = "# The following is the parsable format"
    found = read_lscpu(
        beginning + path.read_text(encoding="utf-8").split(beginning)[1], what="lscpu"
    ).topology
    machine = recorded_machine(path.with_suffix(".tar.gz")).topology
    assert found.cores == machine.cores
    assert [package.cpus for package in found.packages] == [package.cpus for package in machine.packages]
    nodes = [(node.id, node.cpus) for node in machine.numa_nodes if node.cpus]
    assert [(node.id, node.cpus) for node in found.numa_nodes] == nodes
    assert found.l3_groups == machine.l3_groups


def _read(name: str) -> Topology:
    return recorded_machine(captured_folder("topologies") / name).topology


def test_ids_of_real_machines_are_kept_where_the_kernel_gives_them() -> None:
    gpus = _read("hwloc/nvidiagpunumanodes.tar.bz2")
    assert [package.id for package in gpus.packages] == [0, 8]
    assert [node.id for node in gpus.numa_nodes] == [0, 8, 250, 251, 252, 253, 254, 255]
    assert (
        gpus.distance(NumaId(0), NumaId(8)),
        gpus.distance(NumaId(0), NumaId(250)),
        gpus.distance(NumaId(8), NumaId(255)),
    ) == (40, 80, 80)
    assert format_cpu_list(gpus.cpus) == "0-15,88-103"
    ia64 = _read("hwloc/128ia64-17n4s2c.tar.bz2")
    assert 65537 in {package.id for package in ia64.packages}
    assert ia64.distance(NumaId(0), NumaId(16)) == 14


def test_memory_and_huge_pages_of_a_real_machine_are_read_by_node() -> None:
    machine = _read("hwloc/48amd64-4pa2n6c-sparse.tar.bz2")
    assert [node.id for node in machine.numa_nodes] == [0, 1, 2, 33, 34, 45, 72, 73]
    assert [node.memory >> 20 for node in machine.numa_nodes] == [8189, *[16384, 8192] * 3, 16384]


def test_this_machine_is_read_as_its_kernel_counts_it() -> None:
    machine = discover(FolderTree(Path("/"))).topology
    online = Path("/sys/devices/system/cpu/online").read_text(encoding="ascii").strip()
    assert format_cpu_list(machine.cpus) == online
    assert sum(node.memory for node in machine.numa_nodes) > 0


def test_a_folder_is_read_as_its_archive_is(tmp_path: Path) -> None:
    path = captured_folder("topologies") / "lscpu" / "vmware_fpe.tar.gz"
    with tarfile.open(path) as archive:
        # Debian 12's own Python has no filters yet; later ones warn without one.
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(tmp_path, **safely)  # type: ignore[arg-type]
    archived = discover(open_tree(path)).topology
    assert discover(open_tree(tmp_path)).topology == archived
    assert discover(open_tree(tmp_path / "vmware_fpe")).topology == archived


def _archive(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def test_input_that_is_not_a_machine_is_refused_with_the_accepted_forms(tmp_path: Path) -> None:
    junk = tmp_path / "junk.tar"
    junk.write_bytes(b"not an archive")
    empty = tmp_path / "empty"
    empty.mkdir()
    cut = tmp_path / "cut.tar.gz"
    whole = _archive(tmp_path / "whole.tar.gz", {"sys/devices/system/cpu/online": b"0\n" * 4000})
    cut.write_bytes(whole.read_bytes()[:40])
    for path, words in (
        (tmp_path / "nowhere", "cannot be read: No such file"),
        (junk, "cannot be read as a tar archive"),
        (cut, "cannot be read as a tar archive"),
        (empty, "contains no sys/devices/system/cpu"),
        (_archive(tmp_path / "other.tgz", {"etc/passwd": b"root"}), "contains no sys/devices/system/cpu"),
    ):
        with pytest.raises(BadTopology, match=words) as raised:
            discover(open_tree(path))
        assert str(path) in str(raised.value)


def test_nothing_outside_the_machine_is_read_from_an_archive(tmp_path: Path) -> None:
    path = _archive(
        tmp_path / "odd.tar.gz",
        {
            "./sys/devices/system/cpu/online": b"0\n",
            "./sys/devices/system/cpu/cpu0/topology/core_cpus_list": b"0\n",
            "../sys/devices/system/cpu/cpu1/topology/core_cpus_list": b"1\n",
            "/sys/devices/system/cpu/cpu0/topology/package_cpus_list": b"0\n",
        },
    )
    machine = discover(open_tree(path)).topology
    assert list(cpus_of(machine.cpus)) == [0]
    assert machine.packages[0].id == 0


def test_a_closed_file_is_as_good_as_missing(tmp_path: Path) -> None:
    assert FolderTree(tmp_path).read("sys") is None
    assert FolderTree(tmp_path).entries("sys") == []
    with pytest.raises(BadTopology, match="contains no"):
        open_tree(tmp_path)
