"""The view of a guest that mirrors the host: its NUMA cells, its sockets, cores and threads."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lxml import etree

from kvplace.core.cpuset import cpus_of, mask_of, parse_cpu_list
from kvplace.core.errors import BadDomainXml
from kvplace.core.guest_cells import CELL_GRANULE, GuestCell
from kvplace.core.placement import Placement
from kvplace.core.request import NumaMemory
from kvplace.core.scalars import NO_BYTES, Bytes, CpuId, NumaId
from kvplace.domainxml import rewrite
from tests.domainxml.documents import bindings, cells, domain, pins, topology
from tests.domainxml.placements import FOUR_VCPUS, mirroring
from tests.kubevirt_documents import DOMAIN_FILES

GIB = Bytes(1 << 30)
TWO_CELLS = replace(
    FOUR_VCPUS,
    vcpus=(CpuId(2), CpuId(34), CpuId(18), CpuId(50)),
    cpus=mask_of((2, 34, 18, 50)),
    numa_nodes=(NumaId(0), NumaId(1)),
    numa_memory=NumaMemory.STRICT,
    memory={NumaId(0): 2 * GIB, NumaId(1): 2 * GIB},
    guest_cells=(
        GuestCell(0, node=NumaId(0), vcpus=(0, 1), memory=2 * GIB, distances=(10, 21), threads=2),
        GuestCell(1, node=NumaId(1), vcpus=(2, 3), memory=2 * GIB, distances=(21, 10), threads=2),
    ),
)
FOUR = "<memory unit='GiB'>4</memory><vcpu>4</vcpu>"


def warnings(xml: bytes, placement: Placement) -> list[str]:
    sentences: list[str] = []
    rewrite(xml, placement, warn=sentences.append)
    return sentences


def test_a_guest_sees_a_cell_and_a_socket_for_each_node_with_its_siblings_memory_and_distances() -> None:
    answer = rewrite(domain(FOUR), TWO_CELLS)
    assert topology(answer) == (2, 1, 2)
    assert cells(answer) == [
        {"id": "0", "cpus": "0-1", "memory": "2147483648", "unit": "b", "distances": ["10", "21"]},
        {"id": "1", "cpus": "2-3", "memory": "2147483648", "unit": "b", "distances": ["21", "10"]},
    ]
    assert bindings(answer) == [
        {"is": "memory", "mode": "strict", "nodeset": "0-1"},
        {"is": "memnode", "cellid": "0", "mode": "strict", "nodeset": "0"},
        {"is": "memnode", "cellid": "1", "mode": "strict", "nodeset": "1"},
    ]
    assert warnings(domain(FOUR), TWO_CELLS) == []


def test_only_cells_and_counts_of_kubevirts_cpu_element_change() -> None:
    cpu = (
        "<cpu mode='host-model'><topology sockets='4' dies='1' cores='1' threads='1'/><feature name='x'/>"
        "<numa><cell id='0' cpus='0-3' memory='4194304' unit='KiB' memAccess='shared'/><later/></numa></cpu>"
    )
    answer = rewrite(domain(FOUR, cpu), TWO_CELLS)
    assert topology(answer) == (2, 1, 2)
    assert [cell["memAccess"] for cell in cells(answer)] == ["shared", "shared"]
    (kept,) = etree.fromstring(answer).iterfind("cpu")
    assert kept.get("mode") == "host-model"
    assert kept.find("feature") is not None
    assert kept.find("numa/later") is not None


def test_a_guest_keeps_its_cells_when_its_memory_binding_was_removed() -> None:
    answer = rewrite(domain(FOUR), replace(TWO_CELLS, numa_memory=NumaMemory.OFF))
    assert bindings(answer) == []
    assert [cell["cpus"] for cell in cells(answer)] == ["0-1", "2-3"]


def test_a_node_that_gives_memory_alone_is_a_cell_without_a_list_of_vcpus() -> None:
    first, second = TWO_CELLS.guest_cells
    placement = replace(
        TWO_CELLS, guest_cells=(replace(first, vcpus=(0, 1, 2, 3)), replace(second, vcpus=()))
    )
    answer = rewrite(domain(FOUR), placement)
    assert topology(answer) == (1, 2, 2)
    assert [cell.get("cpus") for cell in cells(answer)] == ["0-3", None]
    assert [part.get("nodeset") for part in bindings(answer)] == ["0-1", "0", "1"]


def test_cells_of_different_size_share_one_socket() -> None:
    first, second = TWO_CELLS.guest_cells
    placement = replace(
        TWO_CELLS,
        vcpus=(CpuId(2), CpuId(34), CpuId(3), CpuId(35), CpuId(18), CpuId(50)),
        cpus=mask_of((2, 34, 3, 35, 18, 50)),
        guest_cells=(replace(first, vcpus=(0, 1, 2, 3)), replace(second, vcpus=(4, 5))),
    )
    answer = rewrite(domain("<memory unit='GiB'>4</memory><vcpu>6</vcpu>"), placement)
    assert topology(answer) == (1, 3, 2)


def test_vcpus_that_can_be_plugged_in_later_go_to_the_cells_socket_by_socket() -> None:
    xml = domain("<memory unit='GiB'>4</memory><vcpu current='4'>12</vcpu>")
    answer = rewrite(xml, TWO_CELLS)
    assert topology(answer) == (6, 1, 2)
    assert [cell["cpus"] for cell in cells(answer)] == ["0-1,4-5,8-9", "2-3,6-7,10-11"]
    assert pins(answer)["vcpu 4"] == pins(answer)["vcpu 11"] == "2,18,34,50"
    (sentence,) = warnings(xml, TWO_CELLS)
    assert sentence.startswith("8 vCPUs that can be plugged in later are assigned to the guest's NUMA cells")


def test_an_odd_number_of_vcpus_costs_the_guest_its_siblings_with_a_warning() -> None:
    xml = domain("<memory unit='GiB'>4</memory><vcpu current='4'>5</vcpu>")
    answer = rewrite(xml, TWO_CELLS)
    assert topology(answer) == (5, 1, 1)
    assert [cell["cpus"] for cell in cells(answer)] == ["0-1,4", "2-3"]
    assert warnings(xml, TWO_CELLS)[0].startswith("the guest sees cores of one thread, not 2: its 5 vCPUs")


@pytest.mark.parametrize(
    ("memory", "shares"),
    [
        ("<memory unit='GiB'>4</memory>", [2 * GIB, 2 * GIB]),
        ("<memory>4194304</memory>", [2 * GIB, 2 * GIB]),
        ("<memory unit='b'>4294967296</memory>", [2 * GIB, 2 * GIB]),
        ("<memory unit=''>4194304</memory>", [2 * GIB, 2 * GIB]),
        ("<memory unit='K'>4194304</memory>", [2 * GIB, 2 * GIB]),
        ("<memory unit='gib'>4</memory>", [2 * GIB, 2 * GIB]),
        ("<memory unit='bYtes'>4294967296</memory>", [2 * GIB, 2 * GIB]),
        ("<memory unit='kB'>4294967</memory>", [2 * GIB, 2 * GIB - 296]),
        ("<memory unit='MiB'>4097</memory>", [2 * GIB + CELL_GRANULE, 2 * GIB]),
        ("<memory unit='b'>4294967297</memory>", [2 * GIB, 2 * GIB + 1]),
        (
            (
                "<memory unit='GiB'>6</memory><devices><memory model='virtio-mem'><target>"
                "<size unit='GiB'>2</size><node>0</node></target></memory></devices>"
            ),
            [2 * GIB, 2 * GIB],
        ),
    ],
)
def test_cells_make_up_the_guests_memory_without_the_memory_of_devices(
    memory: str, shares: list[int]
) -> None:
    answer = rewrite(domain(memory, "<vcpu>4</vcpu>"), TWO_CELLS)
    assert [int(cell["memory"]) for cell in cells(answer)] == shares


def test_memory_that_was_never_placed_is_shared_out_evenly() -> None:
    unknown = tuple(replace(cell, memory=NO_BYTES) for cell in TWO_CELLS.guest_cells)
    answer = rewrite(domain(FOUR), replace(TWO_CELLS, memory={}, guest_cells=unknown))
    assert [int(cell["memory"]) for cell in cells(answer)] == [2 * GIB, 2 * GIB]


def test_a_guest_that_became_larger_gets_cells_of_whole_huge_pages() -> None:
    first, second = TWO_CELLS.guest_cells
    placement = replace(
        TWO_CELLS,
        memory={NumaId(0): 3 * GIB, NumaId(1): GIB},
        huge_pages={NumaId(0): {Bytes(GIB): 3}, NumaId(1): {Bytes(GIB): 1}},
        guest_cells=(replace(first, memory=3 * GIB), replace(second, memory=GIB)),
    )
    answer = rewrite(domain("<memory unit='GiB'>5</memory><vcpu>4</vcpu>"), placement)
    assert [int(cell["memory"]) for cell in cells(answer)] == [4 * GIB, GIB]


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ("<vcpu>4</vcpu>", "the domain has no <memory>"),
        ("<memory>x</memory><vcpu>4</vcpu>", "<memory> is 'x' 'KiB', not a size such as 4194304 KiB"),
        ("<memory unit='KiBi'>1</memory><vcpu>4</vcpu>", "<memory> is '1' 'KiBi', not a size"),
        ("<memory unit='b'>0</memory><vcpu>4</vcpu>", "0 bytes of memory are not enough for 2 guest NUMA"),
        ("<memory unit='MiB'>1</memory><vcpu>4</vcpu>", "1048576 bytes of memory are not enough for 2 guest"),
        (FOUR + "<os><type arch='s390x'>hvm</type></os>", "guests of architecture s390x have no NUMA cells"),
        (
            f"{FOUR}<memoryBacking><hugepages><page size='1' nodeset='0'/></hugepages></memoryBacking>",
            "<hugepages><page nodeset> names guest NUMA cells that guest-numa: mirror replaces",
        ),
        (FOUR + "<cpu/><cpu/>", "the domain has 2 <cpu> elements, but libvirt reads one; keep one"),
    ],
)
def test_a_guest_that_cannot_have_cells_is_refused(lines: str, sentence: str) -> None:
    with pytest.raises(BadDomainXml) as refused:
        rewrite(domain(lines), TWO_CELLS)
    assert str(refused.value).startswith(sentence)


def parts_not_mirrored(xml: bytes) -> list[bytes]:
    """Everything outside the elements that a mirroring placement writes."""
    root = etree.fromstring(xml)
    for cpu in root.iterfind("cpu"):
        for path in ("topology", "numa/cell"):
            for element in cpu.findall(path):
                parent = element.getparent()
                assert parent is not None
                parent.remove(element)
        numa = cpu.find("numa")
        if numa is not None and not len(numa):
            cpu.remove(numa)
    return [etree.tostring(child, method="c14n") for child in root if _is_kept(child)]


def _is_kept(child: etree._Element) -> bool:
    emptied = child.tag == "cpu" and not len(child)  # the whole element was ours
    return child.tag not in ("cputune", "numatune", "vcpu") and not emptied


DOCUMENTS = [path for path in DOMAIN_FILES if "s390x" not in path.name and "numa-hugepages" not in path.name]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_captured_documents_change_in_nothing_else_and_three_calls_give_one_answer(path: Path) -> None:
    xml = path.read_bytes()
    for placement in (mirroring(cells=2, vcpus=16, threads=2), mirroring(cells=3, vcpus=18, threads=1)):
        answer = rewrite(xml, placement)
        assert parts_not_mirrored(answer) == parts_not_mirrored(xml)
        assert rewrite(rewrite(answer, placement), placement) == answer
        through_kubevirt = answer.replace(b"<distances>", b"<!--").replace(b"</distances>", b"-->")
        assert cells(rewrite(through_kubevirt, placement)) == cells(answer)
        root = etree.fromstring(answer)
        most = int(root.findtext("vcpu") or "")
        assert prod(topology(answer)) == most
        assert sorted(_vcpus_of_cells(answer)) == list(range(most))
        memory = root.find("memory")
        assert memory is not None
        assert sum(int(cell["memory"]) for cell in cells(answer)) == int(memory.text or "")


def _vcpus_of_cells(xml: bytes) -> list[int]:
    lists = [parse_cpu_list(cell.get("cpus", "")) for cell in cells(xml)]
    return [vcpu for cpus in lists for vcpu in cpus_of(cpus)]


@st.composite
def mirrored_domains(draw: st.DrawFn) -> tuple[bytes, Placement]:
    threads = draw(st.integers(1, 3))
    homes = draw(st.lists(st.integers(0, 3), min_size=1, max_size=8))
    seen = list(dict.fromkeys(homes))
    vcpus = [seen.index(home) for home in homes for _ in range(threads)]
    alone = draw(st.integers(0, 2))
    sizes = draw(
        st.lists(st.integers(1, 1 << 36), min_size=len(seen) + alone, max_size=len(seen) + alone)
        | st.just([0] * (len(seen) + alone))
    )
    placement = mirroring(cells=len(sizes), vcpus=len(vcpus), threads=threads)
    placement = replace(
        placement,
        guest_cells=tuple(
            replace(
                cell,
                vcpus=tuple(vcpu for vcpu, home in enumerate(vcpus) if home == cell.id),
                memory=Bytes(size),
            )
            for cell, size in zip(placement.guest_cells, sizes, strict=True)
        ),
    )
    most = len(vcpus) + draw(st.integers(0, 12))
    total = sum(sizes) if any(sizes) and draw(st.booleans()) else draw(st.integers(64, 1 << 14)) << 20
    return domain(f"<memory unit='b'>{total}</memory><vcpu current='{len(vcpus)}'>{most}</vcpu>"), placement


@given(mirrored_domains())
def test_cells_hold_every_vcpu_and_all_memory_and_the_topology_multiplies_to_them(
    given_: tuple[bytes, Placement],
) -> None:
    xml, placement = given_
    try:
        answer = rewrite(xml, placement)
    except BadDomainXml as error:
        assert "not enough" in str(error)  # noqa: PT017 - a share below one byte is all that may stop it
        return
    root = etree.fromstring(answer)
    most, total = int(root.findtext("vcpu") or ""), int(root.findtext("memory") or "")
    assert prod(topology(answer)) == most
    assert sorted(_vcpus_of_cells(answer)) == list(range(most))
    assert sum(int(cell["memory"]) for cell in cells(answer)) == total
    assert all(int(cell["memory"]) > 0 for cell in cells(answer))
    _, cores, threads = topology(answer)
    assert threads in (1, placement.guest_cells[0].threads)
    home = {
        vcpu: cell["id"] for cell in cells(answer) for vcpu in cpus_of(parse_cpu_list(cell.get("cpus", "")))
    }
    for vcpu, number in home.items():
        if vcpu < len(placement.vcpus):
            assert vcpu in placement.guest_cells[int(number)].vcpus
    for first in range(0, most, threads):
        assert len({home[CpuId(vcpu)] for vcpu in range(first, first + threads)}) == 1
    sizes = {len(cell.vcpus) for cell in placement.guest_cells if cell.vcpus}
    contiguous = all(
        cell.vcpus == tuple(range(cell.vcpus[0], cell.vcpus[-1] + 1))
        for cell in placement.guest_cells
        if cell.vcpus
    )
    if len(sizes) == 1 and contiguous:
        for first in range(0, most, cores * threads):
            assert len({home[CpuId(vcpu)] for vcpu in range(first, first + cores * threads)}) == 1
    assert rewrite(answer, placement) == answer
