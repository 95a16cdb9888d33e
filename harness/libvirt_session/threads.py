"""The truth about a running QEMU: the affinity of every thread in the kernel, by the thread's purpose."""

import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from kvplace.core.cpuset import parse_cpu_list

_VCPU = re.compile(r"^CPU (\d+)/(?:TCG|KVM)$")
_IO_THREAD = re.compile(r"^IO iothread(\d+)$")


class ThreadKind(Enum):
    """The role of a thread of QEMU."""

    VCPU = "vCPU"
    IO_THREAD = "I/O thread"
    EMULATOR = "emulator"


@dataclass(frozen=True, slots=True)
class ThreadAffinity:
    """One thread of QEMU and the CPUs that the kernel lets it use."""

    tid: int
    name: str
    kind: ThreadKind
    number: int
    """The vCPU's or I/O thread's number; 0 for the emulator's."""
    cpus: int


@dataclass(frozen=True, slots=True)
class Affinities:
    """Every thread of one QEMU process."""

    threads: tuple[ThreadAffinity, ...]

    @classmethod
    def of_process(cls, pid: int) -> "Affinities":
        """Reads /proc/PID/task; threads that end meanwhile are left out."""
        found = []
        for task in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: int(path.name)):
            try:
                name = (task / "comm").read_text().rstrip("\n")
                status = (task / "status").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            allowed = re.search(r"^Cpus_allowed_list:\s*(\S*)$", status, re.MULTILINE)
            assert allowed is not None, f"no Cpus_allowed_list in {task}/status"
            kind, number = _classify(name)
            found.append(ThreadAffinity(int(task.name), name, kind, number, parse_cpu_list(allowed[1])))
        return cls(tuple(found))

    def vcpus(self) -> dict[int, int]:
        """CPUs of each vCPU's thread."""
        return self._numbered(ThreadKind.VCPU)

    def io_threads(self) -> dict[int, int]:
        """CPUs of each I/O thread, by libvirt's id."""
        return self._numbered(ThreadKind.IO_THREAD)

    def emulator(self) -> dict[str, int]:
        """CPUs of every other thread, by name and thread id."""
        others = [thread for thread in self.threads if thread.kind is ThreadKind.EMULATOR]
        return {f"{thread.name} ({thread.tid})": thread.cpus for thread in others}

    def _numbered(self, kind: ThreadKind) -> dict[int, int]:
        return {thread.number: thread.cpus for thread in self.threads if thread.kind is kind}


def _classify(name: str) -> tuple[ThreadKind, int]:
    if vcpu := _VCPU.match(name):
        return ThreadKind.VCPU, int(vcpu[1])
    if io_thread := _IO_THREAD.match(name):
        return ThreadKind.IO_THREAD, int(io_thread[1])
    return ThreadKind.EMULATOR, 0
