"""Notices that the machine has changed: CPUs, memory and the kubelet's files by the kernel's events.

A CPU that goes offline, and CPUs that the kubelet gives to a container, are noticed within milliseconds. Huge
pages, and everything where the kernel's events cannot be received, are compared every few seconds: some
twenty small files, 1 ms. After an event of the kernel the machine is read in any case: these files may
have been the same while the kernel was still about to change others. While the kubelet's settings or state
cannot be read, the last readable ones count.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from kvplace.agent.settings import AgentSettings
from kvplace.agent.this_machine import KubeletCpus, ThisMachine, read_this_machine
from kvplace.core.errors import BadTopology, Misconfigured
from kvplace.linux.kernel_events import FileChange, Inotify, Uevents, calling
from kvplace.linux.kernel_files import Gone
from kvplace.linux.sysfs import total_memory

log = logging.getLogger(__name__)

_SUBSYSTEMS = ("cpu", "memory", "node", "")
"""Subsystems with events that may change a machine; an empty one stands for events that were lost."""
_SETTLE_S = 0.05
"""Events of one change come together."""

Stamp = tuple[object, ...]
"""Changes whenever the files that it was made from do."""


class MachineWatch:
    """The newest description of this machine."""

    def __init__(self, settings: AgentSettings) -> None:
        """Read the machine; raises BadTopology when its CPUs cannot be determined."""
        self._settings = settings
        self._kernel_events_seen = 0
        self._stamp = self._stamp_now()  # before the machine: what changes meanwhile is read again
        self._readable = KubeletCpus()
        self._has_been_readable = False
        self.machine = self._completed(read_this_machine(settings))
        self._listeners: list[Callable[[], None]] = []
        self._event = asyncio.Event()

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call the listener after each change of `machine`."""
        self._listeners.append(listener)

    async def run(self) -> None:
        """Watch until cancelled."""
        with self._kernel_events(), self._file_events():
            await self._check()  # no event has reported what changed since it was read
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._settings.check_machine_every_s):
                        await self._event.wait()
                        await asyncio.sleep(_SETTLE_S)
                self._event.clear()
                await self._check()

    async def _check(self) -> None:
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return
        try:
            found = await asyncio.to_thread(read_this_machine, self._settings, self.machine.kubelet)
        except BadTopology as error:
            log.warning("the machine cannot be read: %s", error)
            return  # the stamp is still the old one, so it is read again
        self._stamp = stamp
        machine = self._completed(found)
        if machine != self.machine:
            self.machine = machine
            for listener in self._listeners:
                listener()

    def _stamp_now(self) -> Stamp:
        return (self._kernel_events_seen, *_stamp(self._settings))

    def _completed(self, machine: ThisMachine) -> ThisMachine:
        """Put the kubelet's last readable state in the place of one that cannot be read."""
        found = machine.kubelet_cpus
        if not found.problem:
            self._readable, self._has_been_readable = found, True
            return machine
        if not self._has_been_readable:
            return machine
        held = self._readable.held & machine.topology.cpus
        problem = f"{found.problem}; the last one that could be read counts"
        return replace(machine, kubelet_cpus=replace(self._readable, held=held, problem=problem))

    @contextlib.contextmanager
    def _file_events(self) -> Iterator[None]:
        """Hear of writes to the kubelet's files, which it replaces as a whole."""
        files = {self._settings.on_host(path) for path in _kubelet_files(self._settings)}
        try:
            inotify = Inotify()
        except Misconfigured as error:
            log.warning("%s; the kubelet's files are compared instead", error)
            yield
            return
        for folder in {file.parent for file in files}:
            with contextlib.suppress(Gone, Misconfigured):
                inotify.watch(
                    folder,
                    FileChange.WRITTEN | FileChange.MOVED_HERE | FileChange.CREATED | FileChange.REMOVED,
                )

        def arrived() -> None:
            if any(report.folder / report.name in files for report in inotify.read()):
                self._event.set()

        with calling(arrived, inotify):
            yield

    @contextlib.contextmanager
    def _kernel_events(self) -> Iterator[None]:
        try:
            uevents = Uevents()
        except OSError as error:
            log.warning("events of the kernel cannot be received: %s; files are compared instead", error)
            yield
            return

        def arrived() -> None:
            if any(subsystem in _SUBSYSTEMS for subsystem in uevents.subsystems()):
                self._kernel_events_seen += 1
                self._event.set()

        with calling(arrived, uevents):
            yield


def _stamp(settings: AgentSettings) -> Stamp:
    """Read the signs of a change: texts of the kernel's files, times of the kubelet's."""
    devices = settings.on_host(Path("/sys/devices/system"))
    pages = settings.on_host(Path("/sys/kernel/mm/hugepages"))
    kernels = (
        devices / "cpu/online",
        *sorted(devices.glob("node/node*/hugepages/*/nr_hugepages")),
        *sorted(devices.glob("node/node*/cpulist")),
        *sorted(pages.glob("*/nr_hugepages")),
    )
    memory = (settings.on_host(Path("/proc/meminfo")), *sorted(devices.glob("node/node*/meminfo")))
    kubelets = (_written(settings.on_host(path)) for path in _kubelet_files(settings))
    sizes = ((str(path), total_memory(_text(path) or "")) for path in memory)
    return (*((str(path), _text(path)) for path in kernels), *sizes, *kubelets)


def _kubelet_files(settings: AgentSettings) -> tuple[Path, Path]:
    return (settings.kubelet_config, settings.kubelet_folder / "cpu_manager_state")


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _written(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino)
