"""The agent's reading of a real QEMU, compared with an independent one."""

from __future__ import annotations

import pytest

from harness.libvirt_session.daemon import LibvirtSession
from harness.libvirt_session.documents import minimal_domain
from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.scalars import CpuMask
from kvplace.linux.threads import QemuProcess, ThreadRole, Tid, affinity_of, find_qemu, set_affinity

pytestmark = pytest.mark.libvirt_session
MOST = 1000


def found_in(session: LibvirtSession) -> QemuProcess:
    qemu = find_qemu(session.group.processes(), most_threads=MOST)
    assert qemu is not None
    return qemu


def test_every_thread_of_a_vm_is_found_and_classified(libvirt_session: LibvirtSession) -> None:
    first, second = list(cpus_of(CpuMask(libvirt_session.group.effective())))[:2]
    pins = f"""
      <iothreads>2</iothreads>
      <cputune><vcpupin vcpu='0' cpuset='{second}'/><iothreadpin iothread='2' cpuset='{first}'/></cputune>"""
    with libvirt_session.running(minimal_domain("read", vcpus=2, inside=pins)) as domain:
        seen = domain.affinities()
        with found_in(libvirt_session) as qemu:
            names = qemu.threads(MOST)
            cpus = {tid: affinity_of(tid) for tid in names}
            assert qemu.pid == domain.pid
    assert cpus == {thread.tid: thread.cpus for thread in seen.threads}
    by_role: dict[ThreadRole, set[int]] = {}
    for name in names.values():
        by_role.setdefault(name.role, set()).add(name.number)
    assert by_role == {ThreadRole.VCPU: {0, 1}, ThreadRole.IO_THREAD: {1, 2}, ThreadRole.EMULATOR: {0}}


def test_a_thread_that_is_moved_is_seen_moved_and_the_others_are_not(libvirt_session: LibvirtSession) -> None:
    first, second = list(cpus_of(CpuMask(libvirt_session.group.effective())))[:2]
    pins = f"<cputune><vcpupin vcpu='0' cpuset='{first}'/><vcpupin vcpu='1' cpuset='{first}'/></cputune>"
    with (
        libvirt_session.running(minimal_domain("moved", vcpus=2, inside=pins)) as domain,
        found_in(libvirt_session) as qemu,
    ):
        (vcpu,) = [tid for tid, name in qemu.threads(MOST).items() if str(name) == "vCPU 1"]
        set_affinity(vcpu, mask_of([second]))
        assert domain.affinities().vcpus() == {0: mask_of([first]), 1: mask_of([second])}


def test_a_vm_that_ends_is_gone(libvirt_session: LibvirtSession) -> None:
    with libvirt_session.running(minimal_domain("ends")):
        qemu = found_in(libvirt_session)
        count = qemu.thread_count()
    with qemu:
        assert qemu.thread_count() != count
        assert not qemu.has(Tid(qemu.pid))
    assert find_qemu(libvirt_session.group.processes(), most_threads=MOST) is None
