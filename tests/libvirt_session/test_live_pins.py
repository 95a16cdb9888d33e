"""Pins of a running VM, set through the libvirt of its pod, whatever that libvirt does."""

from __future__ import annotations

import os
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from harness.libvirt_session.daemon import LibvirtSession, NoLibvirtHere, session_daemon
from harness.libvirt_session.documents import minimal_domain
from kvplace.agent.libvirt_pins import LibvirtFailed, LibvirtPins
from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.scalars import CpuId, CpuMask
from kvplace.libvirt.domain_pins import DomainPins

pytestmark = pytest.mark.libvirt_session

VM = """
  <iothreads>1</iothreads>
  <cputune><vcpupin vcpu='0' cpuset='0'/><vcpupin vcpu='1' cpuset='0'/><emulatorpin cpuset='0'/></cputune>"""


def socket_below_root(session: LibvirtSession) -> str:
    return session.uri.partition("socket=/")[2]


def two_cpus(session: LibvirtSession) -> tuple[CpuId, CpuId]:
    first, second = list(cpus_of(CpuMask(session.group.effective())))[:2]
    return first, second


@pytest.fixture
def pins(libvirt_session: LibvirtSession) -> LibvirtPins:
    """The agent's way to the session's libvirt."""
    return LibvirtPins(socket=socket_below_root(libvirt_session))


async def test_pins_reach_the_threads_and_the_reports_of_libvirt(
    libvirt_session: LibvirtSession, pins: LibvirtPins
) -> None:
    first, second = two_cpus(libvirt_session)
    wanted = DomainPins(
        vcpus={0: mask_of([second]), 1: mask_of([first, second])},
        emulator=mask_of([second]),
        io_threads={1: mask_of([first])},
    )
    with libvirt_session.running(minimal_domain("live", inside=VM)) as domain:
        assert await pins.pin(domain.pid, wanted) == 4
        seen = domain.affinities()
        told = ET.fromstring(domain.handle.XMLDesc())
        defined = ET.fromstring(domain.handle.XMLDesc(2))  # VIR_DOMAIN_XML_INACTIVE
        assert await pins.pin(domain.pid, wanted) == 1  # libvirt does not report the pin of an I/O thread
    assert seen.vcpus() == {0: mask_of([second]), 1: mask_of([first, second])}
    assert seen.io_threads() == {1: mask_of([first])}
    assert seen.emulator()[f"qemu-system-x86 ({domain.pid})"] == mask_of([second])
    for document in (told, defined):
        assert {(pin.get("vcpu"), pin.get("cpuset")) for pin in document.iterfind("cputune/vcpupin")} == {
            ("0", str(second)),
            ("1", f"{first}-{second}"),
        }
        assert [pin.get("cpuset") for pin in document.iterfind("cputune/emulatorpin")] == [str(second)]
        assert [pin.get("cpuset") for pin in document.iterfind("cputune/iothreadpin")] == [str(first)]


async def test_only_pins_that_differ_are_set(libvirt_session: LibvirtSession, pins: LibvirtPins) -> None:
    first, second = two_cpus(libvirt_session)
    with libvirt_session.running(minimal_domain("differs", inside=VM)) as domain:
        same = DomainPins(vcpus={0: mask_of([first]), 1: mask_of([first])}, emulator=mask_of([first]))
        assert await pins.pin(domain.pid, same) == 0
        other = DomainPins(vcpus={0: mask_of([first]), 1: mask_of([second])}, emulator=mask_of([first]))
        assert await pins.pin(domain.pid, other) == 1


async def test_a_refusal_of_libvirt_is_an_error_with_its_words(
    libvirt_session: LibvirtSession, pins: LibvirtPins
) -> None:
    first, second = two_cpus(libvirt_session)
    with libvirt_session.running(minimal_domain("refused", inside=VM)) as domain:
        with (
            libvirt_session.confined_to(mask_of([first])),
            pytest.raises(LibvirtFailed, match="cannot set CPU affinity"),
        ):
            await pins.pin(domain.pid, DomainPins(vcpus={0: mask_of([second])}))
        with pytest.raises(LibvirtFailed, match="cannot set CPU affinity"):
            await pins.pin(domain.pid, DomainPins(vcpus={0: mask_of([9000])}))
        assert await pins.pin(domain.pid, DomainPins(vcpus={0: mask_of([second])})) == 1


async def test_a_libvirt_that_hangs_holds_no_client_up_and_is_asked_again(
    libvirt_session: LibvirtSession,
) -> None:
    _, second = two_cpus(libvirt_session)
    pins = LibvirtPins(socket=socket_below_root(libvirt_session), answer_within_s=4)
    with libvirt_session.running(minimal_domain("hangs", inside=VM)) as domain:
        with libvirt_session.hanging(), pytest.raises(LibvirtFailed, match=r"did not answer within 4 s"):
            await pins.pin(domain.pid, DomainPins(emulator=mask_of([second])))
        assert await pins.pin(domain.pid, DomainPins(emulator=mask_of([second]))) == 1


async def test_the_socket_of_another_vm_is_noticed(libvirt_session: LibvirtSession) -> None:
    _, second = two_cpus(libvirt_session)
    try:
        with (
            session_daemon() as other,
            other.running(minimal_domain("same-name", inside=VM)) as theirs,
            libvirt_session.running(minimal_domain("same-name", inside=VM)) as domain,
        ):
            pins = LibvirtPins(socket=socket_below_root(other))
            with pytest.raises(LibvirtFailed, match=r"has no domain [-0-9a-f]{36}"):
                await pins.pin(domain.pid, DomainPins(vcpus={0: mask_of([second])}))
            assert second not in set(cpus_of(CpuMask(theirs.affinities().vcpus()[0])))
    except NoLibvirtHere as reason:
        pytest.skip(f"no real libvirt: {reason}")


async def test_a_way_that_leads_out_of_the_container_is_not_taken(
    libvirt_session: LibvirtSession, tmp_path: Path
) -> None:
    socket = "/" + socket_below_root(libvirt_session)
    (tmp_path / "link").symlink_to(socket)
    (tmp_path / "folder").symlink_to(Path(socket).parent)
    (tmp_path / "file").touch()
    wanted = DomainPins(emulator=mask_of([0]))
    with libvirt_session.running(minimal_domain("links", inside=VM)) as domain:
        for path, why in (
            ("link", "is a link to .*, out of its folder"),
            (f"folder/{Path(socket).name}", "cannot be opened"),
            ("file", "is not a socket"),
            ("gone", "cannot be opened: No such file or directory"),
        ):
            pins = LibvirtPins(socket=str(tmp_path / path).lstrip("/"))
            with pytest.raises(LibvirtFailed, match=why):
                await pins.pin(domain.pid, wanted)


async def test_a_process_that_libvirt_did_not_start_is_left_alone(pins: LibvirtPins) -> None:
    with pytest.raises(LibvirtFailed, match="libvirt did not start it"):
        await pins.pin(os.getpid(), DomainPins(emulator=mask_of([0])))


def test_a_vcpu_with_a_pin_outside_the_cpuset_is_plugged_in_by_qemu_and_refused_by_libvirt(
    libvirt_session: LibvirtSession,
) -> None:
    """Error 38: therefore the agent pins also ids that are not plugged in (test_pinning_guard.py)."""
    first, second = two_cpus(libvirt_session)
    pins = "".join(f"<vcpupin vcpu='{vcpu}' cpuset='{second}'/>" for vcpu in (0, 1))
    xml = minimal_domain("outside", vcpus=1, pluggable=1, inside=f"<cputune>{pins}</cputune>")
    with libvirt_session.running(xml) as domain:
        with libvirt_session.confined_to(mask_of([first])), pytest.raises(Exception) as refused:
            domain.handle.setVcpusFlags(2, 1)  # VIR_DOMAIN_AFFECT_LIVE
        assert "cannot set CPU affinity" in str(refused.value)
        assert refused.value.get_error_code() == 38  # type: ignore[attr-defined]
        assert domain.handle.vcpusFlags(1) == 2
        assert set(domain.affinities().vcpus()) == {0, 1}
