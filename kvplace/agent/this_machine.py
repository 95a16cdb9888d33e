"""The machine that the agent runs on: its hardware, its reserved CPUs and what its kubelet holds of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from kvplace.agent.kubelet_settings import (
    KubeletCpus,
    KubeletSettings,
    read_kubelet_cpus,
    read_kubelet_settings,
)
from kvplace.agent.settings import AgentSettings
from kvplace.core.cpuset import format_cpu_list
from kvplace.core.errors import BadBody
from kvplace.core.scalars import NO_CPUS, CpuMask
from kvplace.core.topology import Topology
from kvplace.linux.sysfs import discover
from kvplace.linux.tree import FolderTree, Tree


class ReservedBy(Enum):
    """Who decided which CPUs are reserved."""

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
    """What is missing or contradicts itself, a sentence each."""


def read_this_machine(settings: AgentSettings) -> ThisMachine:
    """Read sysfs and the kubelet's files; raises BadTopology when the CPUs cannot be determined.

    Takes about 1 ms for each CPU.
    """
    tree = FolderTree(settings.host)
    found = discover(tree)
    notes = list(found.notes)
    kubelet = _kubelet_settings(tree, settings, notes)
    reserved, reserved_by = _reserved(found.topology, settings.reserved, kubelet.reserved_cpus, notes)
    topology = replace(found.topology, reserved=reserved)
    state_path = _path(settings, "cpu_manager_state")
    state = tree.read(state_path)
    held = KubeletCpus() if state is None else read_kubelet_cpus(state, state_path, topology.allocatable)
    absent = held.held & ~topology.cpus
    if absent:
        notes.append(f"{state_path} names CPU {format_cpu_list(absent)}, which is not online")
        held = replace(held, held=held.held & topology.cpus)
    return ThisMachine(topology, reserved_by, kubelet, held, tuple(notes))


def _reserved(
    topology: Topology, ours: CpuMask | None, kubelets: CpuMask, notes: list[str]
) -> tuple[CpuMask, ReservedBy]:
    """Choose the reserved CPUs; those that are not online do not count."""
    for asked, by in ((ours or NO_CPUS, ReservedBy.AGENT), (kubelets, ReservedBy.KUBELET)):
        if absent := asked & ~topology.cpus:
            notes.append(f"{by.value} names CPU {format_cpu_list(absent)}, which is not online")
        if online := asked & topology.cpus:
            return online, by
    return topology.cores[0], ReservedBy.DEFAULT


def _kubelet_settings(tree: Tree, settings: AgentSettings, notes: list[str]) -> KubeletSettings:
    path = str(settings.kubelet_config.relative_to("/"))
    text = tree.read(path)
    if text is None:
        return KubeletSettings()
    try:
        return read_kubelet_settings(text, path)
    except BadBody as error:
        notes.append(str(error))
        return KubeletSettings()


def _path(settings: AgentSettings, name: str) -> str:
    return str((settings.kubelet_folder / name).relative_to("/"))
