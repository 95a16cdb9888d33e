"""Guests that mirror the host, on real QEMU: what they are shown, and where the host runs it."""

import re
from dataclasses import replace

import pytest
from lxml import etree

from harness.libvirt_session.daemon import LibvirtSession, RunningDomain
from harness.libvirt_session.documents import minimal_domain, without_its_pod
from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.guest_cells import GuestCell
from kvplace.core.placement import Placement
from kvplace.core.request import NumaMemory, Policy
from kvplace.core.scalars import Bytes, CpuMask, NumaId
from kvplace.domainxml import rewrite
from tests.kubevirt_documents import DOMAINS
from tests.libvirt_session.guest_memory import policies_of_guest_memory

pytestmark = pytest.mark.libvirt_session

DOCUMENTS = (
    "01-amd64-plain-4vcpu.domain.xml",  # twelve vCPUs may be plugged in later
    "05-amd64-dedicated.domain.xml",
    "11-amd64-iothreads-supplementalpool.domain.xml",
    "13-amd64-hugepages-nonuma.domain.xml",  # one cell of KubeVirt's
    "19-amd64-windows-efi.domain.xml",
)
MIB = Bytes(1 << 20)


def cell(number: int, vcpus: range, count: int, *, megabytes: int, threads: int = 1) -> GuestCell:
    """A guest cell on host node 0, the only one that every machine has."""
    distances = tuple(10 if other == number else 21 for other in range(count))
    return GuestCell(number, NumaId(0), tuple(vcpus), megabytes * MIB, distances, threads)


def placement_on(session: LibvirtSession, *cells: GuestCell, mode: NumaMemory) -> Placement:
    first, second = list(cpus_of(CpuMask(session.group.effective())))[:2]
    vcpus = sum(len(cell.vcpus) for cell in cells)
    return Placement(
        policy=Policy.SHARE,
        vcpus=tuple(second if vcpu < vcpus // 2 else first for vcpu in range(vcpus)),
        cpus=mask_of([first, second]),
        emulator_cpus=mask_of([second]),
        io_thread_cpus=(),
        numa_nodes=(NumaId(0),),
        numa_memory=mode,
        memory={NumaId(0): Bytes(sum(cell.memory for cell in cells))},
        guest_cells=cells,
    )


def cells_of_guest(domain: RunningDomain) -> dict[int, tuple[list[int], int]]:
    """The vCPUs that are there and the MiB of each cell, as QEMU shows them to the guest."""
    import libvirt_qemu

    answer = libvirt_qemu.qemuMonitorCommand(
        domain.handle, "info numa", libvirt_qemu.VIR_DOMAIN_QEMU_MONITOR_COMMAND_HMP
    )
    cpus = {int(number): list(map(int, found.split())) for number, found in _lines("cpus", answer)}
    return {
        int(number): (cpus[int(number)], int(found.split()[0])) for number, found in _lines("size", answer)
    }


def _lines(what: str, answer: str) -> list[tuple[str, str]]:
    return re.findall(rf"^node (\d+) {what}:([^\r\n]*)", answer, re.MULTILINE)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_kubevirts_guests_start_with_cells_on_the_cpus_of_the_placement(
    name: str, libvirt_session: LibvirtSession
) -> None:
    document = (DOMAINS / name).read_bytes()
    cells = (
        cell(0, range(8), 3, megabytes=64),
        cell(1, range(8, 16), 3, megabytes=32),
        cell(2, range(0), 3, megabytes=32),
    )
    placement = placement_on(libvirt_session, *cells, mode=NumaMemory.STRICT)
    answer = rewrite(rewrite(document, placement), placement)
    before = etree.fromstring(answer).findtext("memory")
    with libvirt_session.running(without_its_pod(answer, libvirt_session.folder / "run")) as domain:
        found = domain.affinities()
        seen = cells_of_guest(domain)
        kept = etree.fromstring(domain.handle.XMLDesc()).findtext("memory")
    assert found.vcpus() == {vcpu: mask_of([placement.vcpus[vcpu]]) for vcpu in found.vcpus()}
    assert set(found.emulator().values()) == {placement.emulator_cpus}
    assert {vcpu: number for number, (vcpus, _) in seen.items() for vcpu in vcpus} == {
        vcpu: vcpu // 8 for vcpu in found.vcpus()
    }
    total = int(before or "") // MIB
    assert sum(size for _, size in seen.values()) == total == int(kept or "") // 1024
    assert abs(seen[0][1] - total // 2) <= 1


@pytest.mark.parametrize(("mode", "policy"), [(NumaMemory.STRICT, "bind"), (NumaMemory.PREFERRED, "prefer")])
def test_every_cell_has_memory_of_its_own_bound_to_its_node(
    mode: NumaMemory, policy: str, libvirt_session: LibvirtSession
) -> None:
    cells = (cell(0, range(2), 2, megabytes=24, threads=2), cell(1, range(2, 4), 2, megabytes=40, threads=2))
    placement = placement_on(libvirt_session, *cells, mode=mode)
    xml = rewrite(minimal_domain(f"cells-{policy}", vcpus=4).encode(), placement)
    with libvirt_session.running(xml) as domain:
        assert cells_of_guest(domain) == {0: ([0, 1], 24), 1: ([2, 3], 40)}
        assert {size: policies_of_guest_memory(domain.pid, size) for size in (24, 40)} == {
            24: {f"{policy}:0"},
            40: {f"{policy}:0"},
        }


def test_cells_start_without_a_binding_where_seccomp_denies_it(
    libvirt_session_without_memory_policy: LibvirtSession,
) -> None:
    session = libvirt_session_without_memory_policy
    cells = (cell(0, range(2), 2, megabytes=32), cell(1, range(2, 4), 2, megabytes=32))
    placement = placement_on(session, *cells, mode=NumaMemory.OFF)
    with session.running(rewrite(minimal_domain("unbound", vcpus=4).encode(), placement)) as domain:
        assert cells_of_guest(domain) == {0: ([0, 1], 32), 1: ([2, 3], 32)}
        assert domain.affinities().vcpus() == {vcpu: mask_of([placement.vcpus[vcpu]]) for vcpu in range(4)}


def test_a_vcpu_that_is_plugged_in_later_joins_its_cell_on_the_cpus_of_the_vm(
    libvirt_session: LibvirtSession,
) -> None:
    import libvirt

    cells = (cell(0, range(2), 2, megabytes=32), cell(1, range(2, 4), 2, megabytes=32))
    placement = placement_on(libvirt_session, *cells, mode=NumaMemory.STRICT)
    yes_or_no = {True: "yes", False: "no"}
    entries = "".join(
        f"<vcpu id='{vcpu}' enabled='{yes_or_no[vcpu < 4]}' hotpluggable='{yes_or_no[vcpu > 0]}'/>"
        for vcpu in range(8)
    )
    document = minimal_domain("growing", vcpus=8, inside=f"<vcpus>{entries}</vcpus>")
    with libvirt_session.running(rewrite(document.encode(), placement)) as domain:
        assert cells_of_guest(domain) == {0: ([0, 1], 32), 1: ([2, 3], 32)}
        domain.handle.setVcpusFlags(8, libvirt.VIR_DOMAIN_AFFECT_LIVE)
        assert {number: sorted(vcpus) for number, (vcpus, _) in cells_of_guest(domain).items()} == {
            0: [0, 1, 4, 5],
            1: [2, 3, 6, 7],
        }
        found = domain.affinities().vcpus()
    assert {vcpu: found[vcpu] for vcpu in range(4, 8)} == dict.fromkeys(range(4, 8), placement.cpus)


def test_libvirt_would_have_changed_the_guests_memory_if_cells_were_cut_finer_than_they_are(
    libvirt_session: LibvirtSession,
) -> None:
    """Why cells are whole MiB: this is what happens when they are not."""
    cells = (cell(0, range(2), 2, megabytes=32), cell(1, range(2, 4), 2, megabytes=32))
    odd = (replace(cells[0], memory=32 * MIB + 1024), replace(cells[1], memory=32 * MIB - 1024))
    for shares, total in ((cells, 64), (odd, 65)):
        placement = placement_on(libvirt_session, *shares, mode=NumaMemory.STRICT)
        with libvirt_session.running(rewrite(minimal_domain("odd", vcpus=4).encode(), placement)) as domain:
            assert sum(size for _, size in cells_of_guest(domain).values()) == total
