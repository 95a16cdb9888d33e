"""With `guest-numa: mirror` each device is behind a PCIe expander bus of the cell of its NUMA node."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lxml import etree

from kvplace.core.scalars import NumaId
from kvplace.domainxml import rewrite
from tests.domainxml.host_devices import hostdev, source
from tests.domainxml.placements import mirroring
from tests.kubevirt_documents import DOMAINS

PLACEMENT = mirroring(cells=2, vcpus=16, threads=1)
DOCUMENT = (DOMAINS / "01-amd64-plain-4vcpu.domain.xml").read_bytes()
GROWS = "can be plugged in later"


def document(*devices: str, controllers: str = "") -> bytes:
    added = (controllers + "".join(devices)).encode()
    return DOCUMENT.replace(b"</devices>", added + b"</devices>")


def placed(xml: bytes, nodes: dict[str, int]) -> tuple[bytes, list[str]]:
    """Rewrite twice; the second time changes nothing and has nothing else to report."""
    said: list[str] = []
    known = {address: NumaId(node) for address, node in nodes.items()}
    answer = rewrite(xml, PLACEMENT, {}, said.append, known)
    again: list[str] = []
    assert rewrite(answer, PLACEMENT, {}, again.append, known) == answer
    return answer, [sentence for sentence in said if GROWS not in sentence]


def buses(xml: bytes) -> list[tuple[int, int, int, int]]:
    """Index, number, cell, and count of ports of each expander bus."""
    devices = etree.fromstring(xml).find("devices")
    assert devices is not None
    found = []
    for bus in devices.iterfind("controller[@model='pcie-expander-bus']"):
        index = int(bus.get("index", ""))
        ports = devices.findall(f"controller[@model='pcie-root-port']/address[@bus='0x{index:02x}']")
        (target,) = bus.findall("target")
        found.append((index, int(target.get("busNr", "")), int(target.findtext("node", "")), len(ports)))
    return found


def cell_of(xml: bytes, number: int) -> int | None:
    """Follow a device over its port to its expander bus."""
    devices = etree.fromstring(xml).find("devices")
    assert devices is not None
    by_index = {
        f"0x{int(each.get('index', '')):02x}": each for each in devices.iterfind("controller[@type='pci']")
    }
    address = devices.find(f"hostdev/alias[@name='ua-d{number}']/../address")
    if address is None:
        return None
    above = by_index[by_index[address.get("bus", "")].find("address").get("bus", "")]  # type: ignore[union-attr]
    return int(above.findtext("target/node", ""))


def test_each_cell_with_devices_gets_a_bus_and_each_device_a_port() -> None:
    answer, said = placed(
        document(*(hostdev(n) for n in range(5))), {source(n): int(n == 3) for n in range(5)}
    )
    assert said == []
    assert buses(answer) == [(1, 251, 0, 4), (6, 249, 1, 1)]
    assert [cell_of(answer, n) for n in range(5)] == [0, 0, 0, 1, 0]


def test_only_controllers_and_addresses_are_added() -> None:
    plain = document(hostdev(0))
    answer, _ = placed(plain, {source(0): 0})
    without = rewrite(plain, PLACEMENT)
    root = etree.fromstring(answer)
    for element in (
        *root.findall("devices/controller[@type='pci']"),
        *root.findall("devices/hostdev/address"),
    ):
        element.getparent().remove(element)  # type: ignore[union-attr]
    assert etree.tostring(root, method="c14n") == etree.tostring(etree.fromstring(without), method="c14n")


def test_a_guest_that_does_not_mirror_and_a_device_of_an_unknown_node_get_no_bus() -> None:
    plain = document(hostdev(0), hostdev(1))
    floating = replace(PLACEMENT, guest_cells=())
    assert rewrite(plain, floating, {}, node_of_device={source(0): NumaId(0)}) == rewrite(plain, floating)
    answer, said = placed(plain, {source(0): 1})
    assert (buses(answer), said, cell_of(answer, 1)) == ([(1, 254, 1, 1)], [], None)


def test_a_device_on_a_node_that_is_not_the_guests_stays_and_is_named() -> None:
    answer, said = placed(document(hostdev(0)), {source(0): 5})
    assert buses(answer) == []
    assert said == ["device ua-d0 (0000:41:00.0) is on NUMA node 5, which the guest does not have"]


def test_indexes_follow_those_of_the_document_and_of_its_addresses_without_a_gap() -> None:
    ports = (
        "<controller type='pci' index='0' model='pcie-root'/>"
        "<controller type='pci' index='1' model='pcie-root-port'/>"
        "<controller type='pci' index='2' model='pcie-root-port'/>"
    )
    answer, _ = placed(document(hostdev(0), controllers=ports), {source(0): 0})
    assert buses(answer) == [(3, 254, 0, 1)]
    given_by_user = "<rng><backend model='random'>/dev/random</backend><address type='pci' bus='0x07'/></rng>"
    answer, _ = placed(document(hostdev(0), given_by_user), {source(0): 0})
    assert buses(answer) == [(8, 254, 0, 1)]


@pytest.mark.parametrize("bus", ["0x00", "0x05"])
def test_a_device_with_a_guest_address_keeps_it_and_is_named(bus: str) -> None:
    fixed = f"<address type='pci' domain='0x0000' bus='{bus}' slot='0x09' function='0x0'/>"
    answer, said = placed(document(hostdev(0, fixed), hostdev(1)), {source(0): 0, source(1): 0})
    assert fixed.replace("'", '"').encode() in answer
    assert said == [
        "device ua-d0 (0000:41:00.0) keeps its guest PCI address, so the guest does not see its NUMA node"
    ]
    assert cell_of(answer, 1) == 0


def test_where_another_author_has_made_an_expander_bus_nothing_is_added() -> None:
    theirs = (
        "<controller type='pci' index='1' model='pcie-expander-bus'>"
        "<target busNr='100'><node>0</node></target></controller>"
    )
    plain = document(hostdev(0), controllers=theirs)
    answer, said = placed(plain, {source(0): 0})
    assert answer == rewrite(plain, PLACEMENT)
    assert said == [
        "the guest does not see the NUMA nodes of its devices: its domain has other PCIe expander buses"
    ]


def test_another_machine_type_gets_no_bus() -> None:
    plain = document(hostdev(0)).replace(b'machine="q35"', b'machine="pc-i440fx-7.2"')
    answer, said = placed(plain, {source(0): 0})
    assert answer == rewrite(plain, PLACEMENT)
    assert said == [
        "the guest does not see the NUMA nodes of its devices: only machine type q35 has expander buses"
    ]


def test_a_bus_has_32_slots_and_the_number_of_buses_has_an_end() -> None:
    answer, said = placed(document(*(hostdev(n) for n in range(40))), {source(n): 0 for n in range(40)})
    assert buses(answer) == [(1, 223, 0, 32)]
    assert said == [
        "the guest sees the NUMA node of 32 of the 40 devices in its cell 0: a PCIe bus has no more slots"
    ]
    eight = mirroring(cells=8, vcpus=16, threads=1)
    said.clear()
    nodes = {source(n): NumaId(n % 8) for n in range(256)}
    answer = rewrite(document(*(hostdev(n) for n in range(256))), eight, {}, said.append, nodes)
    assert [cell for _, _, cell, _ in buses(answer)] == list(range(6))
    assert "32 devices in guest cell 6 get no expander bus: none is left" in said


def test_targets_that_kubevirt_before_1_8_drops_between_its_calls_are_written_again() -> None:
    nodes = {source(n): n % 2 for n in range(4)}
    answer, _ = placed(document(*(hostdev(n) for n in range(4))), nodes)
    root = etree.fromstring(answer)
    for target in root.findall("devices/controller/target"):
        target.getparent().remove(target)  # type: ignore[union-attr]
    again, said = placed(etree.tostring(root), nodes)
    assert (buses(again), said) == (buses(answer), [])


def test_a_device_that_came_to_a_domain_with_our_buses_stays_where_it_is() -> None:
    answer, _ = placed(document(hostdev(0)), {source(0): 0})
    later = answer.replace(b"</devices>", hostdev(1).encode() + b"</devices>")
    again, said = placed(later, {source(0): 0, source(1): 0})
    assert buses(again) == buses(answer)
    assert said == [
        "device ua-d1 (0000:41:00.1) is on no expander bus, so the guest does not see its NUMA node"
    ]


@given(st.lists(st.sampled_from([-1, 0, 1]), max_size=40))
def test_every_bus_leaves_room_for_its_ports_and_every_device_is_in_its_cell(wanted: list[int]) -> None:
    nodes = {source(n): node for n, node in enumerate(wanted) if node >= 0}
    answer, said = placed(document(*(hostdev(n) for n in range(len(wanted)))), nodes)
    ends = [256, *(number for _, number, _, _ in buses(answer))]
    counts = [ports for *_, ports in buses(answer)]
    assert all(end - number == 1 + ports for (end, number), ports in zip(pairwise(ends), counts, strict=True))
    if not said:
        assert [cell_of(answer, n) for n in range(len(wanted))] == [
            node if node >= 0 else None for node in wanted
        ]
