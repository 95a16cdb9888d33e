"""The machine that the agent runs on: its hardware, its reserved CPUs and the CPUs of its kubelet.

The kubelet's configuration and the state of its CPU manager are files of the host. `/configz` states the
same, on the kubelet's port and through the API server's node proxy. But the right to that proxy is the right
to run commands in every pod of every node, and the kubelet's own certificate can often not be checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from kvplace.agent.settings import AgentSettings
from kvplace.core.cpuset import format_cpu_list, parse_cpu_list
from kvplace.core.errors import BadBody
from kvplace.core.node_devices import TopologyPolicy
from kvplace.core.scalars import NO_CPUS, CpuMask
from kvplace.core.topology import Topology
from kvplace.documents.reading import read_document
from kvplace.linux.cpu_manager_state import read_cpu_manager_state
from kvplace.linux.kernel_files import Gone, KernelError, NotPermitted, read_text
from kvplace.linux.sysfs import discover
from kvplace.linux.tree import FolderTree


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
