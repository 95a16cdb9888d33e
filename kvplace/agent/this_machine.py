"""The machine that the agent runs on: its settings, the hardware, the reserved CPUs and the kubelet.

The kubelet's configuration and the state of its CPU manager are files of the host. `/configz` states the
same, on the kubelet's port and through the API server's node proxy. But the right to that proxy is the right
to run commands in every pod of every node, and the kubelet's own certificate can often not be checked.

Events report within milliseconds that the kubelet gives CPUs to a container. CPUs that go offline, memory and
huge pages are compared every two seconds: some twenty small files, 0.5 ms. A machine that has changed is read
once more, because the kernel changes its files one after the other. While the kubelet's settings or state
cannot be read, the last readable ones count.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from kvplace.core.cpuset import format_cpu_list, parse_cpu_list
from kvplace.core.errors import BadBody, BadTopology
from kvplace.core.node_devices import TopologyPolicy
from kvplace.core.node_topology import Enforcement
from kvplace.core.scalars import NO_CPUS, CpuMask, NodeName
from kvplace.core.topology import Topology
from kvplace.documents.reading import read_document
from kvplace.linux.cpu_manager_state import read_cpu_manager_state
from kvplace.linux.inotify import FileChange, FileReport, noticing
from kvplace.linux.kernel_files import Gone, KernelError, NotPermitted, read_text
from kvplace.linux.sysfs import discover, total_memory
from kvplace.linux.tree import FolderTree
from kvplace.service.connections import Address

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """The settings of `kvplace agent`."""

    node: NodeName
    """The node that it runs on."""
    health_address: Address
    host: Path = Path("/")
    """Root of the host's proc, sys, run and var; another folder in tests."""
    reserved: CpuMask | None = None
    """CPUs that are never given out; None: the kubelet's, else the core of the lowest online CPU."""
    enforcement: Enforcement | None = None
    """How cpusets are set; None: as an NRI plugin where the runtime offers NRI, else by writing cgroups."""
    nri_socket: Path = Path("/var/run/nri/nri.sock")
    kubelet_folder: Path = Path("/var/lib/kubelet")
    """Where the kubelet keeps its state, below `host`."""
    kubelet_config: Path = Path("/var/lib/kubelet/config.yaml")
    """The kubelet's configuration file, below `host`; it may be missing."""
    check_machine_every_s: float = 2.0
    """How often CPUs, memory, huge pages and the kubelet's files are compared."""
    kubeconfig: Path | None = None
    """None: the service account of the pod we run in, else the user's default kubeconfig."""
    log_level: str = "info"

    def on_host(self, path: Path) -> Path:
        """Return where a file of the host is found."""
        return self.host / path.relative_to("/")


class ReservedBy(Enum):
    """The source of the reserved CPUs."""

    AGENT = "the agent's --reserved-cpus"
    KUBELET = "the kubelet's reservedSystemCPUs"
    DEFAULT = "the core of the lowest online CPU"


@dataclass(frozen=True, slots=True)
class ThisMachine:
    """Everything that discovery finds out; equal values mean that nothing has changed."""

    topology: Topology
    """With the reserved CPUs in it; there is at least one."""
    reserved_by: ReservedBy
    kubelet: KubeletSettings
    kubelet_cpus: KubeletCpus
    notes: tuple[str, ...] = ()
    """Missing or contradictory parts, a sentence each."""


def read_this_machine(settings: AgentSettings, before: KubeletSettings | None = None) -> ThisMachine:
    """Read sysfs and the kubelet's files; raises BadTopology when the CPUs cannot be determined.

    Takes about 1 ms for each CPU. `before` are the kubelet's settings when they were last read: they count
    while its file cannot be read, as they do for the kubelet, which runs with them.
    """
    found = discover(FolderTree(settings.host))
    notes = list(found.notes)
    kubelet = _kubelet_settings(settings, notes, before)
    reserved, reserved_by = _reserved(found.topology, settings.reserved, kubelet.reserved_cpus, notes)
    topology = replace(found.topology, reserved=reserved)
    state = settings.on_host(settings.kubelet_folder / "cpu_manager_state")
    held = _kubelet_cpus(state, topology.allocatable)
    absent = held.held & ~topology.cpus
    if absent:
        notes.append(f"{state} names CPU {format_cpu_list(absent)}, which is not online")
        held = replace(held, held=held.held & topology.cpus)
    return ThisMachine(topology, reserved_by, kubelet, held, tuple(notes))


def _reserved(
    topology: Topology, ours: CpuMask | None, kubelets: CpuMask, notes: list[str]
) -> tuple[CpuMask, ReservedBy]:
    """Choose the reserved CPUs; offline CPUs do not count."""
    for asked, by in ((ours or NO_CPUS, ReservedBy.AGENT), (kubelets, ReservedBy.KUBELET)):
        if absent := asked & ~topology.cpus:
            notes.append(f"{by.value} names CPU {format_cpu_list(absent)}, which is not online")
        if online := asked & topology.cpus:
            return online, by
    return topology.cores[0], ReservedBy.DEFAULT


def _kubelet_settings(
    settings: AgentSettings, notes: list[str], before: KubeletSettings | None
) -> KubeletSettings:
    path = settings.on_host(settings.kubelet_config)
    try:
        return read_kubelet_settings(read_text(path), str(path))
    except (BadBody, Gone, NotPermitted, KernelError) as error:
        if isinstance(error, Gone) and (before or KubeletSettings()) == KubeletSettings():
            return KubeletSettings()  # not every kubelet has one
        notes.append(str(error) if before is None else f"{error}; the last readable settings count")
        return before or KubeletSettings()


def _kubelet_cpus(state: Path, allocatable: CpuMask) -> KubeletCpus:
    """Read the CPUs of the kubelet; if that is denied, it may hold all of them."""
    try:
        return read_kubelet_cpus(read_text(state), str(state), allocatable)
    except Gone:
        return KubeletCpus()
    except (NotPermitted, KernelError) as error:
        return KubeletCpus(
            observes_only=True, held=allocatable, problem=f"{error}; no CPU is given out, and none is set"
        )


STATIC = "static"
"""The kubelet's own policy of giving CPUs to containers."""


@dataclass(frozen=True, slots=True)
class KubeletSettings:
    """The settings of a kubelet that matter for CPUs, with its own defaults."""

    reserved_cpus: CpuMask = NO_CPUS
    """reservedSystemCPUs."""
    topology: TopologyPolicy = field(default_factory=TopologyPolicy)
    """topologyManagerPolicy and topologyManagerScope."""


@dataclass(frozen=True, slots=True)
class KubeletCpus:
    """CPUs that the kubelet's CPU manager holds on this node."""

    observes_only: bool = False
    """Whether it runs its static policy, so that no other process may set cpusets here."""
    held: CpuMask = NO_CPUS
    """CPUs that it has given to containers."""
    problem: str = ""
    """Why its state cannot be read, and the state that counts instead."""


def read_kubelet_settings(text: str, what: str) -> KubeletSettings:
    """Read a kubelet's configuration file; raises BadBody that names it as `what`."""
    document = read_document(text, what)
    try:
        reserved = parse_cpu_list(_word(document, "reservedSystemCPUs", ""), what="reservedSystemCPUs")
    except ValueError as error:
        raise BadBody(f"{what}: {error}") from None
    return KubeletSettings(
        reserved_cpus=reserved,
        topology=TopologyPolicy(
            _word(document, "topologyManagerPolicy", "none"),
            _word(document, "topologyManagerScope", "container"),
        ),
    )


def read_kubelet_cpus(text: str, what: str, allocatable: CpuMask) -> KubeletCpus:
    """Read the state of the CPU manager; never raises: a state that cannot be read is a problem to report."""
    try:
        state = read_cpu_manager_state(text, what=what)
    except BadBody as error:
        # The kubelet would refuse it as well. Which CPUs are its own cannot be known, so none is given out.
        return KubeletCpus(
            observes_only=STATIC in text, held=allocatable, problem=f"{error}; no CPU is given out"
        )
    return KubeletCpus(observes_only=state.policy == STATIC, held=state.held)


def _word(document: Mapping[str, Any], key: str, default: str) -> str:
    """Read a text or number; null and the empty text are the default, as for the kubelet."""
    found = document.get(key)
    return default if found is None or found == "" else str(found)


_SETTLE_S = 0.05
"""Changes of the files come together."""

_CHANGED = FileChange.WRITTEN | FileChange.MOVED_HERE | FileChange.CREATED | FileChange.REMOVED

Stamp = tuple[object, ...]
"""Changes whenever the files that it was made from do."""


class MachineWatch:
    """The newest description of this machine."""

    def __init__(self, settings: AgentSettings) -> None:
        """Read the machine; raises BadTopology when its CPUs cannot be determined."""
        self._settings = settings
        self._files = {settings.on_host(path) for path in _kubelet_files(settings)}
        self._stamp: Stamp | None = None
        """None: the machine is read once more, also where no file has changed."""
        self._readable: KubeletCpus | None = None
        self.machine = self._completed(read_this_machine(settings))
        self._listeners: list[Callable[[], None]] = []
        self._event = asyncio.Event()

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call the listener after each change of `machine`."""
        self._listeners.append(listener)

    async def run(self) -> None:
        """Watch until cancelled."""
        folders = {path.parent for path in self._files}
        with noticing(self._files_changed, folders, _CHANGED, "the kubelet's files are compared instead"):
            await self._check()  # no event has reported changes since it was read
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
            found = await asyncio.to_thread(read_this_machine, self._settings, self.machine.kubelet)
        except BadTopology as error:
            log.warning("the machine cannot be read: %s", error)
            return  # the stamp is still the old one, so it is read again
        machine = self._completed(found)
        self._stamp = stamp if machine == self.machine else None
        if machine != self.machine:
            self.machine = machine
            for listener in self._listeners:
                listener()

    def _files_changed(self, reports: Iterable[FileReport]) -> None:
        if any(report.folder / report.name in self._files for report in reports):
            self._event.set()

    def _completed(self, machine: ThisMachine) -> ThisMachine:
        """Put the kubelet's last readable state in the place of one that cannot be read."""
        found = machine.kubelet_cpus
        if not found.problem:
            self._readable = found
        if not found.problem or self._readable is None:
            return machine
        held = self._readable.held & machine.topology.cpus
        problem = f"{found.problem}; the last one that could be read counts"
        return replace(machine, kubelet_cpus=replace(self._readable, held=held, problem=problem))


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
