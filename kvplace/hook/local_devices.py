"""The last check of a VM's devices: are they beside its cores, as this machine's sysfs states it?

The kubelet chooses the devices of a device plugin after the cores were chosen. KubeVirt writes them into the
domain, so here they are compared with the placement before QEMU exists. The check needs no agent, no report
of the kubelet and no DRA.

A device restricts nothing while its NUMA node is unknown (sysfs has -1, does not have the device, or names a
node that the machine does not have) or has no CPUs. With `required` and `socket` this is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvplace.core.cpuset import cpus_of, format_cpu_list, mask_of, union
from kvplace.core.errors import KvplaceError, Misconfigured
from kvplace.core.placement import PodPlacement
from kvplace.core.request import DeviceNuma, OnFailure
from kvplace.core.scalars import NO_CPUS, CpuMask, NumaId
from kvplace.core.well_known_names import DEVICE_NUMA
from kvplace.hook.bounds import node_of_cpus
from kvplace.hook.process import PodEnvironment
from kvplace.linux.kernel_files import Gone, read_text
from kvplace.linux.pci_devices import numa_node_of_mediated, numa_node_of_pci

if TYPE_CHECKING:
    from kvplace.domainxml.host_devices import AssignedDevice

_MOST_NAMED = 4


@dataclass(frozen=True, slots=True)
class _NumaNodeCpus:
    """The NUMA nodes of this machine, and the CPUs of each."""

    cpus: Mapping[NumaId, CpuMask]
    sys: Path

    @classmethod
    def of(cls, env: PodEnvironment) -> _NumaNodeCpus:
        folders = Path(env.sys, "devices/system/node").glob("node[0-9]*")
        cpus = {NumaId(int(folder.name[4:])): NO_CPUS for folder in folders}
        for cpu, node in node_of_cpus(env).items():
            cpus[node] |= 1 << cpu
        return cls(cpus, Path(env.sys))

    def sockets(self) -> Collection[CpuMask]:
        """Read the CPUs of each package of the machine; CPUs without a readable package are left out."""
        found: dict[str, CpuMask] = {}
        for cpu in cpus_of(union(self.cpus.values())):
            path = self.sys / f"devices/system/cpu/cpu{cpu}/topology/physical_package_id"
            try:
                package = read_text(path).strip()
            except KvplaceError:
                continue
            found[package] = found.get(package, NO_CPUS) | 1 << cpu
        return found.values()


def compare_devices(
    devices: Iterable[AssignedDevice],
    bound: PodPlacement,
    on_failure: OnFailure,
    env: PodEnvironment,
    report: Callable[[str, str], None],
) -> dict[str, NumaId]:
    """Compare each device with the placement; returns the NUMA node of each device that has a known one.

    Raises Misconfigured for a device that is not local where the VM must wait then. `report` gets a level of
    the log and a sentence on everything else that is not as the VM's owner wants it.
    """
    mode, machine = bound.device_numa, _NumaNodeCpus.of(env)
    known: dict[str, NumaId] = {}
    remote: list[str] = []
    near = _nodes_of(bound, env)
    for device in devices:
        node, why = _node_of(device, machine)
        if node is not None:
            known[device.source] = node
        if mode is DeviceNuma.OFF or len(machine.cpus) < 2 or not near:
            continue
        if node is not None and not machine.cpus[node] and node not in near:
            why = f"its NUMA node {node} has no CPUs"
        if why:
            level = "info" if mode is DeviceNuma.PREFERRED else "warning"
            report(level, f"device {device} restricts nothing: {why}")
        elif node is not None and not _is_local(node, bound, near, machine):
            remote.append(f"device {device} is on NUMA node {node}")
    if remote:
        _judge(remote, near, mode, on_failure, report)
    return known


def _judge(
    remote: list[str],
    near: frozenset[NumaId],
    mode: DeviceNuma,
    on_failure: OnFailure,
    report: Callable[[str, str], None],
) -> None:
    more = f", and {len(remote) - _MOST_NAMED} more" if len(remote) > _MOST_NAMED else ""
    where = "not on a socket of its cores" if mode is DeviceNuma.SOCKET else "not beside its cores"
    cores = f"the VM's cores are on NUMA node {format_cpu_list(mask_of(near))}"
    sentence = f"{', '.join(remote[:_MOST_NAMED])}{more}, {where}: {cores}"
    if mode is DeviceNuma.PREFERRED:
        report("warning", sentence)
    elif on_failure is OnFailure.FLOAT:
        report("warning", f"the VM starts because its on-failure is float: {sentence}")
    else:
        raise Misconfigured(
            f"{sentence}; the VM waits for other cores because its {DEVICE_NUMA} is {mode.value}: release "
            "cores beside the device, delete the pod so that it is placed again, or write preferred"
        )


def _nodes_of(bound: PodPlacement, env: PodEnvironment) -> frozenset[NumaId]:
    """Return the NUMA nodes of the placement; one that was made from a `cpu-map` has only CPUs."""
    if bound.placement.numa_nodes:
        return frozenset(bound.placement.numa_nodes)
    homes = node_of_cpus(env)
    return frozenset(homes[cpu] for cpu in cpus_of(bound.placement.cpus) if cpu in homes)


def _is_local(node: NumaId, bound: PodPlacement, near: frozenset[NumaId], machine: _NumaNodeCpus) -> bool:
    """Whether a device on a NUMA node is local; with `socket` also where sysfs has no packages to compare."""
    if node in near or bound.device_numa is not DeviceNuma.SOCKET:
        return node in near
    cpus, sockets = bound.placement.cpus, machine.sockets()
    known = union(sockets)
    if not cpus & known or not machine.cpus[node] & known:
        return True
    return node in bound.device_numa.local_nodes(near, cpus, sockets, machine.cpus)


def _node_of(device: AssignedDevice, machine: _NumaNodeCpus) -> tuple[NumaId | None, str]:
    """Read the NUMA node of a device; with None why it is unknown."""
    if not device.source:
        return None, "the domain has no source address that can be read"
    try:
        if device.pci is not None:
            node = numa_node_of_pci(device.pci, machine.sys)
        else:
            node = numa_node_of_mediated(device.mediated, machine.sys)
    except Gone:
        return None, "sysfs does not have it"
    except KvplaceError as error:
        return None, str(error)
    if node is None:
        return None, "its firmware states no NUMA node"
    if node not in machine.cpus:
        return None, f"sysfs states NUMA node {node}, which this machine does not have"
    return node, ""
