"""The processes and cgroups of one claim, kept open so that checking them again costs next to nothing.

A check that finds nothing changed is one system call for each thread and container, below 1 µs each. Only
when it finds a change, and now and then, everything is read anew. Everything here is for one worker thread.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from kvplace.agent.node_plan import ClaimContainer
from kvplace.agent.verification import Measurement, QemuThread
from kvplace.core.cpuset import bits_of
from kvplace.core.scalars import Bytes, CpuMask, NumaId
from kvplace.linux.affinity import Tid, affinity_of
from kvplace.linux.cgroup import UNIFIED, folders_of, processes_of
from kvplace.linux.kernel_files import Gone, KernelError, explained, to_cpu_list
from kvplace.linux.numa_memory import memory_of_cgroup
from kvplace.linux.qemu import PROC, QemuProcess, find_qemu

_EFFECTIVE = ("cpuset.cpus.effective", "cpuset.effective_cpus")
MOST_PROCESSES = 1024
"""In the containers that run a claim; that of a VM has about ten."""
_LONGEST_LIST = 65536
_COMPARED = 4096
"""Bytes of a cpuset that are compared: enough for every machine with CPUs in ranges."""


class WatchedPod:
    """Files that are kept open for one pod."""

    def __init__(
        self, containers: tuple[ClaimContainer, ...], *, vm: bool, mounted: Path, proc: Path = PROC
    ) -> None:
        self.containers = containers
        self.vm = vm
        self.qemu: QemuProcess | None = None
        self._mounted = mounted
        self._proc = proc
        self._cpusets: dict[str, _CpusetFile] = {}
        self._count = 0
        self._affinities: list[tuple[Tid, set[int]]] = []

    def close(self) -> None:
        """Let go of everything."""
        for file in self._cpusets.values():
            file.close()
        if self.qemu is not None:
            self.qemu.close()

    def unchanged(self) -> bool:
        """Return whether everything is as it was measured last."""
        if self.vm and self.qemu is None:
            return False
        affinity = os.sched_getaffinity
        try:
            if self.qemu is not None and (
                self.qemu.has_new_threads or self.qemu.thread_count() != self._count
            ):
                return False
            if len(self._cpusets) < len(self.containers):
                return False
            for file in self._cpusets.values():
                if not file.unchanged():
                    return False
            for tid, cpus in self._affinities:
                if affinity(tid) != cpus:
                    return False
        except OSError:
            return False
        return True

    def measure(self, most_threads: int, *, anew: bool = False, memory: bool = False) -> Measurement:
        """Read everything; `anew` also the names of known threads and the workers of the kernel.

        Raises Gone when the pod's containers have ended, NotPermitted, or KernelError, also for a QEMU with
        more than `most_threads` and for a container with more than `MOST_PROCESSES`.
        """
        self._open_cpusets()
        cpusets = self._read_cpusets()
        threads = self._threads(most_threads, anew=anew)
        return Measurement(threads, cpusets, self._memory() if memory and threads else {})

    def _open_cpusets(self) -> None:
        """Open the closed ones: a container may not have started yet, or may have ended."""
        for container in self.containers:
            if container.name not in self._cpusets:
                with suppress(Gone):
                    self._cpusets[container.name] = _CpusetFile(container.cgroup)
        if not self._cpusets:
            raise Gone("no container of the pod has started, or all have ended")

    def _read_cpusets(self) -> dict[str, CpuMask]:
        found = {}
        for name, file in list(self._cpusets.items()):
            try:
                found[name] = file.read()
            except Gone:
                self._cpusets.pop(name).close()
        if not found:
            raise Gone("all containers of the pod have ended")
        return found

    def _threads(self, most: int, *, anew: bool) -> tuple[QemuThread, ...]:
        if not self.vm:
            return ()
        if self.qemu is None or anew:
            processes = [pid for container in self.containers for pid in processes_of(container.cgroup)]
            if len(processes) > MOST_PROCESSES:
                raise KernelError(
                    f"its containers have {len(processes)} processes, more than the {MOST_PROCESSES} "
                    "that are searched for QEMU"
                )
            if self.qemu is not None:
                self.qemu.adopt_helpers(processes)
            else:
                self.qemu = find_qemu(processes, self._proc, most_threads=most)
        if self.qemu is None:
            return ()
        self._count = self.qemu.thread_count()
        try:
            names = self.qemu.threads(most, anew=anew)
        except Gone:
            self.qemu.close()
            self.qemu = None
            return ()
        threads = []
        for tid, name in names.items():
            with suppress(Gone):
                threads.append(QemuThread(tid, name, affinity_of(tid)))
        self._affinities = [(thread.tid, set(bits_of(thread.cpus))) for thread in threads]
        return tuple(threads)

    def _memory(self) -> dict[NumaId, Bytes]:
        if self.qemu is None:
            return {}
        folders = folders_of(self._proc / str(self.qemu.pid), self._mounted)
        container = self.containers[0].cgroup
        if (container / "cgroup.controllers").exists():
            # /proc shows paths as seen from our own cgroup namespace, which runtimes make with version 2.
            folders[UNIFIED] = container
        return memory_of_cgroup(folders)


class _CpusetFile:
    """The file with the effective cpuset of a cgroup."""

    def __init__(self, cgroup: Path) -> None:
        for name in _EFFECTIVE:
            self._path = cgroup / name
            try:
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise explained(error, self._path) from None
            self._text = b""
            return
        raise Gone(f"{cgroup} does not exist or has no cpuset")

    def close(self) -> None:
        os.close(self._descriptor)

    def unchanged(self) -> bool:
        return os.pread(self._descriptor, _COMPARED, 0) == self._text[:_COMPARED]

    def read(self) -> CpuMask:
        try:
            self._text = os.pread(self._descriptor, _LONGEST_LIST, 0)
        except OSError as error:
            raise explained(error, self._path) from None
        return to_cpu_list(self._text.decode(errors="replace"), self._path)
