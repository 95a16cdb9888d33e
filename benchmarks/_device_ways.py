"""Ways to place VMs with devices on a few machines: kvplace, and the peers as far as they are described.

A way gets VMs that are created at once. With device plugins a pod is bound first, and the kubelet then takes
the devices; the kubelet admits the pods of a burst in any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Protocol

from benchmarks._device_load import Burst, Layout, two_socket_machines, with_device_numa
from benchmarks.peers.koordinator import most_allocated
from benchmarks.peers.kube_scheduler import Score
from benchmarks.peers.kubelet import Take, packed, with_numa_mask
from benchmarks.peers.topology_manager import Hint, Wanted, admitted, amounts_of, cpus_wanted, take_devices
from kvplace.core.allocator.allocate import place
from kvplace.core.cluster.node_choice import Candidate, Strategy, best_candidate
from kvplace.core.cpuset import cpus_of
from kvplace.core.device_locality import Certainty, predicted_devices, predicted_held
from kvplace.core.free_resources import Free, free_of
from kvplace.core.ledger import Ledger, claim_of
from kvplace.core.node_devices import NO_NUMA, DeviceCount, NodeDevices, TopologyPolicy
from kvplace.core.placement import Placement, Refusal
from kvplace.core.request import DeviceNuma, Request
from kvplace.core.scalars import CpuMask, NodeName, NumaId, PodUid, ResourceName
from kvplace.core.topology import Topology
from kvplace.nodes.node_machine import NodeMachine, NodeSnapshot
from kvplace.scheduler.fit_table import FitTable
from kvplace.simulate.scenario import SimulatedVm

Devices = Mapping[ResourceName, Mapping[NumaId, int]]
"""How many devices of each resource, by NUMA node."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The fate of one pod."""

    vm: SimulatedVm
    topology: Topology | None = None
    """That of its machine; None if the VM does not run."""
    cpus: int = 0
    devices: Devices | None = None
    pod_failed: bool = False
    """The kubelet did not admit it."""
    certainty: Certainty | None = None
    """Of the prediction, where there was one."""
    predicted: bool = False
    """The devices are on the NUMA nodes of the prediction."""
    local_at_first: bool = False
    """The devices were local to the cores of the bind."""
    corrected: bool = False
    """It got other cores before its QEMU existed."""

    @property
    def device_nodes(self) -> frozenset[NumaId]:
        """The NUMA nodes of its devices."""
        return frozenset(node for by_node in (self.devices or {}).values() for node in by_node)


class Way(Protocol):
    """One way to place VMs."""

    def start(self, burst: Sequence[SimulatedVm]) -> list[Outcome]:
        """Create pods at the same moment."""

    def end(self, vm: SimulatedVm) -> None:
        """End a VM; nothing if it does not run."""


class Machine:
    """One machine: its free CPUs, its free devices, and what each VM has of them."""

    def __init__(self, topology: Topology, layout: Layout) -> None:
        self.topology = topology
        self.every = sum(1 << node.id for node in topology.numa_nodes)
        self.devices: Devices = layout.devices_of(topology)
        self.free_devices = {name: dict(by_node) for name, by_node in self.devices.items()}
        self.free: int = topology.allocatable
        self.waiting: dict[str, Request] = {}
        """Bound pods without devices yet, and without CPUs where the kubelet takes these."""
        self._running: dict[str, tuple[int, Devices]] = {}

    def has_room(self, request: Request) -> bool:
        """Whether kube-scheduler sends a pod here: it counts CPUs and devices of the whole machine."""
        waiting = self.waiting.values()
        cpus = self.free.bit_count() - sum(one.vcpus for one in waiting)
        return cpus >= request.vcpus and all(
            sum(self.free_devices.get(name, {}).values()) - sum(one.devices.get(name, 0) for one in waiting)
            >= count
            for name, count in request.devices.items()
        )

    def score(self, request: Request, score: Score) -> int:
        """Return kube-scheduler's score by CPUs."""
        whole = self.topology.allocatable.bit_count()
        used = whole - self.free.bit_count() + sum(one.vcpus for one in self.waiting.values())
        return score((used + request.vcpus,), (used,), (whole,))

    def devices_wanted(self, request: Request) -> tuple[Wanted, ...]:
        """Return what the kubelet's device manager gives hints for."""
        return tuple(
            Wanted(amounts_of(self.devices[name], self.free_devices[name]), count)
            for name, count in sorted(request.devices.items())
        )

    def take_by_hint(self, request: Request, hint: Hint, random: Random) -> Devices | None:
        """Return the devices that the kubelet takes; None if it has too few."""
        nodes = None if hint.nodes is None else list(cpus_of(CpuMask(hint.nodes)))
        found: dict[ResourceName, Mapping[NumaId, int]] = {}
        for name, count in request.devices.items():
            taken = take_devices(self.free_devices[name], count, nodes, random)
            if taken is None:
                return None
            found[name] = taken
        return found

    def matching_node(self, request: Request, *, cpus: int = 0) -> NumaId | None:
        """Return the first NUMA node with all devices, as matchAttribute asks, and so many CPUs."""
        for node in self.topology.numa_nodes:
            if (node.cpus & self.free).bit_count() >= cpus and all(
                self.free_devices.get(name, {}).get(node.id, 0) >= count
                for name, count in request.devices.items()
            ):
                return node.id
        return None

    def run(self, vm: SimulatedVm, cpus: int, devices: Devices) -> None:
        """Let a VM run on some CPUs with some devices."""
        assert not cpus & ~self.free
        assert cpus.bit_count() == vm.request.vcpus
        self.free &= ~cpus
        for name, by_node in devices.items():
            for node, count in by_node.items():
                self.free_devices[name][node] -= count
        self._running[vm.id] = cpus, devices

    def end(self, vm: SimulatedVm) -> bool:
        """Free what a VM has; returns whether it ran here."""
        if vm.id not in self._running:
            return False
        cpus, devices = self._running.pop(vm.id)
        self.free |= cpus
        for name, by_node in devices.items():
            for node, count in by_node.items():
                self.free_devices[name][node] += count
        return True


def machines(layout: Layout) -> list[Machine]:
    """Return one empty machine of each type."""
    return [Machine(topology, layout) for topology in two_socket_machines()]


def is_local(topology: Topology, cpus: int, devices: Devices) -> bool:
    """Whether a VM has a CPU on the NUMA node of each device."""
    nodes = set(topology.nodes_of(CpuMask(cpus)))
    return all(node in nodes for by_node in devices.values() for node in by_node)


class Kvplace:
    """kvplace beside a kubelet with CPU manager policy `none`; devices of plugins, or of claims."""

    def __init__(
        self,
        layout: Layout,
        seed: int,
        mode: DeviceNuma,
        policy: str,
        *,
        strategy: Strategy = Strategy.PACK,
        claims: bool = False,
    ) -> None:
        """With `claims` kube-scheduler allocates the devices (DRA), and `policy` does not matter."""
        self._mode = mode
        self._strategy = strategy
        self._policy = policy
        self._claims = claims
        self._random = Random(seed)
        self._machines = {NodeName(f"n{n}"): one for n, one in enumerate(machines(layout))}
        self._placed: dict[NodeName, dict[str, Placement]] = {name: {} for name in self._machines}
        self._table = FitTable(self._snapshot, strategy)

    def start(self, burst: Burst | Sequence[SimulatedVm]) -> list[Outcome]:
        outcomes, bound = [], []
        for vm in burst:
            placed = self._bind_beside_claim(vm) if self._claims else self._bind(vm)
            if placed is None:
                outcomes.append(Outcome(vm))
            elif isinstance(placed, Outcome):
                outcomes.append(placed)
            else:
                bound.append((vm, placed))
        self._random.shuffle(bound)
        return outcomes + [self._admit(vm, *placed) for vm, placed in bound]

    def end(self, vm: SimulatedVm) -> None:
        for name, machine in self._machines.items():
            if machine.end(vm):
                del self._placed[name][vm.id]
                self._table.node_changed(name)

    def _bind(
        self, vm: SimulatedVm
    ) -> tuple[NodeName, Placement, Certainty | None, frozenset[NumaId]] | None:
        request = with_device_numa(vm.request, self._mode)
        names = [name for name, machine in self._machines.items() if machine.has_room(request)]
        best = self._best(names, request)
        if best is None:
            return None
        name = best.node
        certainty, nodes = None, frozenset[NumaId]()
        if request.devices:
            predicted = predicted_devices(self._devices(name), request.devices)
            certainty, nodes = predicted.certainty, predicted.nodes
        self._machines[name].waiting[vm.id] = request
        self._claim(name, vm, best.placement)
        return name, best.placement, certainty, nodes

    def _admit(
        self,
        vm: SimulatedVm,
        name: NodeName,
        placement: Placement,
        certainty: Certainty | None,
        predicted: frozenset[NumaId],
    ) -> Outcome:
        machine = self._machines[name]
        del machine.waiting[vm.id]
        hint = admitted(self._policy, machine.every, machine.devices_wanted(vm.request))
        devices = None if hint is None else machine.take_by_hint(vm.request, hint, self._random)
        if devices is None:
            self._release(name, vm)
            return Outcome(vm, pod_failed=True, certainty=certainty)
        topology, cpus = machine.topology, placement.cpus
        found = frozenset(node for by_node in devices.values() for node in by_node)
        local = is_local(topology, cpus, devices)
        corrected = False
        if not local and self._mode is not DeviceNuma.OFF:
            after = self._follow(name, vm, found)
            if after is not None:
                corrected, cpus = True, after.cpus
                self._claim(name, vm, after)
            elif self._mode is DeviceNuma.REQUIRED:  # the hook does not let it start
                self._release(name, vm)
                return Outcome(vm, certainty=certainty, predicted=found <= predicted)
        machine.run(vm, cpus, devices)
        self._table.node_changed(name)
        return Outcome(
            vm,
            topology,
            cpus,
            devices,
            certainty=certainty,
            predicted=found <= predicted,
            local_at_first=local,
            corrected=corrected,
        )

    def _bind_beside_claim(self, vm: SimulatedVm) -> Outcome | None:
        request = with_device_numa(vm.request, self._mode)
        names: dict[NumaId, list[NodeName]] = {}
        for name, machine in self._machines.items():
            node = machine.matching_node(request)
            if node is not None:
                names.setdefault(node if request.devices else NO_NUMA, []).append(name)
        found: list[Candidate] = []
        for node, named in names.items():
            near = frozenset([node] if request.devices else [])
            best = self._best(named, replace(request.without_devices, device_nodes=near))
            found += [best] if best is not None else []
        chosen = best_candidate(found, self._strategy)
        if chosen is None:
            return None
        name, machine, cpus = chosen.node, self._machines[chosen.node], chosen.placement.cpus
        node = machine.matching_node(request)
        assert node is not None
        devices = {resource: {node: count} for resource, count in request.devices.items()}
        self._claim(name, vm, chosen.placement)
        machine.run(vm, cpus, devices)
        self._table.node_changed(name)
        local = is_local(machine.topology, cpus, devices)
        return Outcome(vm, machine.topology, cpus, devices, local_at_first=local)

    def _follow(self, name: NodeName, vm: SimulatedVm, nodes: frozenset[NumaId]) -> Placement | None:
        """Choose cores beside the devices that the kubelet has taken, as before QEMU exists."""
        request = with_device_numa(vm.request.without_devices, DeviceNuma.REQUIRED)
        others = {uid: one for uid, one in self._placed[name].items() if uid != vm.id}
        machine = self._machines[name]
        found = place(machine.topology, _free(machine, others, None), replace(request, device_nodes=nodes))
        return None if isinstance(found, Refusal) else found

    def _best(self, names: Iterable[NodeName], request: Request) -> Candidate | None:
        answers = self._table.answers_at_once(list(names), request)
        return best_candidate((a for a in answers.values() if isinstance(a, Candidate)), self._strategy)

    def _claim(self, name: NodeName, vm: SimulatedVm, placement: Placement) -> None:
        self._placed[name][vm.id] = placement
        self._table.node_changed(name)

    def _release(self, name: NodeName, vm: SimulatedVm) -> None:
        del self._placed[name][vm.id]
        self._table.node_changed(name)

    def _devices(self, name: NodeName) -> NodeDevices:
        machine = self._machines[name]
        counts = [
            DeviceCount(resource, node, total, machine.free_devices[resource][node])
            for resource, by_node in machine.devices.items()
            for node, total in by_node.items()
        ]
        devices = NodeDevices.of(counts, TopologyPolicy(self._policy))
        for one in machine.waiting.values():
            devices = devices.without(predicted_held(devices, one.devices))
        return devices

    def _snapshot(self, name: NodeName) -> NodeSnapshot:
        machine = self._machines[name]
        devices = None if self._claims else self._devices(name)
        topology = machine.topology
        return NodeSnapshot(NodeMachine(topology), _free(machine, self._placed[name], devices))


def _free(machine: Machine, placed: Mapping[str, Placement], devices: NodeDevices | None) -> Free:
    claims = [claim_of(PodUid(uid), placement) for uid, placement in placed.items()]
    return free_of(machine.topology, Ledger(), claims, devices=devices)


class _Blind:
    """kube-scheduler counts CPUs and devices of whole machines and takes the best score."""

    def __init__(self, layout: Layout, seed: int, score: Score) -> None:
        self._score = score
        self._random = Random(seed)
        self._machines = machines(layout)

    def end(self, vm: SimulatedVm) -> None:
        for machine in self._machines:
            machine.end(vm)

    def _chosen(self, request: Request, able: Iterable[Machine]) -> Machine | None:
        scored = [(one.score(request, self._score), one) for one in able]
        best = max((score for score, _ in scored), default=0)
        return self._random.choice([one for score, one in scored if score == best]) if scored else None


class Kubelets(_Blind):
    """The Topology Manager with the static CPU manager, after a blind choice of the machine."""

    def __init__(self, layout: Layout, seed: int, score: Score, policy: str) -> None:
        super().__init__(layout, seed, score)
        self._policy = policy

    def start(self, burst: Sequence[SimulatedVm]) -> list[Outcome]:
        outcomes, bound = [], []
        for vm in burst:
            machine = self._chosen(vm.request, (one for one in self._machines if one.has_room(vm.request)))
            if machine is None:
                outcomes.append(Outcome(vm))
            else:
                machine.waiting[vm.id] = vm.request
                bound.append((vm, machine))
        self._random.shuffle(bound)
        return outcomes + [self._admit(vm, machine) for vm, machine in bound]

    def _admit(self, vm: SimulatedVm, machine: Machine) -> Outcome:
        del machine.waiting[vm.id]
        topology, request = machine.topology, vm.request
        wanted = (cpus_wanted(topology, machine.free, request.vcpus), *machine.devices_wanted(request))
        hint = admitted(self._policy, machine.every, wanted)
        if hint is None:
            return Outcome(vm, pod_failed=True)
        devices = machine.take_by_hint(request, hint, self._random)
        assert devices is not None
        cpus = _cpus_by_hint(machine, request.vcpus, hint)
        machine.run(vm, cpus, devices)
        return Outcome(vm, topology, cpus, devices, local_at_first=is_local(topology, cpus, devices))


class Koordinator(_Blind):
    """The same hints in the scheduler, which chooses the CPUs too: no pod fails on its machine."""

    def __init__(self, layout: Layout, seed: int, score: Score, policy: str) -> None:
        super().__init__(layout, seed, score)
        self._policy = policy

    def start(self, burst: Sequence[SimulatedVm]) -> list[Outcome]:
        return [self._start(vm) for vm in burst]

    def _start(self, vm: SimulatedVm) -> Outcome:
        request = vm.request
        able = {one: hint for one in self._machines if (hint := self._hint(one, request)) is not None}
        machine = self._chosen(request, able)
        if machine is None:
            return Outcome(vm)
        topology, hint = machine.topology, able[machine]
        devices = machine.take_by_hint(request, hint, self._random)
        assert devices is not None
        cpus = _cpus_by_hint(machine, request.vcpus, hint, take=most_allocated)
        machine.run(vm, cpus, devices)
        return Outcome(vm, topology, cpus, devices, local_at_first=is_local(topology, cpus, devices))

    def _hint(self, machine: Machine, request: Request) -> Hint | None:
        if not machine.has_room(request):
            return None
        cpus = cpus_wanted(machine.topology, machine.free, request.vcpus)
        return admitted(self._policy, machine.every, (cpus, *machine.devices_wanted(request)))


class Dra(_Blind):
    """Devices of one claim on one NUMA node, first fit; the CPUs by the kubelet, or in the same claim."""

    def __init__(self, layout: Layout, seed: int, score: Score, *, cpus_too: bool) -> None:
        super().__init__(layout, seed, score)
        self._cpus_too = cpus_too

    def start(self, burst: Sequence[SimulatedVm]) -> list[Outcome]:
        return [self._start(vm) for vm in burst]

    def _start(self, vm: SimulatedVm) -> Outcome:
        request = vm.request
        least = request.vcpus if self._cpus_too else 0
        able = {
            one: node
            for one in self._machines
            if one.has_room(request) and (node := one.matching_node(request, cpus=least)) is not None
        }
        machine = self._chosen(request, able)
        if machine is None:
            return Outcome(vm)
        topology, node = machine.topology, able[machine]
        inside = topology.node_by_id[node].cpus if self._cpus_too else 0
        cpus = (
            packed(topology, machine.free & inside, request.vcpus)
            if self._cpus_too
            else with_numa_mask(topology, machine.free, request.vcpus)
        )
        assert cpus is not None
        devices = {resource: {node: count} for resource, count in request.devices.items()}
        machine.run(vm, cpus, devices)
        return Outcome(vm, topology, cpus, devices, local_at_first=is_local(topology, cpus, devices))


def _cpus_by_hint(machine: Machine, count: int, hint: Hint, take: Take = packed) -> int:
    nodes = machine.every if hint.nodes is None else hint.nodes
    cpus = with_numa_mask(machine.topology, machine.free, count, nodes=cpus_of(CpuMask(nodes)), take=take)
    assert cpus is not None
    return cpus
