"""Two-socket machines with devices, and VMs with and without devices that come and go there."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from kvplace.core.request import DeviceNuma, PinningOptions, Request, Scope
from kvplace.core.scalars import NumaId, ResourceName
from kvplace.core.topology import Topology
from kvplace.machines.server_types import machine_names, read_machine
from kvplace.simulate.scenario import ActiveVms, Departure, SimulatedVm

VF, GPU = ResourceName("intel.com/vf"), ResourceName("nvidia.com/gpu")
FILL = 0.85
"""Share of the CPUs that the VMs of the load have together."""
MOST_DEVICES = 0.75
"""Share of the devices of a resource that the VMs of the load have at most together."""
MOST_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Layout:
    """The devices of every machine: how many a NUMA node has."""

    name: str
    sockets: tuple[int, ...]
    """The sockets with devices."""
    vfs: int
    """On the first NUMA node of each of these sockets."""
    gpus: int = 0
    """On the last NUMA node of each of these sockets."""

    def devices_of(self, topology: Topology) -> dict[ResourceName, dict[NumaId, int]]:
        """Return the devices of a machine by resource and NUMA node."""
        found: dict[ResourceName, dict[NumaId, int]] = {}
        for socket in self.sockets:
            nodes = sorted(topology.nodes_of(topology.packages[socket].cpus))
            for resource, node, count in ((VF, nodes[0], self.vfs), (GPU, nodes[-1], self.gpus)):
                if count:
                    found.setdefault(resource, {})[node] = count
        return found


LAYOUTS = (
    Layout("8 VFs on one socket", (1,), 8),
    Layout("8 VFs on each socket", (0, 1), 8),
    Layout("16 VFs and 4 GPUs on each socket", (0, 1), 16, 4),
)

_PLAIN = (2, 4, 4, 8, 8, 16)
_WITH_VFS: tuple[tuple[int, dict[ResourceName, int]], ...] = (
    (4, {VF: 1}),
    (8, {VF: 1}),
    (8, {VF: 2}),
    (16, {VF: 2}),
)
_WITH_GPUS: tuple[tuple[int, dict[ResourceName, int]], ...] = ((8, {GPU: 1}), (16, {GPU: 1, VF: 1}))


@cache
def two_socket_machines() -> tuple[Topology, ...]:
    """Return the machines that come with kvplace and have two sockets."""
    return tuple(machine for machine in map(read_machine, machine_names()) if len(machine.packages) == 2)


Burst = tuple[SimulatedVm, ...]
"""VMs that are created at the same moment."""


def device_load(layout: Layout, seed: int, vms: int) -> Iterator[Burst | Departure]:
    """Yield so many VMs in bursts, and the ends of VMs; the same for every way to place them."""
    chance = random.Random(f"devices {layout.name} {seed}")
    machines = two_socket_machines()
    cpus = sum(machine.allocatable.bit_count() for machine in machines)
    limits: dict[ResourceName, float] = {}
    for machine in machines:
        for resource, by_node in layout.devices_of(machine).items():
            limits[resource] = limits.get(resource, 0) + MOST_DEVICES * sum(by_node.values())
    active, in_use = ActiveVms(), dict.fromkeys(limits, 0)
    number = 0
    while number < vms:
        burst: list[SimulatedVm] = []
        for _ in range(chance.randint(1, MOST_AT_ONCE)):
            size, devices = _kind(chance, GPU in limits)
            if any(in_use[name] + count > limits[name] for name, count in devices.items()):
                devices = {}
            request = Request(size, PinningOptions(scope=Scope.ANY), devices=devices)
            vm = SimulatedVm(str(number), request, chance.expovariate(1.0), active.now)
            while active.cpus + size > FILL * cpus and (departure := active.end_next()) is not None:
                for name, count in departure.vm.request.devices.items():
                    in_use[name] -= count
                if departure.vm in burst:
                    burst.remove(departure.vm)
                else:
                    yield departure
            active.start(vm)
            for name, count in devices.items():
                in_use[name] += count
            burst.append(vm)
            number += 1
        yield tuple(burst)


def _kind(chance: random.Random, with_gpus: bool) -> tuple[int, Mapping[ResourceName, int]]:
    if chance.random() < 0.6:
        return chance.choice(_PLAIN), {}
    return chance.choice(_WITH_VFS + _WITH_GPUS if with_gpus else _WITH_VFS)


def with_device_numa(request: Request, mode: DeviceNuma) -> Request:
    """Return a request with another `device-numa`."""
    return replace(request, options=replace(request.options, device_numa=mode))
