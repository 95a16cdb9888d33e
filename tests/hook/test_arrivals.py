"""A domain that migrates to the pod: what libvirt's program for it prints, with a real hook behind it."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from harness.waiting import PATIENCE_S
from kvplace.core.errors import Corrupt
from kvplace.core.guest_cells import GuestCell
from kvplace.core.placement import Placement
from kvplace.core.protobuf import MAX_MESSAGE_BYTES
from kvplace.core.request import OnFailure, Policy
from kvplace.core.scalars import NO_CPUS, Bytes, CpuId, CpuMask, NumaId
from kvplace.domainxml import rewrite, unpin
from kvplace.hook.define_domain import define_arrival
from kvplace.hook.process import PodEnvironment
from tests.hook.conftest import HookProcess
from tests.hook.grpc_client import CALLBACKS, SocketCaller
from tests.hook.machine import ON_THIS_MACHINE, PodFolder, broken

ARRIVING = b"""\
<domain type='kvm'>
  <name>ns_vm</name>
  <vcpu placement='static'>2</vcpu>
  <cputune>
    <shares>2048</shares>
    <vcpupin vcpu='0' cpuset='900'/>
    <vcpupin vcpu='1' cpuset='901'/>
    <emulatorpin cpuset='902'/>
  </cputune>
  <numatune>
    <memory mode='strict' nodeset='7'/>
  </numatune>
  <cpu><numa><cell id='0' cpus='0-1' memory='1' unit='GiB'/></numa></cpu>
</domain>
"""
"""As libvirt writes the domain of a machine with many more CPUs."""


class Libvirt:
    """The way libvirt runs the programs in its folder."""

    def __init__(self, hook: HookProcess) -> None:
        self.program = hook.root / "libvirt/kvplace"

    def runs(self, *words: str, xml: bytes = ARRIVING) -> tuple[int, bytes, str]:
        done = subprocess.run(
            [self.program, "ns_vm", *words], input=xml, capture_output=True, timeout=PATIENCE_S, check=False
        )
        return done.returncode, done.stdout, done.stderr.decode()


@pytest.fixture
def libvirt(hook: HookProcess) -> Libvirt:
    """A hook that serves, with the folder of libvirt mounted."""
    (hook.root / "libvirt").mkdir()
    hook.environ["KVPLACE_LIBVIRT_HOOK_FOLDER"] = str(hook.root / "libvirt")
    hook.pod.bind(ON_THIS_MACHINE)
    hook.start()
    return Libvirt(hook)


BEGIN = ("migrate", "begin", "-")


def test_an_arriving_domain_gets_the_cpus_of_this_pod(hook: HookProcess, libvirt: Libvirt) -> None:
    assert libvirt.runs(*BEGIN) == (0, rewrite(ARRIVING, ON_THIS_MACHINE).rstrip() + b"\n", "")
    assert "pinned all vCPUs within CPUs" in hook.next_log_line()


def test_the_cells_that_the_guest_sees_stay_whatever_this_pods_placement_states(
    hook: HookProcess, libvirt: Libvirt
) -> None:
    cell = GuestCell(0, node=NumaId(0), vcpus=(0,), memory=Bytes(1 << 29), distances=(10,), threads=1)
    mirrors = replace(ON_THIS_MACHINE, policy=Policy.SHARE, guest_cells=(cell,))
    mirrors = replace(mirrors, vcpus=(CpuId(0),), cpus=CpuMask(mirrors.cpus | 1), numa_nodes=(NumaId(0),))
    hook.pod.bind(mirrors)
    xml = ARRIVING.replace(b">2</vcpu>", b">1</vcpu>").replace(b"cpus='0-1'", b"cpus='0'")
    code, answer, _ = libvirt.runs(*BEGIN, xml=xml)
    assert code == 0
    assert b"<cell id='0' cpus='0' memory='1' unit='GiB'/>" in answer.replace(b'"', b"'")
    assert b"900" not in answer


@pytest.mark.parametrize(
    "words", [("prepare", "begin", "-"), ("start", "begin", "-"), ("release", "end", "migrated"), ()]
)
def test_nothing_else_that_happens_to_a_domain_is_answered(libvirt: Libvirt, words: tuple[str, ...]) -> None:
    assert libvirt.runs(*words) == (0, b"", "")


def test_a_vm_that_floats_here_loses_the_pins_that_it_comes_with(hook: HookProcess, libvirt: Libvirt) -> None:
    hook.pod.bind(Placement(Policy.NONE, (), NO_CPUS), on_failure=OnFailure.FLOAT)
    assert libvirt.runs(*BEGIN) == (0, unpin(ARRIVING).rstrip() + b"\n", "")


def test_a_vm_that_cannot_be_pinned_here_stays_where_it_is_and_libvirt_learns_why(
    hook: HookProcess, libvirt: Libvirt
) -> None:
    hook.pod.bind(replace(ON_THIS_MACHINE, cpus=ON_THIS_MACHINE.cpus | 1 << 999))
    code, answer, said = libvirt.runs(*BEGIN)
    assert (code, answer) == (1, b"")
    assert said.startswith("kvplace: CPU 999 of the placement is not online on worker-1")
    assert "the VM stays where it is" in hook.next_log_line()


def test_a_vm_that_may_float_arrives_unpinned_where_it_cannot_be_pinned(
    hook: HookProcess, libvirt: Libvirt
) -> None:
    hook.pod.ask_for(OnFailure.FLOAT)
    hook.pod.bind(replace(ON_THIS_MACHINE, cpus=ON_THIS_MACHINE.cpus | 1 << 999), on_failure=OnFailure.FLOAT)
    assert libvirt.runs(*BEGIN) == (0, unpin(ARRIVING).rstrip() + b"\n", "")


@pytest.mark.parametrize("xml", [b"", b"<domain>", b"\xff\xfe", b"<domain/>" * 3])
def test_a_document_that_is_not_a_domain_is_refused_in_one_sentence(libvirt: Libvirt, xml: bytes) -> None:
    code, answer, said = libvirt.runs(*BEGIN, xml=xml)
    assert (code, answer) == (1, b"")
    assert len(said.splitlines()) == 1


def test_a_document_larger_than_any_domain_is_refused(libvirt: Libvirt) -> None:
    code, answer, said = libvirt.runs(*BEGIN, xml=b"<domain>" + b" " * (MAX_MESSAGE_BYTES + 1))
    assert f"has more than {MAX_MESSAGE_BYTES} bytes" in said
    assert (code, answer) == (1, b"")


def test_without_the_sidecar_the_domain_is_left_as_it_comes(hook: HookProcess, libvirt: Libvirt) -> None:
    assert hook.process is not None
    hook.process.kill()
    hook.wait()
    code, answer, said = libvirt.runs(*BEGIN)
    assert (code, answer) == (0, b"")
    assert "the hook sidecar does not answer; the VM keeps the CPU numbers of its source" in said


def test_an_arrival_that_never_ends_is_given_up_and_the_hook_goes_on(
    hook: HookProcess, libvirt: Libvirt
) -> None:
    (hook.pod.path / "placement").unlink()
    os.mkfifo(hook.pod.path / "placement")
    assert libvirt.runs(*BEGIN)[:2] == (0, b"")
    assert "keeps the pins of its source: pinning took longer than 8 seconds" in hook.next_log_line()
    (hook.pod.path / "placement").unlink()
    hook.pod.bind(ON_THIS_MACHINE)
    assert libvirt.runs(*BEGIN)[0] == 0


def test_when_libvirts_program_disconnects_the_log_reports_it_and_blames_no_limit(
    hook: HookProcess, libvirt: Libvirt
) -> None:
    libvirt.program.with_name("kvplace.domain").write_bytes(ARRIVING[:100])
    assert "the VM stays where it is: the domain XML is not well-formed" in hook.next_log_line()
    assert "does not send the domain or read the answer (No such device" in hook.next_log_line()
    assert libvirt.runs(*BEGIN)[0] == 0


def test_an_unexpected_exception_keeps_the_vm_where_it_is_or_lets_it_arrive_unpinned(
    env: PodEnvironment, pod: PodFolder
) -> None:
    pod.bind()
    with pytest.raises(Corrupt, match="please report it"):
        define_arrival(ARRIVING, env, broken)
    pod.ask_for(OnFailure.FLOAT)
    assert define_arrival(ARRIVING, env, broken) == unpin(ARRIVING)


def test_the_hook_ends_although_an_arrival_is_under_way(hook: HookProcess, libvirt: Libvirt) -> None:
    (hook.pod.path / "placement").unlink()
    os.mkfifo(hook.pod.path / "placement")
    assert hook.process is not None
    children = Path(f"/proc/{hook.process.pid}/task/{hook.process.pid}/children")
    with subprocess.Popen([libvirt.program, "ns_vm", *BEGIN], stdin=subprocess.PIPE) as arriving:
        assert arriving.stdin is not None
        arriving.stdin.write(ARRIVING)
        arriving.stdin.close()
        while not children.read_text():
            assert arriving.poll() is None
        hook.process.send_signal(signal.SIGTERM)
        assert hook.wait() == 0


def test_shutdown_ends_the_hook_that_listens_for_arrivals_too(hook: HookProcess, libvirt: Libvirt) -> None:
    assert libvirt.program.exists()
    with SocketCaller(hook.socket) as caller:
        caller.ask(CALLBACKS + "Shutdown")
    assert hook.wait() == 0


def test_a_restarted_hook_takes_over_the_folder(hook: HookProcess, libvirt: Libvirt) -> None:
    assert hook.process is not None
    hook.process.kill()
    hook.wait()
    assert hook.process.stderr is not None
    hook.process.stderr.close()
    hook.start()
    assert libvirt.runs(*BEGIN)[0] == 0
    assert sorted(path.name for path in libvirt.program.parent.iterdir()) == [
        "kvplace",
        "kvplace.answer",
        "kvplace.domain",
    ]


def test_a_folder_that_cannot_be_used_is_reported_at_the_start(hook: HookProcess) -> None:
    folder = hook.root / "libvirt"
    (folder / "kvplace.domain").mkdir(parents=True)
    hook.environ["KVPLACE_LIBVIRT_HOOK_FOLDER"] = str(folder)
    failed = hook.run("serve")
    assert failed.returncode == 1
    assert f"cannot use {folder} for libvirt's hooks" in failed.stderr


def test_where_no_program_may_run_none_is_put_since_libvirt_would_start_no_vm_then(hook: HookProcess) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    folder = hook.root / "libvirt"
    folder.mkdir()
    hook.environ["KVPLACE_LIBVIRT_HOOK_FOLDER"] = str(folder)
    mount = 'mount -t tmpfs -o noexec none "$0" && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", mount, str(folder), *hook.program, "serve"]
    hook.process = subprocess.Popen(command, env=hook.environ, stderr=subprocess.PIPE, text=True)
    assert f"{folder} is mounted noexec; a VM that migrates here keeps" in hook.next_log_line()
    assert "serving on" in hook.next_log_line()
    assert list(Path(f"/proc/{hook.process.pid}/root{folder}").iterdir()) == []
