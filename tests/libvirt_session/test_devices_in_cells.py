"""Devices of a guest that mirrors the host: libvirt accepts their buses, a booted guest sees their cells."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from lxml import etree

from harness.emulated_machine.kernels import FetchFailed, Kernel, NoMachineHere, fetched
from harness.libvirt_session.daemon import LibvirtSession
from harness.libvirt_session.documents import without_its_pod
from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.placement import Placement
from kvplace.core.request import NumaMemory
from kvplace.core.scalars import CpuMask, NumaId
from kvplace.domainxml import rewrite
from tests.domainxml.host_devices import pci
from tests.domainxml.placements import mirroring
from tests.kubevirt_documents import DOMAINS
from tests.libvirt_session.booted_guest import numa_nodes_in_guest

pytestmark = pytest.mark.libvirt_session

SMALL = b">268435456<"
INACTIVE = 2
"""libvirt.VIR_DOMAIN_XML_INACTIVE"""


def placement_on(session: LibvirtSession) -> Placement:
    """Two cells of two vCPUs, without a memory binding: this machine has one NUMA node."""
    cpus = mask_of(list(cpus_of(CpuMask(session.group.effective())))[:2])
    made = mirroring(cells=2, vcpus=4, threads=1)
    first, second = cpus_of(cpus)
    return replace(
        made,
        vcpus=(first, first, second, second),
        cpus=cpus,
        emulator_cpus=cpus,
        io_thread_cpus=(),
        numa_memory=NumaMemory.OFF,
    )


def devices_on(node: int, count: int) -> dict[str, int]:
    """Name devices on one NUMA node of the host."""
    return {f"0000:{0x40 + node:02x}:{number // 8:02x}.{number % 8}": node for number in range(count)}


def document_with(devices: dict[str, int]) -> bytes:
    """Put the devices into a domain that KubeVirt's converter made."""
    written = "".join(pci(address, f"ua-hostdevice-d{n}") for n, address in enumerate(devices))
    document = (DOMAINS / "09-amd64-iothreads-shared.domain.xml").read_bytes()
    return document.replace(b">4294967296<", SMALL).replace(b"</devices>", written.encode() + b"</devices>")


def without_network(document: bytes) -> bytes:
    root = etree.fromstring(document)
    for element in root.findall("devices/interface"):
        element.getparent().remove(element)  # type: ignore[union-attr]
    return etree.tostring(root)


def controllers(xml: bytes | str) -> list[bytes]:
    return sorted(
        b"".join(etree.tostring(each).split())
        for each in etree.fromstring(xml).iterfind("devices/controller[@type='pci']")
    )


def defined_three_times(session: LibvirtSession, devices: dict[str, int], placement: Placement) -> bytes:
    """Define a domain as virt-launcher does: from the second time on with the addresses of libvirt."""
    nodes = {address: NumaId(node) for address, node in devices.items() if node >= 0}
    warnings: list[str] = []
    document = without_network(without_its_pod(document_with(devices), session.folder / "run"))
    seen = []
    for _ in range(3):
        document = rewrite(document, placement, {}, warnings.append, nodes)
        domain = session.connection.defineXML(document.decode())
        document = domain.XMLDesc(INACTIVE).encode()
        domain.undefine()
        seen.append(controllers(document))
    assert seen[0] == seen[1] == seen[2]
    assert [sentence for sentence in warnings if "plugged in" not in sentence] == []
    return document


def test_libvirt_accepts_the_buses_and_keeps_them_over_three_calls(libvirt_session: LibvirtSession) -> None:
    devices = devices_on(1, 16) | devices_on(0, 2) | devices_on(-1, 1)
    root = etree.fromstring(defined_three_times(libvirt_session, devices, placement_on(libvirt_session)))
    buses = root.findall("devices/controller[@model='pcie-expander-bus']")
    assert [bus.findtext("target/node") for bus in buses] == ["0", "1"]
    indexes = [int(each.get("index", "")) for each in root.iterfind("devices/controller[@type='pci']")]
    assert sorted(indexes) == list(range(len(indexes)))


def test_a_booted_guest_reads_the_cell_of_every_device(libvirt_session: LibvirtSession) -> None:
    try:
        fetched(Kernel.V6_1)
    except (NoMachineHere, FetchFailed) as reason:
        pytest.skip(f"no kernel to boot: {reason}")
    devices = devices_on(1, 16) | devices_on(0, 2) | devices_on(-1, 1)
    document = defined_three_times(libvirt_session, devices, placement_on(libvirt_session))
    assert numa_nodes_in_guest(libvirt_session, document) == Counter({1: 16, 0: 2, -1: 1})
