"""Notices that the machine has changed: CPUs and memory by the kernel's events, the rest by comparing files.

A CPU that goes offline is noticed within milliseconds. Huge pages, the kubelet's files, and everything else
where the kernel's events cannot be received, are compared every few seconds: some twenty small files, 1 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from kvplace.agent.settings import AgentSettings
from kvplace.agent.this_machine import read_this_machine
from kvplace.core.errors import BadTopology
from kvplace.linux.uevents import Uevents

log = logging.getLogger(__name__)

_SUBSYSTEMS = ("cpu", "memory", "node", "")
"""Whose events may change a machine; an empty one stands for events that were lost."""
_SETTLE_S = 0.05
"""Events of one change come together."""

Stamp = tuple[object, ...]
"""Changes whenever the files that it was made from do."""


class MachineWatch:
    """The newest description of this machine."""

    def __init__(self, settings: AgentSettings) -> None:
        """Read the machine; raises BadTopology when its CPUs cannot be determined."""
        self._settings = settings
        self._stamp = _stamp(settings)  # before the machine: what changes meanwhile is read again
        self.machine = read_this_machine(settings)
        self._listeners: list[Callable[[], None]] = []
        self._event = asyncio.Event()

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call the listener after each change of `machine`."""
        self._listeners.append(listener)

    async def run(self) -> None:
        """Watch until cancelled."""
        with self._kernel_events():
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._settings.check_machine_every_s):
                        await self._event.wait()
                        await asyncio.sleep(_SETTLE_S)
                self._event.clear()
                await self._check()

    async def _check(self) -> None:
        stamp = _stamp(self._settings)
        if stamp == self._stamp:
            return
        try:
            machine = await asyncio.to_thread(read_this_machine, self._settings)
        except BadTopology as error:
            log.warning("the machine cannot be read: %s", error)
            return  # the stamp is still the old one, so it is read again
        self._stamp = stamp
        if machine != self.machine:
            self.machine = machine
            for listener in self._listeners:
                listener()

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
                self._event.set()

        loop = asyncio.get_running_loop()
        loop.add_reader(uevents.fileno(), arrived)
        try:
            yield
        finally:
            loop.remove_reader(uevents.fileno())
            uevents.close()


def _stamp(settings: AgentSettings) -> Stamp:
    """Read what tells that something has changed: texts of the kernel's files, times of the kubelet's."""
    devices = settings.on_host(Path("/sys/devices/system"))
    pages = settings.on_host(Path("/sys/kernel/mm/hugepages"))
    kernels = (
        devices / "cpu/online",
        *sorted(devices.glob("node/node*/hugepages/*/nr_hugepages")),
        *sorted(devices.glob("node/node*/cpulist")),
        *sorted(pages.glob("*/nr_hugepages")),
    )
    kubelets = (
        settings.on_host(settings.kubelet_config),
        settings.on_host(settings.kubelet_folder / "cpu_manager_state"),
    )
    return (*((str(path), _text(path)) for path in kernels), *(_written(path) for path in kubelets))


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
