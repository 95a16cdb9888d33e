"""Which CPUs of a node may be given out, from the objects that describe it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplace.core.allocator.allocate import place
from kvplace.core.cluster.node_choice import Fit
from kvplace.core.cpuset import mask_of
from kvplace.core.free_resources import Free, MemoryInUse
from kvplace.core.ledger import Ledger, claim_of
from kvplace.core.node_devices import DeviceCount, DeviceReport, NodeDevices, PodDevice, TopologyPolicy
from kvplace.core.placement import Placement, Refusal
from kvplace.core.request import DeviceNuma, PinningOptions, Request
from kvplace.core.request_json import PodRequest, write_request
from kvplace.core.scalars import Bytes, CpuMask, NodeName, NumaId, PodUid, ResourceName
from kvplace.kube.object_records import LedgerRecord, NodeRecord, PodRecord, TopologyRecord
from kvplace.nodes.node_machine import (
    NOT_DESCRIBED,
    NOT_KNOWN,
    NodeMachine,
    NodeSnapshot,
    Unusable,
    answer_of,
    machine_of_node,
    request_of,
    snapshot_of,
)
from tests.core.machines import GIB
from tests.nodes.machines import EIGHT

VF = ResourceName("intel.com/vf")
RESERVING = replace(EIGHT, reserved=CpuMask(0b1))


def described(cpu_map: str = "", kubelet_cpus: int = 0) -> NodeMachine | Unusable:
    topology = TopologyRecord(NodeName("n"), RESERVING, kubelet_cpus=CpuMask(kubelet_cpus))
    return machine_of_node(NodeRecord(NodeName("n"), "uid", cpu_map=cpu_map), topology)


def test_a_node_gives_out_the_cpus_that_its_topology_does_not_reserve() -> None:
    machine = described()
    assert machine == NodeMachine(RESERVING.giving_out(mask_of(range(1, 8))))
    assert machine.free(Ledger()).cpus == mask_of(range(1, 8))


@pytest.mark.parametrize(
    ("cpu_map", "kubelet_cpus", "left"),
    [
        ("", 0b1100, [1, 4, 5, 6, 7]),
        ('{"socket0": ["1", "2", "5"]}', 0, [1, 2, 5]),
        ('{"socket0": ["0", "1", "2", "5", "40"]}', 0b1100, [1, 5]),
        ('{"socket0": ["1"], "socket1": ["2"]}', 0, [1, 2]),
    ],
)
def test_its_cpu_map_and_the_cpus_that_the_kubelet_holds_limit_that(
    cpu_map: str, kubelet_cpus: int, left: list[int]
) -> None:
    machine = described(cpu_map, kubelet_cpus)
    assert machine == NodeMachine(RESERVING.giving_out(mask_of(left)))
    assert machine.free(Ledger()).cpus == machine.free(Ledger()).pool == mask_of(left)


@pytest.mark.parametrize("device_numa", [DeviceNuma.PREFERRED, DeviceNuma.REQUIRED])
def test_a_node_with_devices_and_fewer_cpus_than_its_machine_refuses_a_vm_that_does_not_fit(
    device_numa: DeviceNuma,
) -> None:
    counts = [DeviceCount(VF, NumaId(0), 2, 2)]
    report = DeviceReport(
        NodeDevices.of(counts, TopologyPolicy()), {PodUid("a"): (PodDevice(VF, NumaId(0)),)}
    )
    described = TopologyRecord(NodeName("n"), RESERVING, kubelet_cpus=CpuMask(0b1100), devices=report)
    node = snapshot_of(machine_of_node(NodeRecord(NodeName("n"), "uid"), described), None)
    assert isinstance(node, NodeSnapshot)
    request = Request(5, PinningOptions(device_numa=device_numa), devices={VF: 1})
    assert isinstance(answer_of(node, request), Fit)
    taken = replace(node, free=replace(node.free, cpus=CpuMask(0b10), pool=CpuMask(0b10)))
    for_now, for_ever = answer_of(taken, request), answer_of(taken, replace(request, vcpus=6))
    assert isinstance(for_now, Refusal)
    assert isinstance(for_ever, Refusal)
    assert (for_now.never, for_ever.never) == (False, True)


def test_a_node_without_a_topology_is_the_machine_of_its_cpu_map() -> None:
    machine = machine_of_node(
        NodeRecord(NodeName("n"), "uid", cpu_map='{"socket0": ["2", "3"], "socket1": ["9"]}'), None
    )
    assert isinstance(machine, NodeMachine)
    assert machine.topology.allocatable == machine.topology.cpus == mask_of([2, 3, 9])
    assert [package.cpus for package in machine.topology.packages] == [0b1100, 1 << 9]


def test_why_a_node_cannot_be_used() -> None:
    node = NodeRecord(NodeName("n"), "uid")
    assert machine_of_node(None, TopologyRecord(NodeName("n"), EIGHT)) == NOT_KNOWN
    assert machine_of_node(node, None) == NOT_DESCRIBED
    assert machine_of_node(node, TopologyRecord(NodeName("n"), None, "cores must be a list")) == Unusable(
        "its NodeTopology cannot be read: cores must be a list"
    )
    unreadable = machine_of_node(
        NodeRecord(NodeName("n"), "uid", cpu_map="["), TopologyRecord(NodeName("n"), EIGHT)
    )
    assert isinstance(unreadable, Unusable)
    assert "cpu-map" in unreadable.problem
    empty = machine_of_node(NodeRecord(NodeName("n"), "uid", cpu_map='{"socket0": []}'), None)
    assert empty == Unusable("its annotation cpu-map: '{\"socket0\": []}': names no CPU")


def test_memory_that_others_use_is_not_free() -> None:
    in_use = MemoryInUse({NumaId(0): Bytes(GIB)})
    record = TopologyRecord(NodeName("n"), EIGHT, in_use=in_use)
    machine = machine_of_node(NodeRecord(NodeName("n"), "uid"), record)
    assert isinstance(machine, NodeMachine)
    plain = NodeMachine(EIGHT).free(Ledger())
    assert machine.free(Ledger()).memory == tuple(
        (node, Bytes(count - GIB if node == 0 else count)) for node, count in plain.memory
    )
    assert not record.allows_same_placements(replace(record, in_use=MemoryInUse()))


@pytest.mark.parametrize("state", ["gone", "ended", "without a request", "unreadable", "running"])
def test_only_a_pod_with_a_request_that_has_not_ended_takes_devices(state: str) -> None:
    request = Request(1, PinningOptions(), devices={VF: 1})
    asked = {"without a request": "", "unreadable": "{"}.get(state, write_request(PodRequest(request)))
    phase = "Succeeded" if state == "ended" else "Running"
    pod = PodRecord("default", "pod", PodUid("uid"), NodeName("n"), phase, request=asked)
    assert request_of(None if state == "gone" else pod) == (request if state == "running" else None)


def test_devices_of_pods_that_are_bound_count_as_taken_until_the_agent_reports_them() -> None:
    vf = ResourceName("intel.com/vf")
    counts = [DeviceCount(vf, NumaId(0), 4, 3), DeviceCount(vf, NumaId(1), 4, 4)]
    devices = NodeDevices.of(counts, TopologyPolicy("best-effort"))
    given = (PodDevice(vf, NumaId(0)),)
    report = DeviceReport(devices, {PodUid("reported"): given, PodUid("partly"): given})
    machine = machine_of_node(
        NodeRecord(NodeName("n"), "uid"), TopologyRecord(NodeName("n"), RESERVING, devices=report)
    )
    requests = {
        PodUid(uid): Request(1, PinningOptions(), devices={vf: count})
        for uid, count in (("reported", 1), ("partly", 2), ("bound", 1), ("held", 2))
    }
    placement = place(EIGHT, Free(EIGHT.cpus, EIGHT.cpus), Request(1, PinningOptions()))
    assert isinstance(placement, Placement)
    claims = {uid: claim_of(uid, placement) for uid in requests}
    ledger = LedgerRecord(
        NodeName("n"), Ledger(claims={uid: claims[uid] for uid in claims if uid != "held"}), "1"
    )

    found = snapshot_of(machine, ledger, [claims[PodUid("held")]], request_of=requests.get)

    assert isinstance(found, NodeSnapshot)
    assert found.free.devices is not None
    assert [one.free for one in found.free.devices.counts] == [1, 2], (
        "one each of node 0, and 2 of node 1 for the last"
    )
    assert found.key != snapshot_of(machine, ledger).key  # type: ignore[union-attr]
    unknown = snapshot_of(described(), ledger, request_of=requests.get)
    assert isinstance(unknown, NodeSnapshot)
    assert unknown.free.devices is None
