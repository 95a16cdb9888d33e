"""The bench itself: a domain runs as it would in a virt-launcher pod, and nothing outlives the daemon."""

import os
from pathlib import Path

import pytest

from harness.libvirt_session.daemon import UID, LibvirtSession, NoLibvirtHere, session_daemon
from harness.libvirt_session.documents import minimal_domain
from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.scalars import CpuMask

pytestmark = pytest.mark.libvirt_session


def test_each_thread_runs_where_the_document_pins_it(libvirt_session: LibvirtSession) -> None:
    first, second = list(cpus_of(CpuMask(libvirt_session.group.effective())))[:2]
    pins = f"""
      <iothreads>1</iothreads>
      <cputune>
        <vcpupin vcpu='0' cpuset='{second}'/><vcpupin vcpu='1' cpuset='{first}'/>
        <emulatorpin cpuset='{second}'/><iothreadpin iothread='1' cpuset='{first}'/>
      </cputune>"""
    with libvirt_session.running(minimal_domain("pinned", inside=pins)) as domain:
        found = domain.affinities()
    assert found.vcpus() == {0: mask_of([second]), 1: mask_of([first])}
    assert found.io_threads() == {1: mask_of([first])}
    assert set(found.emulator().values()) == {mask_of([second])}


def test_qemu_has_neither_privileges_nor_another_user_than_the_pods(libvirt_session: LibvirtSession) -> None:
    with libvirt_session.running(minimal_domain("unprivileged")) as domain:
        status = dict(
            line.split(":", 1)
            for line in Path(f"/proc/{domain.pid}/status").read_text().splitlines()
            if ":" in line
        )
        inside = domain.pid in libvirt_session.group.processes()
    assert status["Uid"].split() == [str(UID)] * 4
    assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd")} == {0}
    assert inside


def test_the_session_driver_refuses_the_same_tuning_as_in_a_pod(libvirt_session: LibvirtSession) -> None:
    import libvirt

    shares = minimal_domain("shares", inside="<cputune><shares>512</shares></cputune>")
    with (
        pytest.raises(libvirt.libvirtError, match="CPU tuning is not available in session mode"),
        libvirt_session.running(shares),
    ):
        pass


def test_a_pin_outside_the_pods_cpuset_does_not_start(libvirt_session: LibvirtSession) -> None:
    import libvirt

    first, second = list(cpus_of(CpuMask(libvirt_session.group.effective())))[:2]
    pins = f"<cputune><vcpupin vcpu='0' cpuset='{second}'/></cputune>"
    with (
        libvirt_session.confined_to(mask_of([first])),
        pytest.raises(libvirt.libvirtError, match=r"cannot set CPU affinity on process .* Invalid argument"),
        libvirt_session.running(minimal_domain("outside", inside=pins)),
    ):
        pass


def test_a_pin_that_straddles_the_pods_cpuset_is_cut_without_a_word(libvirt_session: LibvirtSession) -> None:
    first, second = list(cpus_of(CpuMask(libvirt_session.group.effective())))[:2]
    pins = f"<cputune><vcpupin vcpu='0' cpuset='{first},{second}'/></cputune>"
    with (
        libvirt_session.confined_to(mask_of([first])),
        libvirt_session.running(minimal_domain("straddling", inside=pins)) as domain,
    ):
        assert domain.affinities().vcpus()[0] == mask_of([first])


def test_nothing_outlives_the_daemon() -> None:
    pytest.importorskip("libvirt")
    try:
        with session_daemon() as session, session.running(minimal_domain("short-lived")) as domain:
            processes = session.group.processes()
            assert domain.pid in processes
            # The daemon goes while its QEMU runs, as when a pod is killed.
            left_running = session.connection.defineXML(minimal_domain("left-running"))
            left_running.create()
            processes = session.group.processes()
    except NoLibvirtHere as reason:
        pytest.skip(f"no real libvirt: {reason}")
    assert not session.folder.exists()
    assert not session.group.path.exists()
    assert [pid for pid in processes if Path(f"/proc/{pid}").exists()] == []
    owned = [path for path in Path("/proc").glob("[0-9]*") if _owner(path) == UID]
    assert not [path for path in owned if str(session.folder) in _environment(path)]


def _owner(path: Path) -> int | None:
    try:
        return path.stat().st_uid
    except FileNotFoundError:
        return None


def _environment(path: Path) -> str:
    try:
        return (path / "environ").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it was another daemon's, and has just ended
        return ""


def test_the_machine_has_two_cpus_to_report_apart(libvirt_session: LibvirtSession) -> None:
    assert len(os.sched_getaffinity(0)) >= 2
    assert libvirt_session.group.effective().bit_count() >= 2
