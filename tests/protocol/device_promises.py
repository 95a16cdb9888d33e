"""Promise D: a VM that must be beside its devices is, and cores stay with memory that devices access."""

from __future__ import annotations

from dataclasses import replace

from kvplace.core.allocator.allocate import try_place
from kvplace.core.ledger import Ledger, LedgerChange
from kvplace.core.placement import PodPlacement
from kvplace.core.request import OnFailure
from kvplace.core.request_json import read_pod_request
from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.object_records import PodRecord
from kvplace.nodes.node_machine import Unusable, machine_of_node
from tests.kube.faulty_cluster import FaultyCluster
from tests.protocol.devices import STRICT, is_local, requested_devices
from tests.protocol.node import SimulatedNode, read_placement
from tests.protocol.run_counts import Diary

RETRIED_S = 15.0
"""In calm, a kube-scheduler tries a pod again within this time."""


class BrokenPromise(AssertionError):
    """A promise of the design does not hold."""


class DevicePromises:
    """The promises about VMs with devices, from the truth that `Promises` knows."""

    _cluster: FaultyCluster
    _diary: Diary
    _nodes: dict[NodeName, SimulatedNode]
    _pods: dict[PodUid, PodRecord]
    robbed: dict[PodUid, NodeName]
    replaced: set[NodeName]

    def __init__(self) -> None:
        self.followed: set[PodUid] = set()
        """Pods that got other cores after their bind, beside their devices."""
        self.is_quiet = False
        """Whether nothing is late and no pod ends: what is predicted holds."""

    def break_one(self, why: str) -> None:
        """Note a promise that does not hold."""
        raise NotImplementedError

    def ledger(self, node: NodeName) -> Ledger:
        """Return a node's ledger, empty if it has none."""
        raise NotImplementedError

    def has_changed(self, node: NodeName, seconds: float) -> bool:
        """Whether a node's ledger was written within the last seconds."""
        raise NotImplementedError

    def nodes_with_devices_for(self, pod: PodRecord) -> tuple[str, ...]:
        """Return the nodes where kube-scheduler finds enough devices for a pod."""
        here = [other for other in self._pods.values() if other.node and not other.has_ended]
        return tuple(
            node.name
            for node in self._nodes.values()
            if node.devices is not None
            and node.devices.has_room(pod, (other for other in here if other.node == node.name))
        )

    def _check_devices(
        self, node: SimulatedNode, uid: PodUid, at_start: PodPlacement, in_force: PodPlacement
    ) -> None:
        if node.devices is None or at_start.placement.floats or in_force.placement.floats:
            return
        nodes = node.devices.nodes_of(uid)
        where = f"on NUMA nodes {in_force.placement.numa_nodes} of {node.name}, its devices on {set(nodes)}"
        waits = at_start.device_numa in STRICT and at_start.on_failure is OnFailure.WAIT
        if waits and in_force.device_numa in STRICT and not is_local(in_force, nodes, node.topology):
            raise BrokenPromise(f"D: {uid} must be beside its devices and runs {where}")
        if nodes and not set(in_force.placement.numa_nodes) <= set(at_start.placement.numa_nodes):
            raise BrokenPromise(f"D: {uid} left its memory on {at_start.placement.numa_nodes}, runs {where}")

    def _follows_devices(self, before: PodRecord | None, after: PodRecord) -> bool:
        """Whether a pod gets other cores because its devices are not local to the cores of its bind."""
        node = self._nodes.get(after.node)
        if after.uid in self.followed:
            return True
        if before is None or not before.placement or node is None or node.devices is None:
            return False
        bound = read_placement(before.placement)
        if is_local(bound, node.devices.nodes_of(after.uid), node.topology):
            return False
        self.followed.add(after.uid)
        self._diary.happened["followed"] += 1
        return True

    def look_at_admitted(self, uid: PodUid) -> None:
        """Check a pod that has just got its devices: where nothing is late, they are as predicted."""
        pod = self._pods.get(uid)
        if pod is None or not pod.placement or not self.is_quiet or not requested_devices(pod):
            return
        node, bound = self._nodes[pod.node], read_placement(pod.placement)
        assert node.devices is not None
        self._diary.happened["admitted in peace"] += 1
        local = is_local(bound, node.devices.nodes_of(uid), node.topology)
        foreseen = node.devices.policy != "none" and node.name not in self.replaced
        if foreseen and bound.device_numa in STRICT and not bound.placement.floats and not local:
            self.break_one(f"D: {pod.name} is not beside its devices, and nothing was late on {pod.node}")

    def check_gates(self) -> None:
        """Check, in calm, that no VM waits for cores beside its devices while they are free."""
        self._check_gates(0.0)

    def check_gates_since_the_last_try(self) -> None:
        """Check the same, but for cores that were released just now."""
        self._check_gates(RETRIED_S)

    def _check_gates(self, retried_s: float) -> None:
        for node in self._nodes.values():
            for uid, running in node.containers.items():
                pod = self._pods.get(uid)
                is_left = uid in self.robbed or self.has_changed(node.name, retried_s)
                waits = running.has_hook and running.qemu is None
                if node.devices is None or not waits or is_left or pod is None:
                    continue
                if sum(other.vmi_uid == pod.vmi_uid for other in self._pods.values()) > 1:
                    continue  # nothing moves it while KubeVirt does
                self._diary.happened["waits at the hook"] += 1
                machine = machine_of_node(
                    self._cluster._nodes.records.get(node.name), self._cluster._topologies.get(node.name)
                )
                if isinstance(machine, Unusable) or running.in_force is None:
                    continue
                request = read_pod_request(pod.request).request
                beside = replace(request, devices={}, device_nodes=node.devices.nodes_of(uid))
                others = self.ledger(node.name).after(LedgerChange(releases=(uid,)))
                if try_place(machine.topology, machine.free(others), beside) is not None:
                    raise BrokenPromise(
                        f"D: {pod.name} waits at the hook, and there is room beside its devices"
                    )
