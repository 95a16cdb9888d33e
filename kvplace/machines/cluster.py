"""The nodes of a cluster document, with their machines read and their running VMs placed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from kvplace.core.allocator.allocate import place
from kvplace.core.cpuset import format_cpu_list
from kvplace.core.device_locality import predicted_held, too_few_devices
from kvplace.core.errors import BadBody, BadTopology
from kvplace.core.node_devices import NodeDevices, TopologyPolicy
from kvplace.core.node_topology import may_have_devices, numa_list
from kvplace.core.occupant import ClusterNode, Occupant
from kvplace.core.placement import Refusal
from kvplace.core.scalars import NodeName
from kvplace.documents.cluster import MOST_NODES, ClusterDocument, NodeEntry, RunningVm
from kvplace.documents.model import numbered, read_model
from kvplace.documents.reading import load_document, source_name
from kvplace.machines.machine import Machine, read_machine_at
from kvplace.machines.server_types import read_machine


def load_cluster(path: Path) -> tuple[ClusterNode, ...]:
    """Read a cluster document, from stdin for `-`; raises BadBody that names the file and the key's path."""
    what = source_name(str(path))
    document = read_model(ClusterDocument, load_document(path), what)
    try:
        return nodes_of(document, path.parent)
    except BadBody as error:
        raise BadBody(f"{what}: {error}") from None


def nodes_of(document: ClusterDocument, folder: Path) -> tuple[ClusterNode, ...]:
    """Read the nodes of a document in a folder; raises BadBody that names the path of the key."""
    read_at = cache(lambda path: read_machine_at(folder / path))
    found: dict[str, ClusterNode] = {}
    for number, entry in enumerate(document.nodes):
        path = f"nodes[{number}]"
        for node in _nodes(entry, path, read_at):
            if node.name in found:
                raise BadBody(f"{path}.name: duplicate node name {node.name!r}")
            found[node.name] = node
        if len(found) > MOST_NODES:
            raise BadBody(f"{path}: there are more than {MOST_NODES} nodes")
    return tuple(found.values())


def _nodes(entry: NodeEntry, path: str, read_at: Callable[[str], Machine]) -> Iterator[ClusterNode]:
    key = "topology" if entry.machine is None else "machine"
    try:
        machine = (
            Machine(entry.machine, read_machine(entry.machine))
            if entry.machine
            else read_at(entry.topology or "")
        )
    except (BadTopology, BadBody) as error:
        raise BadBody(f"{path}.{key}: {error}") from None
    devices = machine.devices
    for number, one in enumerate(entry.devices or ()):
        if not may_have_devices(machine.topology, one.numa_node):
            raise BadBody(
                f"{path}.devices[{number}].numaNode is {one.numa_node}; "
                f"the machine has NUMA nodes {numa_list(machine.topology)}"
            )
    if entry.devices is not None:
        stated = [(one.resource, one.numa_node, one.count) for one in entry.devices]
        devices = NodeDevices.all_free(stated, TopologyPolicy(entry.topology_policy))
    empty = ClusterNode(NodeName(""), machine.topology, devices=devices)
    for name in numbered(entry.name, entry.count):
        yield replace(empty, name=NodeName(name), running=_running(entry.running, empty, path))


def _running(vms: Sequence[RunningVm], empty: ClusterNode, path: str) -> tuple[Occupant, ...]:
    """Place the VMs with given CPUs, then the others where kvplace would; keeps their order."""
    found: dict[int, Occupant] = {}
    for number in sorted(range(len(vms)), key=lambda number: vms[number].cpus is None):
        node = replace(empty, running=tuple(found.values()))
        found[number] = _placed(vms[number], node, f"{path}.running[{number}]")
    return tuple(found[number] for number in range(len(vms)))


def _placed(vm: RunningVm, node: ClusterNode, path: str) -> Occupant:
    free = node.free if vm.cpus is None else node.free.within(vm.cpus)
    requested = vm.request.devices
    placement = too_few_devices(free.devices, requested) or place(node.topology, free, vm.request)
    if isinstance(placement, Refusal):
        where = "" if vm.cpus is None else f" on CPUs {format_cpu_list(vm.cpus)}"
        raise BadBody(f"{path}: the VM does not fit{where}: {placement.message}")
    if vm.cpus is not None and vm.cpus != placement.cpus | placement.owned:
        needed = format_cpu_list(placement.cpus | placement.owned)
        raise BadBody(f"{path}.cpus is '{format_cpu_list(vm.cpus)}'; the VM takes only {needed} of them")
    return Occupant(vm.id, vm.request, placement, devices=predicted_held(free.devices, requested))
