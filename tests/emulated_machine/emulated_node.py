"""A node on an emulated machine: its objects in a real API server, its agent, and VMs of real QEMU.

The kubelet, the scheduler and `serve` are played: they write pods, their status, claims and placements, and
lay out the cgroups.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from harness.control_plane.cluster import MERGE_PATCH, ControlPlane, RequestRefused
from harness.emulated_machine.initramfs import HOST_ADDRESS
from harness.emulated_machine.machine import EmulatedMachine
from harness.kvplace_cluster.installation import MANIFESTS
from harness.pod_cgroups import container_id
from kvplace.core.allocator.allocate import place
from kvplace.core.annotations import read_options
from kvplace.core.cpuset import format_cpu_list, parse_cpu_list
from kvplace.core.free_resources import free_of
from kvplace.core.ledger import Claim, Ledger, LedgerChange, claim_of, merge_patch
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import OnFailure, Request
from kvplace.core.scalars import NO_CPUS, Bytes, CpuMask, NodeName, PodUid
from kvplace.core.topology import Topology
from kvplace.core.well_known_names import PLACED_LABEL
from tests.emulated_machine import node_inside as inside
from tests.emulated_machine import vm_keeper
from tests.kubevirt_documents import DOMAINS

NODE = NodeName("emulated")
NAMESPACE = "vms"
MEGABYTES = 64
RESERVED = parse_cpu_list("0-1")
ASKED = {
    "cpu-set": "one-numa",
    "kvplace.io/numa-memory": "strict",
}
DOCUMENT = "09-amd64-iothreads-shared.domain.xml"
_KILLED_S = 180.0
"""How long a killed agent may take to be gone, while the kernel moves memory for it on a busy host."""

Json = dict[str, Any]
T = TypeVar("T")


def install(plane: ControlPlane) -> None:
    """Make the kinds of objects that a node and its agent have."""
    for folder in ("crd", "node-resource-topology"):
        plane.kubectl("apply", "--server-side", "-k", str(MANIFESTS / folder))
    plane.create_namespace(NAMESPACE)


@dataclass
class Guest:
    """One VM of the node."""

    uid: PodUid
    pod: str
    placement: PodPlacement
    cgroup: str
    running: vm_keeper.RunningVm


@dataclass
class Node:
    """The emulated node and its objects."""

    plane: ControlPlane
    machine: EmulatedMachine
    driver: str
    emulator_threads: str
    topology: Topology
    agent: int = 0
    containers: int = 0
    cgroups: dict[str, str] = field(default_factory=dict)
    """Folders of containers without a claim, by pod."""
    ledger: Ledger = field(default_factory=Ledger)
    keepers: list[int] = field(default_factory=list)

    def start_agent(self) -> None:
        port = int(self.plane.url.rpartition(":")[2])
        server = inside.ApiServer(HOST_ADDRESS, port, self.plane.admin.token, self.plane.ca_file.read_text())
        self.agent = self.machine.call(inside.start_agent, NODE, server, format_cpu_list(RESERVED))

    def kill_agent(self, after_s: float = 0.0) -> None:
        """End the agent as a crash does, some time from now."""
        self.machine.call_within(_KILLED_S + 60, inside.kill_agent, self.agent, after_s, _KILLED_S)

    def register(self) -> None:
        """Create the node's objects, as the kubelet and `serve` do."""
        self.plane.request(
            "POST", "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}
        )
        ledger = {
            "apiVersion": "kvplace.io/v1alpha1",
            "kind": "NodeLedger",
            "metadata": {"name": NODE},
            "spec": {"owners": {}, "claims": {}},
        }
        self.plane.request("POST", LEDGER.rpartition("/")[0], ledger)

    def leave(self) -> None:
        """End the agent and remove the node's objects."""
        self.kill_agent()
        self.machine.call(inside.end_pods, self.keepers)
        self.plane.request("DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods?gracePeriodSeconds=0")
        for path in (LEDGER, TOPOLOGY, f"/api/v1/nodes/{NODE}"):
            self.plane.request("DELETE", path)

    def await_topology(self) -> Json:
        """Wait until the agent has published the machine and its own state."""

        def read() -> Json:
            try:
                return self.plane.request("GET", TOPOLOGY)
            except RequestRefused as refused:
                if refused.status != 404:
                    raise
                return {}

        return await_truth(read, lambda found: "enforcement" in found.get("status", {}), self)

    def await_condition(self, guest: Guest, status: str, text: str) -> None:
        """Wait until the pod has the condition."""
        await_truth(
            lambda: self.condition(guest.pod),
            lambda found: found.get("status") == status and text in found["message"],
            self,
        )

    def write_ledger(self, change: LedgerChange) -> None:
        patch = {"spec": merge_patch(self.ledger, change)}
        self.plane.request("PATCH", LEDGER, patch, content_type=MERGE_PATCH)
        self.ledger = self.ledger.after(change)

    def create_pod(
        self, name: str, containers: tuple[str, ...], *, vm: bool
    ) -> tuple[PodUid, dict[str, str]]:
        """Create a bound pod, and make it run as the kubelet does.

        Gives its UID, and the cgroup of each container.
        """
        owner = {
            "apiVersion": "kubevirt.io/v1",
            "kind": "VirtualMachineInstance",
            "name": name,
            "uid": f"vmi-{name}",
            "controller": True,
        }
        stored = self.plane.request(
            "POST",
            f"/api/v1/namespaces/{NAMESPACE}/pods",
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": name,
                    "labels": {PLACED_LABEL: "true"} if vm else {},
                    "ownerReferences": [owner] if vm else [],
                },
                "spec": {
                    "nodeName": NODE,
                    "containers": [{"name": each, "image": "kvplace.test/none"} for each in containers],
                },
            },
        )
        uid = PodUid(stored["metadata"]["uid"])
        cgroups, statuses = {}, []
        for each in containers:
            self.containers += 1
            id_ = container_id(self.containers)
            cgroups[each] = self.machine.call(
                inside.make_container, uid, id_, self.driver, busy=each != "compute"
            )
            statuses.append(
                {
                    "name": each,
                    "containerID": f"containerd://{id_}",
                    "image": "",
                    "imageID": "",
                    "ready": True,
                    "restartCount": 0,
                    "state": {"running": {}},
                }
            )
        status = {"status": {"phase": "Running", "containerStatuses": statuses}}
        self.plane.request("PATCH", f"{pod_path(name)}/status", status, content_type=MERGE_PATCH)
        return uid, cgroups

    def annotate(self, pod: str, placement: PodPlacement) -> None:
        patch = {"metadata": {"annotations": {"kvplace.io/placement": placement.to_json()}}}
        self.plane.request("PATCH", pod_path(pod), patch, content_type=MERGE_PATCH)

    def condition(self, pod: str) -> Json:
        stored = self.plane.request("GET", pod_path(pod))
        found = [each for each in stored["status"].get("conditions", []) if each["type"] == PINNED]
        return found[0] if found else {}

    def await_pinned(self, guest: Guest) -> None:
        """Wait until the condition names the pod's revision."""
        begins = f"revision {guest.placement.revision}:"
        await_truth(
            lambda: self.condition(guest.pod),
            lambda found: found.get("status") == "True" and found["message"].startswith(begins),
            self,
        )

    def choose(self, *, away_from: CpuMask = NO_CPUS) -> Placement:
        """Choose cores as the scheduler does."""
        options = read_options({**ASKED, "kvplace.io/emulator-threads": self.emulator_threads})
        assert options is not None
        free = free_of(self.topology, self.ledger)
        free = replace(free, cpus=CpuMask(free.cpus & ~away_from))
        chosen = place(self.topology, free, Request(4, options, memory=Bytes(MEGABYTES << 20)))
        assert isinstance(chosen, Placement), chosen
        return chosen

    def start_vm(self, name: str) -> Guest:
        """Claim cores, bind, and start a VM on them."""
        uid, cgroups = self.create_pod(name, ("compute", "hook-sidecar-0"), vm=True)
        chosen = self.choose()
        bound = PodPlacement(uid, NODE, "", OnFailure.WAIT, chosen, enforced=True)
        self.write_ledger(LedgerChange((self.claim(uid, name, chosen),)))
        self.annotate(name, bound)
        # As the gate of the sidecar: QEMU does not start before the agent has taken the CPUs from others.
        sidecar = cgroups["hook-sidecar-0"]
        await_truth(
            lambda: self.machine.call(inside.effective_cpus, sidecar),
            lambda cpus: not parse_cpu_list(cpus) & chosen.owned,
            self,
        )
        self.cgroups[f"{name}-sidecar"] = sidecar
        vmi = json.dumps({"metadata": {"namespace": NAMESPACE, "name": name, "uid": f"vmi-{name}"}})
        document = str(DOMAINS / DOCUMENT)
        vm = vm_keeper.Vm(cgroups["compute"], sidecar, document, MEGABYTES, vmi, bound.to_json())
        running = self.machine.call_within(200, vm_keeper.start, vm)
        self.keepers.append(running.keeper)
        return Guest(uid, name, bound, cgroups["compute"], running)

    def claim(self, uid: PodUid, name: str, chosen: Placement) -> Claim:
        return claim_of(uid, chosen, namespace=NAMESPACE, pod=name, vmi=name, since="2026-01-01T00:00:00Z")

    def look(self, guest: Guest) -> inside.Seen:
        return self.machine.call(inside.look_at_vm, guest.running.pid, guest.cgroup, MEGABYTES)

    def await_vm(self, guest: Guest, seconds: float = 120.0) -> tuple[inside.Seen, float]:
        """Wait until a VM is on the CPUs of its placement, and check this."""
        wanted = wanted_of(guest)
        seen, took = self.machine.call_within(
            seconds + 60, inside.await_vm, guest.running.pid, guest.cgroup, MEGABYTES, wanted, seconds
        )
        assert inside.as_wanted(seen, wanted), f"{seen} instead of {wanted}\n{self.log()}"
        return seen, took

    def relocate(self, guest: Guest, chosen: Placement) -> None:
        """Write the next revision as `serve` does: the claim has both, then the pod's annotation."""
        both = self.claim(guest.uid, guest.pod, chosen)
        before = guest.placement.placement
        both = replace(both, cpus=CpuMask(both.cpus | before.cpus), owned=CpuMask(both.owned | before.owned))
        self.write_ledger(LedgerChange((both,)))
        guest.placement = replace(guest.placement, placement=chosen, revision=guest.placement.revision + 1)
        self.annotate(guest.pod, guest.placement)

    def settle(self, guest: Guest) -> None:
        """Release the old cores, as `serve` does when the agent has confirmed."""
        self.write_ledger(LedgerChange((self.claim(guest.uid, guest.pod, guest.placement.placement),)))

    def others_share_the_rest(self, *guests: Guest) -> None:
        """See that everything else is on the CPUs that no VM owns."""
        owned = 0
        for guest in guests:
            owned |= guest.placement.placement.owned
        pool = format_cpu_list(CpuMask(self.topology.cpus & ~owned))
        for name, folder in self.cgroups.items():
            await_truth(
                partial(self.machine.call, inside.effective_cpus, folder),
                lambda cpus: cpus == pool,
                self,
                f"{name} should have {pool}",
            )

    def log(self) -> str:
        return self.machine.call(inside.agent_log)[-6000:]


TOPOLOGY = f"/apis/kvplace.io/v1alpha1/nodetopologies/{NODE}"
LEDGER = f"/apis/kvplace.io/v1alpha1/nodeledgers/{NODE}"
PINNED = "kvplace.io/Pinned"


def pod_path(name: str) -> str:
    return f"/api/v1/namespaces/{NAMESPACE}/pods/{name}"


def await_truth(
    read: Callable[[], T], holds: Callable[[T], bool], node: Node, what: str = "", seconds: float = 180.0
) -> T:
    """Ask until the answer is as wanted."""
    deadline = time.monotonic() + seconds
    while not holds(answer := read()):
        assert time.monotonic() < deadline, f"{what}: it is still {answer}\n{node.log()}"
        time.sleep(0.2)
    return answer


def wanted_of(guest: Guest) -> inside.Seen:
    """The facts that the kernel must state of a VM."""
    placement = guest.placement.placement
    everything = placement.cpus | placement.owned | placement.emulator_cpus
    for cpus in placement.io_thread_cpus:
        everything |= cpus
    return inside.Seen(
        vcpus={vcpu: format_cpu_list(CpuMask(1 << cpu)) for vcpu, cpu in enumerate(placement.vcpus)},
        io_threads={n + 1: format_cpu_list(placement.cpus_of_io_thread(n)) for n in range(2)},
        emulator={"": format_cpu_list(placement.emulator_cpus)},
        cpuset=format_cpu_list(CpuMask(everything)),
        mems="",
        pages=dict.fromkeys(placement.memory_nodes, 0),
        policies=set(),
    )
