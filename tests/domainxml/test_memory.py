"""Which host NUMA nodes a domain's memory comes from."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lxml import etree

from kvplace.core.errors import BadDomainXml
from kvplace.core.guest_cells import CELL_GRANULE, GuestCell, apportion
from kvplace.core.placement import Placement
from kvplace.core.request import NumaMemory
from kvplace.core.scalars import NO_BYTES, Bytes, CpuId, CpuMask, NumaId
from kvplace.domainxml import rewrite
from tests.domainxml.documents import bindings, domain
from tests.domainxml.placements import FOUR_VCPUS
from tests.kubevirt_documents import DOMAINS

TWO_NODES = replace(
    FOUR_VCPUS,
    vcpus=(CpuId(2), CpuId(34), CpuId(18), CpuId(50)),
    numa_nodes=(NumaId(0), NumaId(1)),
    numa_memory=NumaMemory.STRICT,
    memory={NumaId(0): Bytes(4 << 30), NumaId(1): Bytes(4 << 30)},
)
NODE_OF_CPU = {CpuId(cpu): NumaId((cpu % 32) // 16) for cpu in range(64)}
TWO_CELLS = (
    "<vcpu>4</vcpu><cpu><numa><cell id='0' cpus='0-1' memory='4' unit='GiB'/>"
    "<cell id='1' cpus='2,3' memory='4194304'/></numa></cpu>"
)


@pytest.mark.parametrize("mode", [NumaMemory.PREFERRED, NumaMemory.STRICT, NumaMemory.INTERLEAVE])
def test_the_memory_gets_mode_and_nodes_in_full(mode: NumaMemory) -> None:
    answer = rewrite(domain("<vcpu>4</vcpu>"), replace(TWO_NODES, numa_memory=mode))
    assert bindings(answer) == [{"is": "memory", "mode": mode.value, "nodeset": "0-1"}]


@pytest.mark.parametrize("mode", [NumaMemory.PREFERRED, NumaMemory.STRICT, NumaMemory.INTERLEAVE])
def test_a_node_that_gives_vcpus_and_no_memory_is_left_out(mode: NumaMemory) -> None:
    placement = replace(TWO_NODES, numa_memory=mode, memory={NumaId(0): Bytes(8 << 30), NumaId(1): NO_BYTES})
    assert bindings(rewrite(domain("<vcpu>4</vcpu>"), placement))[0]["nodeset"] == "0"
    unknown = replace(TWO_NODES, numa_memory=mode, memory={})
    assert bindings(rewrite(domain("<vcpu>4</vcpu>"), unknown))[0]["nodeset"] == "0-1"


def test_huge_pages_of_several_nodes_are_taken_from_all_of_them() -> None:
    paged = replace(
        TWO_NODES,
        numa_memory=NumaMemory.PREFERRED,
        huge_pages={NumaId(0): {Bytes(1 << 30): 4}, NumaId(1): {Bytes(1 << 30): 4}},
    )
    xml = domain("<vcpu>4</vcpu>")
    assert bindings(rewrite(xml, paged)) == [{"is": "memory", "mode": "interleave", "nodeset": "0-1"}]
    strict = replace(paged, numa_memory=NumaMemory.STRICT)
    assert bindings(rewrite(xml, strict)) == [{"is": "memory", "mode": "strict", "nodeset": "0-1"}]
    elsewhere = replace(paged, huge_pages={NumaId(1): {Bytes(1 << 30): 8}})
    assert bindings(rewrite(xml, elsewhere))[0]["mode"] == "preferred"
    cells = bindings(rewrite(domain(TWO_CELLS), paged, NODE_OF_CPU))
    assert [cell["mode"] for cell in cells] == ["preferred"] * 3


def test_an_earlier_binding_is_replaced_and_unknown_parts_stay() -> None:
    xml = domain(
        "<vcpu>4</vcpu><numatune><memory mode='strict' placement='auto'/><later/>"
        "<memnode cellid='0' mode='strict' nodeset='1'/></numatune>"
    )
    assert bindings(rewrite(xml, FOUR_VCPUS)) == [
        {"is": "memory", "mode": "preferred", "nodeset": "0"},
        {"is": "later"},
    ]


def test_memory_off_leaves_no_binding_behind() -> None:
    xml = (DOMAINS / "07-amd64-dedicated-numa-hugepages.domain.xml").read_bytes()
    answer = rewrite(
        xml,
        replace(FOUR_VCPUS, vcpus=tuple(map(CpuId, range(8))), cpus=CpuMask(255), numa_memory=NumaMemory.OFF),
    )
    assert etree.fromstring(answer).find("numatune") is None


@pytest.mark.parametrize(
    "document",
    [
        "<domain>\n  <vcpu placement='static'>1</vcpu>\n  {}<name>a</name>\n</domain>",
        "<domain>\n  {}<vcpu placement='static'>1</vcpu>\n</domain>",
        "<domain>\n  <vcpu placement='static'>1</vcpu>\n{}</domain>",
    ],
)
def test_an_empty_numatune_is_removed_with_its_line(document: str) -> None:
    off = replace(FOUR_VCPUS, numa_memory=NumaMemory.OFF)
    last = document.endswith("{}</domain>")
    line = "  <numatune><memory mode='strict' nodeset='1'/></numatune>\n"
    with_numatune = document.format(line if last else line.strip() + "\n  ")
    assert rewrite(with_numatune.encode(), off) == rewrite(document.format("").encode(), off)


def test_guest_cells_get_memory_of_the_node_that_their_vcpus_run_on() -> None:
    assert bindings(rewrite(domain(TWO_CELLS), TWO_NODES, NODE_OF_CPU)) == [
        {"is": "memory", "mode": "strict", "nodeset": "0-1"},
        {"is": "memnode", "cellid": "0", "mode": "strict", "nodeset": "0"},
        {"is": "memnode", "cellid": "1", "mode": "strict", "nodeset": "1"},
    ]


@pytest.mark.parametrize(
    "placement",
    [
        replace(TWO_NODES, vcpus=(CpuId(2), CpuId(18), CpuId(34), CpuId(50))),  # each cell on both nodes
        replace(TWO_NODES, numa_memory=NumaMemory.INTERLEAVE),
        replace(TWO_NODES, memory={NumaId(0): Bytes(8 << 30)}),  # accounted for on node 0 alone
        replace(TWO_NODES, numa_nodes=(NumaId(0),)),
        replace(TWO_NODES, numa_nodes=(NumaId(0), NumaId(2))),
        FOUR_VCPUS,
    ],
)
def test_guest_cells_that_are_not_on_one_node_each_get_no_memnode(
    placement: Placement,
) -> None:
    assert [part["is"] for part in bindings(rewrite(domain(TWO_CELLS), placement, NODE_OF_CPU))] == ["memory"]


def test_vcpus_that_can_be_plugged_in_later_do_not_keep_a_cell_from_its_node() -> None:
    plugged = TWO_CELLS.replace("<vcpu>4", "<vcpu current='4'>8").replace("'0-1'", "'0-1,4-5'")
    xml = domain(plugged.replace("'2,3'", "'2,3,6,7'"))
    _, *memnodes = bindings(rewrite(xml, TWO_NODES, NODE_OF_CPU))
    assert [memnode["nodeset"] for memnode in memnodes] == ["0", "1"]


def test_a_mirroring_vm_that_migrates_keeps_the_memory_of_each_cell_on_one_node() -> None:
    xml = (DOMAINS / "01-amd64-plain-4vcpu.domain.xml").read_bytes()
    cells = tuple(
        GuestCell(number, NumaId(number), (2 * number, 2 * number + 1), Bytes(2 << 30), distances)
        for number, distances in enumerate([(10, 21), (21, 10)])
    )
    arriving = rewrite(xml, replace(TWO_NODES, guest_cells=cells))
    assert len(bindings(arriving)) == 3
    assert bindings(rewrite(arriving, TWO_NODES, NODE_OF_CPU)) == bindings(arriving)


@pytest.mark.parametrize("total", [10**10, (8 << 30) - (1 << 20), (8 << 30) - 1])
def test_cells_that_were_cut_to_whole_mebibytes_match_the_placement(total: int) -> None:
    shares = {NumaId(0): Bytes(-(-total // 2)), NumaId(1): Bytes(total // 2)}
    cuts = apportion(total, list(shares.values()), CELL_GRANULE)
    cells = "".join(
        f"<cell id='{number}' cpus='{2 * number}-{2 * number + 1}' memory='{cut}' unit='b'/>"
        for number, cut in enumerate(cuts)
    )
    xml = domain(f"<vcpu>4</vcpu><cpu><numa>{cells}</numa></cpu>")
    assert len(bindings(rewrite(xml, replace(TWO_NODES, memory=shares), NODE_OF_CPU))) == 3
    less = replace(TWO_NODES, memory={node: Bytes(share - (4 << 20)) for node, share in shares.items()})
    assert len(bindings(rewrite(xml, less, NODE_OF_CPU))) == 1


def test_guest_cells_get_no_memnode_when_the_machine_is_unknown() -> None:
    assert [part["is"] for part in bindings(rewrite(domain(TWO_CELLS), TWO_NODES))] == ["memory"]


def test_the_one_cell_that_kubevirt_makes_for_shared_memory_needs_no_memnode() -> None:
    xml = (DOMAINS / "13-amd64-hugepages-nonuma.domain.xml").read_bytes()
    placement = replace(TWO_NODES, vcpus=tuple(map(CpuId, range(16))))
    assert [part["is"] for part in bindings(rewrite(xml, placement, NODE_OF_CPU))] == ["memory"]


def test_a_binding_without_nodes_is_refused() -> None:
    with pytest.raises(BadDomainXml, match="numa-memory preferred but has no NUMA node"):
        rewrite(domain("<vcpu>4</vcpu>"), replace(FOUR_VCPUS, numa_nodes=()))


def test_two_numatune_elements_are_refused_as_libvirt_would() -> None:
    with pytest.raises(BadDomainXml, match="2 <numatune> elements"):
        rewrite(domain("<vcpu>4</vcpu><numatune/><numatune/>"), FOUR_VCPUS)


@pytest.mark.parametrize("vcpus", [(2, 18, 34, 50), (18, 2, 34, 50), (2, 34, 3, 50)])
def test_cells_are_not_bound_when_one_of_them_has_vcpus_on_both_nodes(vcpus: tuple[int, ...]) -> None:
    placement = replace(TWO_NODES, vcpus=tuple(map(CpuId, vcpus)))
    assert [binding["is"] for binding in bindings(rewrite(domain(TWO_CELLS), placement, NODE_OF_CPU))] == [
        "memory"
    ]


MEMORY_ALONE = (
    "<vcpu current='2'>4</vcpu><cpu><numa><cell id='0' cpus='0-3' memory='4' unit='GiB'/>"
    "<cell id='1' memory='3' unit='GiB'/><cell id='2' memory='1' unit='GiB'/></numa></cpu>"
)


def test_cells_without_vcpus_get_the_nodes_that_give_memory_alone() -> None:
    placement = replace(
        TWO_NODES,
        vcpus=(CpuId(18), CpuId(50)),
        numa_nodes=tuple(map(NumaId, range(3))),
        memory={NumaId(0): Bytes(1 << 30), NumaId(1): Bytes(4 << 30), NumaId(2): Bytes(3 << 30)},
    )
    found = bindings(rewrite(domain(MEMORY_ALONE), placement, NODE_OF_CPU))
    assert [(part["cellid"], part["nodeset"]) for part in found[1:]] == [("0", "1"), ("1", "2"), ("2", "0")]
    small = replace(placement, memory={**placement.memory, NumaId(2): Bytes(2 << 30)})
    assert len(bindings(rewrite(domain(MEMORY_ALONE), small, NODE_OF_CPU))) == 1


def test_cells_that_cannot_be_bound_one_by_one_are_reported() -> None:
    said: list[str] = []
    across = replace(TWO_NODES, vcpus=tuple(map(CpuId, (2, 34, 3, 50))))
    rewrite(domain(TWO_CELLS), across, NODE_OF_CPU, said.append)
    (sentence,) = said
    assert sentence.startswith("the memory of the guest's 2 NUMA cells is bound to NUMA nodes 0-1 together")
    rewrite(domain(TWO_CELLS), TWO_NODES, NODE_OF_CPU, said.append)
    rewrite(domain(TWO_CELLS), FOUR_VCPUS, NODE_OF_CPU, said.append)
    rewrite(domain("<vcpu>4</vcpu>"), across, NODE_OF_CPU, said.append)
    assert len(said) == 1


def test_cells_are_not_bound_when_one_of_them_has_no_vcpus() -> None:
    without = TWO_CELLS.replace(" cpus='2,3'", "")
    assert [binding["is"] for binding in bindings(rewrite(domain(without), TWO_NODES, NODE_OF_CPU))] == [
        "memory"
    ]
