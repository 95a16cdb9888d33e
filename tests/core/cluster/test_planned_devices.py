"""A planned VM takes its devices from its node, and the next one sees fewer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.allocator.allocate import try_place
from kvplace.core.cluster.draft import Draft, shapes_of
from kvplace.core.cluster.planning import Plan, VmRequest, plan
from kvplace.core.cluster.room_in_cluster import find_room
from kvplace.core.node_devices import NodeDevices, TopologyPolicy
from kvplace.core.occupant import ClusterNode, Occupant
from kvplace.core.placement import Placement, Reason
from kvplace.core.request import DeviceNuma, PinningOptions, Request, Scope
from kvplace.core.scalars import CpuMask, NodeName, NumaId, ResourceName
from tests.core.cluster.clusters import machine

VF = ResourceName("intel.com/vf")
GPU = ResourceName("example.com/gpu")


def node(name: str, *counts: int, policy: str = "best-effort", resource: ResourceName = VF) -> ClusterNode:
    """A node with NUMA nodes of four CPUs and so many devices on each of them."""
    stated = [(resource, NumaId(number), count) for number, count in enumerate(counts) if count]
    devices = NodeDevices.all_free(stated, TopologyPolicy(policy))
    return ClusterNode(NodeName(name), machine(*[4] * len(counts)), devices=devices)


def vm(name: str, mode: DeviceNuma = DeviceNuma.REQUIRED, vcpus: int = 2, **counts: int) -> VmRequest:
    devices = {{"vf": VF, "gpu": GPU}[key]: count for key, count in (counts or {"vf": 1}).items()}
    options = PinningOptions(scope=Scope.ONE_NUMA, device_numa=mode)
    return VmRequest(name, Request(vcpus, options, devices=devices))


def places(found: Plan) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {one.id: (one.node, one.placement.numa_nodes) for one in found.planned}


ONE_VF = (node("a", 0, 0), node("b", 0, 1))
"""Two nodes; the only virtual function is on NUMA node 1 of the second one."""


@pytest.mark.parametrize("mode", DeviceNuma)
def test_the_vm_goes_to_the_node_that_has_the_device(mode: DeviceNuma) -> None:
    beside = (1,) if mode in (DeviceNuma.REQUIRED, DeviceNuma.PREFERRED) else (0,)
    assert places(plan(ONE_VF, [vm("a", mode)])) == {"a": ("b", beside)}


@pytest.mark.parametrize("mode", DeviceNuma)
def test_the_second_vm_finds_no_device(mode: DeviceNuma) -> None:
    found = plan(ONE_VF, [vm("first", mode), vm("second", mode)])
    assert len(found.planned) == 1
    (refused,) = found.refused
    assert {one.reason for one in refused.refusals.values()} == {Reason.NOT_ENOUGH_DEVICES}
    assert [(one.message, one.never) for one in refused.refusals.values()] == [
        ("no 1 free intel.com/vf on the machine, best 0", True),
        ("no 1 free intel.com/vf on the machine, best 0", False),
    ]


def test_a_vm_without_devices_does_not_take_the_place_of_the_one_with_the_device() -> None:
    found = plan(ONE_VF[1:], [VmRequest(f"plain-{n}", replace(vm("").request, devices={})) for n in range(3)])
    assert len(found.planned) == 3
    with_device = plan(ONE_VF[1:], [*(VmRequest(one.id, Request(2)) for one in found.planned), vm("vf")])
    assert places(with_device)["vf"] == ("b", (1,))


def test_the_kubelet_gives_devices_of_the_lowest_numa_node_first() -> None:
    found = plan([node("a", 1, 1)], [vm("first"), vm("second")])
    assert {one.id: dict(one.devices) for one in found.planned} == {
        "first": {(VF, 0): 1},
        "second": {(VF, 1): 1},
    }
    assert sorted(places(found).values()) == [("a", (0,)), ("a", (1,))]


def test_a_vm_whose_devices_cannot_be_predicted_is_refused_with_the_fix() -> None:
    (refused,) = plan([node("a", 2, 2, policy="none")], [vm("a")]).refused
    assert "set its topologyManagerPolicy to best-effort" in refused.refusals[NodeName("a")].message


def test_unknown_devices_refuse_only_vms_that_must_be_beside_them() -> None:
    unknown = replace(node("a", 0), devices=None)
    found = plan([unknown], [vm("must"), vm("may", DeviceNuma.PREFERRED)])
    assert [one.id for one in found.planned] == ["may"]
    assert "nothing reports the NUMA nodes of intel.com/vf" in found.refused[0].refusals[unknown.name].message


def test_running_vms_keep_their_devices_when_they_make_room() -> None:
    one = node("a", 1, 1)
    found = plan([one], [vm("old"), vm("older")]).planned
    running = tuple(
        Occupant(each.id, vm(each.id).request, each.placement, devices=each.devices) for each in found
    )
    full = replace(one, running=running)
    assert full.free.devices is not None
    assert [one.free for one in full.free.devices.counts] == [0, 0]
    answer = plan([full], [vm("new")], make_room=True)
    assert (answer.planned, answer.moves) == ((), ())


@given(st.data())
def test_the_free_devices_of_a_draft_are_those_that_its_vms_leave(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    policy = data.draw(st.sampled_from(["none", "best-effort", "single-numa-node"]))
    start = node("a", *counts, policy=policy)
    draft = Draft.empty([start])
    wanted = [vm(str(n), DeviceNuma.PREFERRED, 1, vf=data.draw(st.integers(0, 2))) for n in range(6)]
    shapes = shapes_of(one.request for one in wanted)
    for number, shape in enumerate(shapes):
        answer = draft.nodes[0].place(shape)
        if not isinstance(answer, Placement):
            continue
        draft.assign(number, shape, 0, answer)
        if data.draw(st.booleans()):
            draft.unassign(data.draw(st.sampled_from(sorted(draft.node_of))))
        devices = draft.nodes[0].free.devices
        assert devices is not None
        held = sum(shapes[each].request.devices.get(VF, 0) for each in draft.node_of)
        assert sum(one.free for one in devices.counts) == sum(counts) - held
        assert draft.nodes[0].free == replace(start, running=tuple(draft.nodes[0].planned.values())).free


@pytest.mark.parametrize("left", [0, 1])
def test_no_vm_moves_to_make_room_at_a_device_that_another_vm_has(left: int) -> None:
    beside = node("a", 1 + left, 1)
    small = Request(1, PinningOptions(scope=Scope.ANY))
    there = []
    for name, cpus in (("holds", 0b1_0000), ("may-move", 0b1)):
        placed = try_place(beside.topology, beside.free.within(CpuMask(cpus)), small)
        assert placed is not None
        there.append(Occupant(name, small, placed))
    there[0] = replace(there[0], devices={(VF, NumaId(0)): 1}, movable=False)
    found = find_room([replace(beside, running=tuple(there))], vm("wide", vcpus=4).request)
    assert (found is not None) is bool(left)
