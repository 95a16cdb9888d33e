"""The CPUs that a thread may use, QEMU's process in a container, and the role of each of its threads.

A system call that reads the CPUs costs less than 1 µs; /proc/PID/status, which states the same, costs 40
times as much. CPUs that are offline are left out, as the scheduler leaves them out.

A process is taken for QEMU by its name and by a thread for vCPU 0: libvirt also starts QEMUs without one, to
ask for their features. Its folder in /proc stays open. The kernel never shows another process in an open
folder, so a reused process id is not taken for the VM's.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import NewType, Self

from kvplace.core.cpuset import bits_of, format_cpu_list, mask_of
from kvplace.core.scalars import CpuMask
from kvplace.linux.cgroups import processes_of
from kvplace.linux.kernel_files import Gone, KernelError, NotPermitted, explained, explained_call

Tid = NewType("Tid", int)
"""The id of a thread; the id of a process's first thread is the process id."""


class OutsideCpuset(KernelError):
    """None of the CPUs is online and in the cpuset of the thread, so the kernel refuses them."""


def affinity_of(tid: Tid) -> CpuMask:
    """Read the online CPUs that a thread may run on; raises Gone or NotPermitted."""
    try:
        return mask_of(os.sched_getaffinity(tid))
    except OSError as error:
        what = f"the affinity of thread {tid} cannot be read"
        raise explained_call(error.errno or 0, what, "thread", "CAP_SYS_NICE") from None


def set_affinity(tid: Tid, cpus: CpuMask) -> None:
    """Let a thread run on these CPUs only, as far as its cpuset has them.

    Raises Gone, NotPermitted, or OutsideCpuset when its cpuset has none of them.
    """
    try:
        os.sched_setaffinity(tid, bits_of(cpus))
    except OSError as error:
        what = f"thread {tid} cannot be set to CPU {format_cpu_list(cpus)}"
        if error.errno == errno.EINVAL:
            raise OutsideCpuset(f"{what}: its cpuset has none of them online") from None
        raise explained_call(error.errno or 0, what, "thread", "CAP_SYS_NICE") from None


def set_own_threads(folder: Path, cpus: CpuMask, own_pid: int) -> bool:
    """Set every thread of our own container; False, and nothing set, for the cgroup of another one.

    Raises Gone, NotPermitted or Unreadable.
    """
    pids = processes_of(folder)
    if own_pid not in pids:
        return False
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with suppress(Gone, OutsideCpuset):
                    set_affinity(Tid(int(thread.name)), cpus)
    return True


PROC = Path("/proc")

_LINKS_OF_A_FOLDER = 2
"""Links of the folder with the threads of a process, beside one for each thread."""
_NAMES = ("qemu-system", "qemu-kvm")
"""The beginnings of the names of QEMU programs, in distributions and in KubeVirt's images."""
_VCPU = re.compile(r"CPU (\d{1,5})/")
_IO_THREAD = re.compile(r"IO iothread(\d{1,5})")
_VHOST = re.compile(r"vhost-(\d+)|kvm-nx-lpage-re.*")
_MIGRATION = re.compile(r"(live_migration|migration|multifd|mig/|postcopy|return path|bg_snapshot|COLO).*")


class ThreadRole(Enum):
    """The role of a thread of a VM."""

    VCPU = "vCPU"
    IO_THREAD = "I/O thread"
    EMULATOR = "emulator thread"
    VHOST = "vhost thread"
    MIGRATION = "migration thread"


@dataclass(frozen=True, slots=True)
class ThreadName:
    """The content of a thread's name."""

    role: ThreadRole
    number: int = 0
    """Of a vCPU or I/O thread, as libvirt counts them."""
    name: str = ""

    def __str__(self) -> str:
        if self.role in (ThreadRole.VCPU, ThreadRole.IO_THREAD):
            return f"{self.role.value} {self.number}"
        return f"{self.role.value} {self.name!r}"


def classify(name: str) -> ThreadName:
    """Read the role of a thread of QEMU from its name."""
    if found := _VCPU.match(name):
        return ThreadName(ThreadRole.VCPU, int(found[1]), name)
    if found := _IO_THREAD.fullmatch(name):
        return ThreadName(ThreadRole.IO_THREAD, int(found[1]), name)
    if _VHOST.fullmatch(name):
        return ThreadName(ThreadRole.VHOST, 0, name)
    if _MIGRATION.fullmatch(name):
        return ThreadName(ThreadRole.MIGRATION, 0, name)
    return ThreadName(ThreadRole.EMULATOR, 0, name)


class QemuProcess:
    """One running QEMU and the kernel threads that work for it."""

    def __init__(self, pid: int, tasks: int, proc: Path) -> None:
        self.pid = pid
        self._tasks = tasks
        self._proc = proc
        self._where = proc / str(pid) / "task"
        self._names: dict[Tid, ThreadName] = {}
        self._new: AbstractSet[Tid] = frozenset()
        self._listed = 0
        """The number of threads, as `thread_count` has it, when they were listed last."""
        self._helpers: dict[Tid, ThreadName] = {}

    @classmethod
    def open(cls, pid: int, proc: Path = PROC) -> QemuProcess:
        """Open a process; raises Gone, NotPermitted or KernelError."""
        try:
            tasks = os.open(proc / str(pid) / "task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise explained(error, proc / str(pid) / "task") from None
        return cls(pid, tasks, proc)

    def close(self) -> None:
        """Let go of the folder."""
        os.close(self._tasks)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None
    ) -> None:
        self.close()

    def thread_count(self) -> int:
        """Count the threads with one system call; the number changes when the process ends, too."""
        return os.fstat(self._tasks).st_nlink

    @property
    def has_new_threads(self) -> bool:
        """Whether there are threads that were never listed, or once only: they may get other names yet."""
        return bool(self._new) or self.thread_count() != self._listed

    def threads(self, most: int, *, anew: bool = False) -> dict[Tid, ThreadName]:
        """List the threads by id; raises Gone when the process has ended, KernelError for more than `most`.

        Names are read when a thread is seen for the first and the second time, because it has the name of
        its parent for a moment after its start, and not again, unless `anew`.
        """
        self._listed = self.thread_count()
        count = self._listed - _LINKS_OF_A_FOLDER
        if count > most:
            raise KernelError(
                f"process {self.pid} has {count} threads, more than the {most} that are checked"
            )
        known = {} if anew else {tid: name for tid, name in self._names.items() if tid not in self._new}
        try:
            with os.scandir(self._tasks) as entries:
                tids = [Tid(int(entry.name)) for entry in islice(entries, most)]
        except OSError as error:
            raise explained(error, self._where) from None
        if not tids:
            raise Gone(f"{self._where} is empty: the process has ended")
        names: dict[Tid, ThreadName] = {}
        for tid in tids:
            with suppress(Gone):  # ended since the folder was listed
                names[tid] = known.get(tid) or classify(self._name(tid))
        self._new = names.keys() - self._names.keys()
        self._names = names
        return names | {tid: name for tid, name in self._helpers.items() if self._is_helper(tid, name)}

    def adopt_helpers(self, pids: Iterable[int]) -> None:
        """Take over the kernel threads among the processes of its container that work for it.

        Since Linux 6.4 vhost workers are threads of QEMU; before, they are processes in its cgroup.
        """
        self._helpers = {}
        for pid in pids:
            with suppress(Gone):
                name = _process_name(pid, self._proc)
                vhost = _VHOST.fullmatch(name)
                if vhost and vhost[1] in (None, str(self.pid)):
                    self._helpers[Tid(pid)] = classify(name)

    def set_affinity(self, tid: Tid, cpus: CpuMask) -> None:
        """Let a thread run on these CPUs only; one that has ended, or may have none of them, stays.

        Raises NotPermitted.
        """
        if self.has(tid):
            with suppress(Gone, OutsideCpuset):
                set_affinity(tid, cpus)

    def has(self, tid: Tid) -> bool:
        """Whether the thread is one of this process now; to be asked right before it is changed."""
        helper = self._helpers.get(tid)
        if helper is not None:
            return self._is_helper(tid, helper)
        try:
            os.stat(str(tid), dir_fd=self._tasks)
        except OSError:
            return False
        return True

    def _is_helper(self, tid: Tid, name: ThreadName) -> bool:
        try:
            return _process_name(tid, self._proc) == name.name
        except (Gone, NotPermitted, KernelError):
            return False

    def _name(self, tid: Tid) -> str:
        try:
            descriptor = os.open(f"{tid}/comm", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._tasks)
            try:
                return os.read(descriptor, 64).decode(errors="replace").rstrip("\n")
            finally:
                os.close(descriptor)
        except OSError as error:
            raise explained(error, self._where / str(tid) / "comm") from None


def find_qemu(pids: Iterable[int], proc: Path = PROC, *, most_threads: int) -> QemuProcess | None:
    """Find and open the QEMU of a VM among the processes of its container; None while there is none.

    Raises NotPermitted where its threads may not be listed, and KernelError where the processes that may be
    QEMU have more than `most_threads` threads together.
    """
    pids = tuple(pids)
    for pid in pids:
        with suppress(Gone):
            if not _process_name(pid, proc).startswith(_NAMES):
                continue
            qemu = QemuProcess.open(pid, proc)
            try:
                names = qemu.threads(most_threads)
                most_threads -= len(names)
                if any(name.role is ThreadRole.VCPU for name in names.values()):
                    qemu.adopt_helpers(pids)
                    return qemu
            except BaseException:
                qemu.close()
                raise
            qemu.close()
    return None


def _process_name(pid: int, proc: Path) -> str:
    path = proc / str(pid) / "comm"
    try:
        return path.read_text(errors="replace").rstrip("\n")
    except OSError as error:
        raise explained(error, path) from None
