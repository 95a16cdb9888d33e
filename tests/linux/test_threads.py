"""QEMU's threads are found in a folder written like /proc; affinities are read and set by system call."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvplace.core.cpuset import bits_of, mask_of
from kvplace.core.scalars import CpuMask
from kvplace.linux import kernel_files, threads
from kvplace.linux.kernel_files import Gone, KernelError
from kvplace.linux.threads import (
    OutsideCpuset,
    QemuProcess,
    ThreadRole,
    Tid,
    affinity_of,
    classify,
    find_qemu,
    set_affinity,
    set_own_threads,
)

MOST = 1000
THREADS = {100: "qemu-kvm", 101: "call_rcu", 102: "IO mon_iothread", 103: "CPU 0/KVM", 104: "IO iothread1"}


def write_process(proc: Path, pid: int, threads: dict[int, str]) -> None:
    for tid, name in threads.items():
        folder = proc / str(pid) / "task" / str(tid)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "comm").write_text(f"{name}\n")
    (proc / str(pid) / "comm").write_text(f"{threads[pid]}\n")


@pytest.mark.parametrize(
    ("name", "role", "number"),
    [
        ("CPU 0/KVM", ThreadRole.VCPU, 0),
        ("CPU 127/TCG", ThreadRole.VCPU, 127),
        ("IO iothread12", ThreadRole.IO_THREAD, 12),
        ("IO mon_iothread", ThreadRole.EMULATOR, 0),
        ("call_rcu", ThreadRole.EMULATOR, 0),
        ("qemu-system-x86", ThreadRole.EMULATOR, 0),
        ("vnc_worker", ThreadRole.EMULATOR, 0),
        ("vhost-100", ThreadRole.VHOST, 0),
        ("kvm-nx-lpage-re", ThreadRole.VHOST, 0),
        ("live_migration", ThreadRole.MIGRATION, 0),
        ("multifdsend_7", ThreadRole.MIGRATION, 0),
        ("multifdrecv_0", ThreadRole.MIGRATION, 0),
        ("mig/src/main", ThreadRole.MIGRATION, 0),
        ("mig/dst/recv_3", ThreadRole.MIGRATION, 0),
        ("CPU hotplug", ThreadRole.EMULATOR, 0),
        ("IO iothread", ThreadRole.EMULATOR, 0),
    ],
)
def test_threads_are_distinguished_by_their_names(name: str, role: ThreadRole, number: int) -> None:
    found = classify(name)
    assert (found.role, found.number) == (role, number)


def test_qemu_is_the_process_of_that_name_that_has_a_vcpu(tmp_path: Path) -> None:
    write_process(tmp_path, 1, {1: "virt-launcher"})
    write_process(tmp_path, 50, {50: "qemu-kvm", 51: "call_rcu"})  # libvirt asks it what it can do
    write_process(tmp_path, 100, THREADS)
    qemu = find_qemu((1, 7, 50, 100), tmp_path, most_threads=MOST)
    assert qemu is not None
    with qemu:
        assert qemu.pid == 100
        assert {tid: name.name for tid, name in qemu.threads(MOST).items()} == THREADS
    assert find_qemu((1, 50), tmp_path, most_threads=MOST) is None
    assert find_qemu((), tmp_path, most_threads=MOST) is None


def test_the_kernels_workers_of_this_qemu_count_and_those_of_another_do_not(tmp_path: Path) -> None:
    write_process(tmp_path, 100, THREADS)
    write_process(tmp_path, 200, {200: "vhost-100"})
    write_process(tmp_path, 201, {201: "vhost-999"})
    write_process(tmp_path, 202, {202: "kvm-nx-lpage-re"})
    qemu = find_qemu((100, 200, 201, 202), tmp_path, most_threads=MOST)
    assert qemu is not None
    with qemu:
        assert {Tid(200), Tid(202)} == {
            tid for tid, name in qemu.threads(MOST).items() if name.role is ThreadRole.VHOST
        }
        assert qemu.has(Tid(200))
        shutil.rmtree(tmp_path / "200")
        write_process(tmp_path, 200, {200: "sh"})  # the id is reused
        assert Tid(200) not in qemu.threads(MOST)
        assert not qemu.has(Tid(200))


def test_a_reused_process_id_is_not_taken_for_the_vm(tmp_path: Path) -> None:
    write_process(tmp_path, 100, THREADS)
    with QemuProcess.open(100, tmp_path) as qemu:
        count = qemu.thread_count()
        shutil.rmtree(tmp_path / "100")
        write_process(tmp_path, 100, {100: "qemu-kvm", 103: "CPU 0/KVM"})
        assert qemu.thread_count() != count
        assert not qemu.has(Tid(103))
        with pytest.raises(Gone):
            qemu.threads(MOST)


def test_threads_that_come_and_go_are_noticed_by_their_number(tmp_path: Path) -> None:
    write_process(tmp_path, 100, THREADS)
    with QemuProcess.open(100, tmp_path) as qemu:
        before = qemu.thread_count()
        write_process(tmp_path, 100, THREADS | {105: "worker"})
        assert qemu.thread_count() == before + 1
        assert qemu.threads(MOST)[Tid(105)].name == "worker"
        shutil.rmtree(tmp_path / "100/task/105")
        assert qemu.thread_count() == before
        assert Tid(105) not in qemu.threads(MOST)


def test_a_thread_that_gets_its_name_late_is_read_a_second_time(tmp_path: Path) -> None:
    write_process(tmp_path, 100, THREADS | {106: "qemu-kvm"})
    with QemuProcess.open(100, tmp_path) as qemu:
        assert str(qemu.threads(MOST)[Tid(106)]) == "emulator thread 'qemu-kvm'"
        new_after_each_look = [qemu.has_new_threads]
        write_process(tmp_path, 100, THREADS | {106: "CPU 1/KVM"})
        assert str(qemu.threads(MOST)[Tid(106)]) == "vCPU 1"
        new_after_each_look.append(qemu.has_new_threads)
        assert new_after_each_look == [True, False]
        write_process(tmp_path, 100, THREADS | {106: "CPU 2/KVM"})
        assert qemu.threads(MOST)[Tid(106)].number == 1
        assert qemu.threads(MOST, anew=True)[Tid(106)].number == 2


def test_a_thread_that_ends_while_the_folder_is_read_is_left_out(tmp_path: Path) -> None:
    write_process(tmp_path, 100, THREADS)
    (tmp_path / "100/task/104/comm").unlink()
    with QemuProcess.open(100, tmp_path) as qemu:
        assert set(qemu.threads(MOST)) == {100, 101, 102, 103}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_process_that_may_not_be_read_is_not_taken_for_one_that_is_gone(tmp_path: Path) -> None:
    write_process(tmp_path, 100, THREADS)
    (tmp_path / "100/task").chmod(0)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == "root" and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o111)
    program = f"""
import os
from pathlib import Path
from kvplace.linux.kernel_files import NotPermitted
from kvplace.linux.threads import find_qemu
os.setuid(65534)
try:
    find_qemu((100,), Path({str(tmp_path)!r}), most_threads=1000)
except NotPermitted as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "100/task may not be read" in result.stdout
    with pytest.raises(Gone):
        QemuProcess.open(101, tmp_path)


def test_a_real_process_is_counted_and_ends() -> None:
    pid = os.posix_spawn("/bin/sleep", ["sleep", "60"], os.environ)
    with QemuProcess.open(pid) as qemu:
        count = qemu.thread_count()
        assert list(qemu.threads(MOST)) == [pid]
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        assert qemu.thread_count() != count
        assert not qemu.has(Tid(pid))
        with pytest.raises(Gone):
            qemu.threads(MOST)


def test_a_process_with_too_many_threads_is_not_listed_and_its_threads_are_not_read(tmp_path: Path) -> None:
    write_process(
        tmp_path, 100, {100: "qemu-kvm", 101: "CPU 0/KVM", **dict.fromkeys(range(200, 298), "worker")}
    )
    for tid in range(200, 298):
        (tmp_path / "100" / "task" / str(tid) / "comm").unlink()  # reading one fails
    with (
        QemuProcess.open(100, tmp_path) as qemu,
        pytest.raises(KernelError, match="process 100 has 100 threads, more than the 99 that are checked"),
    ):
        qemu.threads(99)


def test_processes_named_like_qemu_share_one_limit_of_threads(tmp_path: Path) -> None:
    for pid in (100, 200, 300):
        write_process(tmp_path, pid, {pid + tid: "qemu-kvm" for tid in range(40)})
    assert find_qemu((100, 200, 300), tmp_path, most_threads=120) is None
    with pytest.raises(KernelError, match="process 300 has 40 threads, more than the 20 that are checked"):
        find_qemu((100, 200, 300), tmp_path, most_threads=100)


MINE = mask_of(os.sched_getaffinity(0))
NO_SUCH_CPU = mask_of([8000])


@pytest.fixture
def sleeper() -> Iterator[Tid]:
    """A process that does nothing."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield Tid(process.pid)
        process.kill()


def test_an_affinity_that_is_set_is_read_back_and_equals_proc(sleeper: Tid) -> None:
    for cpu in bits_of(MINE):
        set_affinity(sleeper, mask_of([cpu]))
        assert affinity_of(sleeper) == mask_of([cpu])
        assert kernel_files.allowed_cpus_of(Path(f"/proc/{sleeper}")) == mask_of([cpu])


def test_one_thread_is_set_and_the_others_stay() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert thread.native_id is not None
        first = mask_of(list(bits_of(MINE))[:1])
        set_affinity(Tid(thread.native_id), first)
        assert affinity_of(Tid(thread.native_id)) == first
        assert affinity_of(Tid(os.getpid())) == MINE
    finally:
        stop.set()
        thread.join()


def test_cpus_that_do_not_exist_are_left_out_and_refused_where_there_is_no_other(sleeper: Tid) -> None:
    first = mask_of(list(bits_of(MINE))[:1])
    set_affinity(sleeper, first | NO_SUCH_CPU)
    assert affinity_of(sleeper) == first
    with pytest.raises(OutsideCpuset, match=rf"thread {sleeper} cannot be set to CPU 8000"):
        set_affinity(sleeper, NO_SUCH_CPU)
    assert affinity_of(sleeper) == first


def test_a_thread_that_has_ended_is_gone() -> None:
    with subprocess.Popen(["/bin/true"]) as process:
        process.wait()
    with pytest.raises(Gone, match=f"thread {process.pid}"):
        affinity_of(Tid(process.pid))
    with pytest.raises(Gone, match=f"thread {process.pid}"):
        set_affinity(Tid(process.pid), MINE)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_thread_that_may_not_be_set_is_not_taken_for_one_that_is_gone(sleeper: Tid) -> None:
    program = f"""
import os
from kvplace.linux.threads import affinity_of, set_affinity
from kvplace.linux.kernel_files import NotPermitted
os.setuid(65534)
try:
    set_affinity({sleeper}, affinity_of({sleeper}))
except NotPermitted as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "Operation not permitted; the agent needs CAP_SYS_NICE" in result.stdout


def test_a_process_that_ends_meanwhile_does_not_keep_the_others_from_being_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel has no folder of it any more, or no process behind the folder."""
    ended = {2**22 + 1: ProcessLookupError(3, "No such process"), 2**22 + 2: FileNotFoundError()}
    (tmp_path / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in (*ended, os.getpid())))
    listed = Path.iterdir

    def tasks(folder: Path) -> Iterator[Path]:
        if error := ended.get(int(folder.parent.name)):
            raise error
        return listed(folder)

    seen: dict[int, int] = {}
    monkeypatch.setattr(Path, "iterdir", tasks)
    monkeypatch.setattr(threads, "set_affinity", lambda tid, cpus: seen.update({tid: cpus}))
    assert set_own_threads(tmp_path, CpuMask(1), os.getpid())
    assert seen[Tid(os.getpid())] == 1
