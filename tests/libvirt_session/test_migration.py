"""A VM migrates between two libvirts: its pins are the target's before its QEMU runs there.

What KubeVirt does: the source's own document is sent, with the source's CPU numbers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from harness.libvirt_session.daemon import PROJECT, UID, LibvirtSession, NoLibvirtHere, session_daemon
from harness.libvirt_session.documents import minimal_domain
from harness.libvirt_session.threads import Affinities
from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import OnFailure, Policy
from kvplace.core.scalars import CpuId, CpuMask, NodeName, PodUid
from tests.libvirt_session.migrating import migrate

libvirt = pytest.importorskip("libvirt", reason="libvirt-python is not installed")
pytestmark = pytest.mark.libvirt_session

POD = PodUid("77a6a1a2-5d0c-4d2c-8a57-0c53a1f7d001")
NODE = NodeName("target")


@pytest.fixture(scope="module")
def target() -> Iterator[LibvirtSession]:
    try:
        with session_daemon() as session:
            yield session
    except NoLibvirtHere as reason:
        pytest.skip(f"no real libvirt: {reason}")


@contextmanager
def sidecar(session: LibvirtSession, placement: Placement) -> Iterator[None]:
    """The target pod's hook sidecar, with its placement."""
    folder = session.folder / "sidecar"
    (folder / "pod").mkdir(parents=True)
    (folder / "hooks").mkdir()
    (folder / "pod" / "uid").write_text(POD)
    bound = PodPlacement(POD, NODE, "", OnFailure.WAIT, placement)
    (folder / "pod" / "placement").write_text(bound.to_json())
    for path in (folder, *folder.rglob("*")):
        os.chown(path, UID, UID)
    environment = {
        "KVPLACE_POD_FOLDER": str(folder / "pod"),
        "KVPLACE_HOOK_FOLDER": str(folder / "hooks"),
        "KVPLACE_LIBVIRT_HOOK_FOLDER": str(session.hooks),
        "NODE_NAME": NODE,
        "LC_ALL": "C.UTF-8",
    }
    command = [sys.executable, "-m", "harness.libvirt_session.sidecar_in_pod", session.pod.to_json()]
    with subprocess.Popen(command, cwd=PROJECT, env=environment, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        try:
            line = process.stderr.readline()
            assert b"serving on" in line, line + process.stderr.read()
            yield
        finally:
            process.terminate()
            process.stderr.read()
            shutil.rmtree(folder)
            for left in session.hooks.iterdir():
                left.unlink()


def pinned_domain(name: str, vcpus: list[CpuId], emulator: CpuId) -> str:
    pins = "".join(f"<vcpupin vcpu='{vcpu}' cpuset='{cpu}'/>" for vcpu, cpu in enumerate(vcpus))
    inside = f"<iothreads>1</iothreads><cputune>{pins}<emulatorpin cpuset='{emulator}'/></cputune>"
    return minimal_domain(name, vcpus=len(vcpus), inside=inside)


@contextmanager
def arrived(name: str, target: LibvirtSession) -> Iterator[tuple[Affinities, ET.Element]]:
    """The threads of a domain on the target, and what its libvirt believes."""
    handle = target.connection.lookupByName(name)
    try:
        pid = int((target.folder / "run" / "libvirt" / "qemu" / "run" / f"{name}.pid").read_text())
        yield Affinities.of_process(pid), ET.fromstring(handle.XMLDesc())
    finally:
        handle.destroy()


def two_cpus(session: LibvirtSession) -> tuple[CpuId, CpuId]:
    first, second = list(cpus_of(CpuMask(session.group.effective())))[:2]
    return first, second


def crossed_over(session: LibvirtSession) -> Placement:
    """The CPUs of the source's vCPUs the other way round."""
    first, second = two_cpus(session)
    return Placement(
        policy=Policy.EXCLUSIVE,
        vcpus=(second, first),
        cpus=mask_of([first, second]),
        emulator_cpus=mask_of([second]),
        io_thread_cpus=(mask_of([first]),),
    )


def test_every_thread_is_on_the_cpus_of_the_target_and_its_libvirt_reports_it(
    libvirt_session: LibvirtSession, target: LibvirtSession
) -> None:
    first, second = two_cpus(target)
    placement = crossed_over(target)
    with (
        sidecar(target, placement),
        libvirt_session.running(pinned_domain("moves", [first, second], first)) as running,
    ):
        migrate(running.handle, target)
        with arrived("moves", target) as (threads, document):
            assert threads.vcpus() == {0: mask_of([second]), 1: mask_of([first])}
            assert threads.io_threads() == {1: mask_of([first])}
            # The helper threads of QEMU, too, which a later pin of the emulator would not move.
            assert set(threads.emulator().values()) == {mask_of([second])}
            pins = {pin.get("vcpu"): pin.get("cpuset") for pin in document.iterfind("cputune/vcpupin")}
            assert pins == {"0": str(second), "1": str(first)}
            emulator = document.find("cputune/emulatorpin")
            assert emulator is not None
            assert emulator.get("cpuset") == str(second)


def test_a_source_whose_cpus_the_target_does_not_have_migrates(
    libvirt_session: LibvirtSession, target: LibvirtSession
) -> None:
    first, second = two_cpus(target)
    alone = Placement(Policy.EXCLUSIVE, (second,), mask_of([second]), emulator_cpus=mask_of([second]))
    source = pinned_domain("elsewhere", [first], first)
    with target.confined_to(mask_of([second])), libvirt_session.running(source) as running:
        # This is what happens without the sidecar, and why it is there.
        with pytest.raises(libvirt.libvirtError, match=r"CPU affinity on process .* Invalid argument"):
            migrate(running.handle, target)
        with sidecar(target, alone):
            migrate(running.handle, target)
            with arrived("elsewhere", target) as (threads, _):
                assert {thread.cpus for thread in threads.threads} == {mask_of([second])}


def test_a_vm_that_cannot_be_pinned_on_the_target_goes_on_at_its_source_and_the_reason_is_reported(
    libvirt_session: LibvirtSession, target: LibvirtSession
) -> None:
    first, _ = two_cpus(target)
    absent = CpuId(4000)
    placement = Placement(Policy.EXCLUSIVE, (absent,), mask_of([absent]))
    with (
        sidecar(target, placement),
        libvirt_session.running(pinned_domain("stays", [first], first)) as running,
    ):
        with pytest.raises(libvirt.libvirtError, match="CPU 4000 of the placement is not online on target"):
            migrate(running.handle, target)
        assert running.affinities().vcpus() == {0: mask_of([first])}


def test_a_domain_without_a_sidecar_at_its_target_arrives_as_it_is(
    libvirt_session: LibvirtSession, target: LibvirtSession
) -> None:
    first, second = two_cpus(target)
    assert not list(Path(target.hooks).iterdir())
    with libvirt_session.running(pinned_domain("plain", [second, first], first)) as running:
        migrate(running.handle, target)
        with arrived("plain", target) as (threads, _):
            assert threads.vcpus() == {0: mask_of([second]), 1: mask_of([first])}
