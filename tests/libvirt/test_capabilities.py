"""libvirt's capabilities give the same machine as its sysfs, or one sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.cpuset import format_cpu_list
from kvplace.core.errors import BadTopology
from kvplace.core.scalars import NO_CPUS, CpuId
from kvplace.core.topology import Topology
from kvplace.libvirt.capabilities import MAX_BYTES, read_capabilities
from kvplace.linux.sysfs import discover
from kvplace.machines.server_types import machine_names, read_machine
from tests.captured import captured_files, captured_folder
from tests.core.invalid_input import answer_or_sentence
from tests.libvirt.written_capabilities import capabilities_of
from tests.linux.written_tree import sysfs_of

CAPTURES = captured_files("libvirt/capabilities", "*.xml")
BASIC = replace(read_machine("2x-xeon-8480plus-snc4"), reserved=NO_CPUS)

# Sockets, NUMA nodes, L3 caches (0: libvirt does not describe them), cores, CPUs.
COUNTS = {
    "vircaps-aarch64-basic": (4, 4, 0, 16, 16),
    "vircaps-x86_64-basic-dies": (2, 1, 0, 12, 12),
    "vircaps-x86_64-resctrl-amd": (2, 2, 8, 32, 64),
    "vircaps-x86_64-resctrl-fake-feature": (2, 2, 2, 12, 12),
    "vircaps-x86_64-resctrl-mba_MBps": (2, 2, 2, 24, 48),
    "vircaps-x86_64-resctrl-skx-twocaches": (1, 1, 1, 1, 1),
}


def _counts(machine: Topology, notes: tuple[str, ...]) -> tuple[int, ...]:
    return (
        len(machine.packages),
        len(machine.numa_nodes),
        0 if any("L3" in note for note in notes) else len(machine.l3_groups),
        len(machine.cores),
        machine.cpus.bit_count(),
    )


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.stem)
def test_a_captured_document_has_the_counts_that_libvirt_gives(path: Path) -> None:
    found = read_capabilities(path.read_bytes(), what=str(path))
    assert _counts(found.topology, found.notes) == COUNTS[path.stem]


def test_every_captured_document_is_in_the_table_of_counts() -> None:
    captured_folder("libvirt/capabilities")
    assert {path.stem for path in CAPTURES} == set(COUNTS)


def test_caches_whose_numbers_interleave_are_read_by_their_cpus() -> None:
    folder = captured_folder("libvirt/capabilities")
    machine = read_capabilities((folder / "vircaps-x86_64-resctrl-amd.xml").read_bytes()).topology
    assert [format_cpu_list(group) for group in machine.l3_groups][:4] == [
        *("0-3,32-35", "4-7,36-39", "8-11,40-43", "12-15,44-47"),
    ]
    assert machine.numa_nodes[1].memory == 2 << 30
    assert dict(machine.numa_nodes[1].huge_pages) == {2 << 20: 6144, 1 << 30: 8192}


@pytest.mark.parametrize("name", machine_names())
def test_capabilities_and_sysfs_of_a_machine_give_the_same_machine(name: str) -> None:
    machine = replace(read_machine(name), reserved=NO_CPUS, isolated=NO_CPUS)
    found = read_capabilities(capabilities_of(machine).encode())
    assert found.topology == discover(sysfs_of(machine)).topology == machine
    assert found.notes == ()


def test_a_cpu_with_the_ids_of_another_core_is_pointed_out_as_perhaps_off_line() -> None:
    xml = capabilities_of(BASIC).replace('core_id="5" siblings="5,117"', 'core_id="0" siblings="5"', 1)
    xml = xml.replace('siblings="5,117"', 'siblings="117"')
    found = read_capabilities(xml.encode())
    assert found.topology.core_of[CpuId(5)] == 1 << 5
    assert found.notes == (
        (
            "libvirt gives CPU 5 the ids of another core, as it does with CPUs that are off-line:"
            " reserve it if it is"
        ),
    )


def test_a_cpu_without_siblings_and_socket_collapses_with_a_note() -> None:
    xml = "<capabilities><host><topology><cells><cell id='0'><cpus><cpu id='0'/><cpu id='1'/></cpus></cell>"
    found = read_capabilities(f"{xml}</cells></topology></host></capabilities>".encode())
    assert _counts(found.topology, found.notes) == (1, 1, 0, 2, 2)
    assert [note.partition(":")[0] for note in found.notes] == [
        "libvirt does not describe the sibling threads",
        "libvirt does not describe the sockets",
        "libvirt does not describe the L3 caches",
    ]


def test_a_cpu_in_two_cells_gets_one_of_them() -> None:
    xml = capabilities_of(BASIC).replace('<cpu id="0" ', '<cpu id="14" ', 1)
    found = read_capabilities(xml.encode())
    assert [node.memory for node in found.topology.numa_nodes] == [n.memory for n in BASIC.numa_nodes]
    assert "CPU 14 into several NUMA nodes" in found.notes[0]


BOMB = (
    '<?xml version="1.0"?><!DOCTYPE c [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>'
    "<capabilities>&b;</capabilities>"
)


@pytest.mark.parametrize(
    ("xml", "words"),
    [
        (b"", "is not well-formed XML"),
        (b"<capabilities>", "is not well-formed XML"),
        (BOMB.encode(), "has a DOCTYPE or is not UTF-8 text"),
        (BOMB.encode("utf-16"), "has a DOCTYPE or is not UTF-8 text"),
        (BOMB.replace("1.0", "1.0' encoding='utf-7").encode("utf-7"), "has a DOCTYPE"),
        (b"<domain/>", "is a <domain>, not the <capabilities>"),
        (b"<capabilities/>", "there is no <cell>"),
        (b" " * (MAX_BYTES + 1), "is longer than"),
        (b"<a>" * 100_000, "is not well-formed XML"),
        (capabilities_of(BASIC).replace('cell id="1"', 'cell id="0"').encode(), "has the same id twice"),
        (capabilities_of(BASIC).replace('id="5"', 'id="x"').encode(), "'x' for the id of <cpu> is not"),
        (capabilities_of(BASIC).replace('id="5"', 'id="99999"').encode(), "CPU 99999 is above"),
        (capabilities_of(BASIC).replace('"5,117"', '"5-,117"').encode(), "caps.xml: siblings of CPU 5"),
        (
            capabilities_of(BASIC).replace('unit="KiB">', 'unit="XiB">').encode(),
            "the unit 'XiB' is not one of",
        ),
    ],
)
def test_a_document_that_is_not_a_machine_is_refused_in_one_sentence_that_names_it(
    xml: bytes, words: str
) -> None:
    with pytest.raises(BadTopology) as raised:
        read_capabilities(xml, what="/here/caps.xml")
    assert str(raised.value).startswith("/here/caps.xml")
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


TEXT = capabilities_of(replace(read_machine("epyc-7502p"), reserved=NO_CPUS))
PIECES = ["", "<", "&x;", "<!ENTITY x 'y'>", '"', "-1", "99999999", "\x00", "<cell/>", "é", "0-3", "<cpu/>"]


@given(st.data())
def test_a_damaged_document_is_read_or_refused_in_one_sentence(data: st.DataObject) -> None:
    text = TEXT
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        until = at + data.draw(st.sampled_from([0, 1, 2, 7, 400]))
        text = text[:at] + data.draw(st.sampled_from(PIECES)) + text[until:]
    found, _ = answer_or_sentence(read_capabilities, text.encode(), BadTopology)
    assert found is None or found.topology.cpus


@given(st.binary(max_size=200))
def test_rubbish_is_refused_in_one_sentence(xml: bytes) -> None:
    assert answer_or_sentence(read_capabilities, xml, BadTopology)[0] is None
