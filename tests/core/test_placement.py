"""The annotation `kvplace.io/placement`: the hook reads what the extender writes and refuses the rest."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.errors import BadAnnotation
from kvplace.core.guest_cells import GuestCell
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import DeviceNuma, NumaMemory, OnFailure, Policy
from kvplace.core.scalars import NO_CPUS, Bytes, CpuId, CpuMask, NodeName, NumaId, PackageId, PodUid
from tests.core.invalid_input import DEEP_OR_LONG, answer_or_sentence, disturbed, texts

GIB = Bytes(1 << 30)
cpu_sets = st.integers(0, (1 << 40) - 1).map(CpuMask)
numa_ids = st.integers(0, 7).map(NumaId)


@st.composite
def pod_placements(draw: st.DrawFn) -> PodPlacement:
    policy = draw(st.sampled_from(Policy))
    cpus = draw(st.integers(1, (1 << 40) - 1))
    order = draw(st.permutations(list(cpus_of(CpuMask(cpus)))))
    vcpus = tuple(order[: draw(st.integers(1, len(order)))])
    return PodPlacement(
        pod_uid=PodUid(draw(st.uuids().map(str))),
        node=NodeName(draw(st.sampled_from(["worker-1", "n"]))),
        topology="sha256:0123456789abcdef",
        on_failure=draw(st.sampled_from(OnFailure)),
        placement=Placement(
            policy=policy,
            vcpus=() if policy is Policy.NUMA else vcpus,
            cpus=CpuMask(cpus),
            emulator_cpus=draw(cpu_sets),
            io_thread_cpus=tuple(draw(st.lists(cpu_sets, max_size=3))),
            numa_nodes=tuple(draw(st.lists(numa_ids, max_size=3))),
            numa_memory=draw(st.sampled_from(NumaMemory)),
            memory=draw(st.dictionaries(numa_ids, st.integers(0, 1 << 50).map(Bytes), max_size=3)),
            owned=draw(cpu_sets),
            packages=tuple(draw(st.lists(st.integers(0, 2**31 - 1).map(PackageId), max_size=3))),
            l3_groups=tuple(draw(st.lists(st.integers(0, 63), max_size=3))),
            huge_pages=draw(
                st.dictionaries(
                    numa_ids,
                    st.dictionaries(
                        st.sampled_from([Bytes(1 << 21), GIB]), st.integers(0, 1 << 20), max_size=2
                    ),
                    max_size=3,
                )
            ),
        ),
        enforced=draw(st.booleans()),
        revision=draw(st.integers(1, 2**31 - 1)),
        device_numa=draw(st.sampled_from(DeviceNuma)),
    )


PLACED = PodPlacement(
    pod_uid=PodUid("0b0e1c9e-3f4a-4a57-9b0e-000000000001"),
    node=NodeName("worker-1"),
    topology="sha256:0123456789abcdef",
    on_failure=OnFailure.WAIT,
    placement=Placement(
        policy=Policy.EXCLUSIVE,
        vcpus=(CpuId(2), CpuId(34), CpuId(3), CpuId(35)),
        cpus=mask_of([2, 3, 34, 35]),
        emulator_cpus=mask_of([0, 1, 32, 33]),
        io_thread_cpus=(mask_of([0, 1]),),
        numa_nodes=(NumaId(0),),
        numa_memory=NumaMemory.PREFERRED,
        memory={NumaId(0): 8 * GIB},
        owned=mask_of([2, 3, 34, 35]),
        huge_pages={NumaId(0): {Bytes(GIB): 8}},
        packages=(PackageId(0),),
        l3_groups=(1, 2),
    ),
)
DOCUMENT: dict[str, Any] = json.loads(PLACED.to_json())


@given(pod_placements())
def test_a_placement_written_and_read_is_the_same_placement(placement: PodPlacement) -> None:
    text = placement.to_json()
    assert "\n" not in text
    assert PodPlacement.from_json(text) == placement


def test_the_placement_is_written_in_the_words_of_its_contract() -> None:
    assert DOCUMENT == {
        "version": 1,
        "podUid": "0b0e1c9e-3f4a-4a57-9b0e-000000000001",
        "node": "worker-1",
        "topology": "sha256:0123456789abcdef",
        "policy": "exclusive",
        "onFailure": "wait",
        "vcpus": [2, 34, 3, 35],
        "cpus": "2-3,34-35",
        "emulatorCpus": "0-1,32-33",
        "ioThreadCpus": ["0-1"],
        "numaNodes": [0],
        "numaMemory": "preferred",
        "memory": {"0": 8589934592},
        "owned": "2-3,34-35",
        "hugePages": {"0": {"1Gi": 8}},
        "sockets": [0],
        "l3": [1, 2],
    }


def test_the_fields_of_an_agent_are_written_only_where_they_differ_from_the_default() -> None:
    text = replace(PLACED, enforced=True, revision=2).to_json()
    assert json.loads(text) == DOCUMENT | {"enforced": True, "revision": 2}


def test_the_mode_for_remote_devices_is_written_only_where_it_differs_from_the_default() -> None:
    text = replace(PLACED, device_numa=DeviceNuma.SOCKET).to_json()
    assert json.loads(text) == DOCUMENT | {"deviceNuma": "socket"}
    with pytest.raises(BadAnnotation, match="deviceNuma is 'near'; it must be one of preferred, required, s"):
        PodPlacement.from_json(text.replace('"socket"', '"near"'))


def test_the_view_of_a_guest_is_written_only_for_guests_that_mirror_the_host() -> None:
    cells = (
        GuestCell(0, node=NumaId(0), vcpus=(0, 1), memory=4 * GIB, distances=(10, 21), threads=2),
        GuestCell(1, node=NumaId(1), vcpus=(2, 3), memory=4 * GIB, distances=(21, 10), threads=2),
    )
    text = replace(
        PLACED, placement=replace(PLACED.placement, numa_nodes=(NumaId(0), NumaId(1)), guest_cells=cells)
    ).to_json()
    assert json.loads(text) == DOCUMENT | {
        "numaNodes": [0, 1],
        "guestCells": [
            {"node": 0, "vcpus": "0-1", "memory": 4294967296, "distances": [10, 21]},
            {"node": 1, "vcpus": "2-3", "memory": 4294967296, "distances": [21, 10]},
        ],
        "guestThreads": 2,
    }
    with pytest.raises(BadAnnotation, match="guestCells has NUMA node 1, which is not in numaNodes"):
        PodPlacement.from_json(text.replace('"numaNodes":[0,1]', '"numaNodes":[0]'))
    with pytest.raises(BadAnnotation, match="guestThreads is 3, which does not divide 4 vCPUs into cores"):
        PodPlacement.from_json(text.replace('"guestThreads":2', '"guestThreads":3'))


def test_the_fields_that_the_hook_needs_make_a_placement() -> None:
    needed = ("version", "podUid", "node", "policy", "vcpus", "cpus")
    bound = PodPlacement.from_json(json.dumps({key: DOCUMENT[key] for key in needed} | {"later": [1]}))
    assert (bound.enforced, bound.revision) == (False, 1)
    assert bound.placement == Placement(
        Policy.EXCLUSIVE, (CpuId(2), CpuId(34), CpuId(3), CpuId(35)), mask_of([2, 3, 34, 35])
    )


@pytest.mark.parametrize("socket", [16384, 65537, 999_999])
def test_a_socket_may_have_any_id_that_firmware_gives_it(socket: int) -> None:
    cpus = CpuMask(0b1100)
    placement = Placement(Policy.EXCLUSIVE, (CpuId(2), CpuId(3)), cpus, packages=(PackageId(socket),))
    written = PodPlacement(PodUid("u"), NodeName("n"), "", OnFailure.WAIT, placement)
    assert PodPlacement.from_json(written.to_json()).placement.packages == (socket,)


def test_a_vm_that_floats_has_no_cpus_and_reports_it_when_read_again() -> None:
    floating = PodPlacement.floating(pod_uid=PodUid("u"), node=NodeName("n"))
    again = PodPlacement.from_json(floating.to_json())
    assert again == floating
    assert again.placement.floats
    assert not PodPlacement.from_json(json.dumps(DOCUMENT)).placement.floats


def test_a_bare_cpu_map_gives_each_vcpu_its_cpu_in_order_and_leaves_memory_alone() -> None:
    cpus = mask_of([1, 4, 33])
    assert PodPlacement.of_cpu_map('{"socket1": ["1", "33"], "socket0": ["4"]}') == PodPlacement(
        PodUid(""),
        NodeName(""),
        "",
        OnFailure.WAIT,
        Placement(
            Policy.EXCLUSIVE,
            (CpuId(4), CpuId(1), CpuId(33)),
            cpus,
            NO_CPUS,
            cpus,
            packages=(PackageId(0), PackageId(1)),
        ),
    )


@pytest.mark.parametrize(
    ("change", "fix"),
    [
        ({"version": 2}, "has version 2; this program reads version 1, use matching releases"),
        ({"version": None}, "has version null; this program reads version 1, use matching releases"),
        ({"enforced": "yes"}, "enforced is 'yes'; it must be true or false"),
        ({"enforced": 1}, "enforced is 1; it must be true or false"),
        ({"revision": 0}, "revision is 0; it must be a whole number from 1 to "),
        ({"revision": True}, "revision is true; it must be a whole number from 1 to "),
        ({"podUid": 7}, "podUid is 7; it must be a string"),
        ({"policy": "mine"}, "policy is 'mine'; it must be one of exclusive, share, numa, immovable, none"),
        ({"vcpus": [2, 2, 3, 35]}, "vcpus gives one CPU to two vCPUs"),
        ({"vcpus": [2, 34, 3, 99]}, "vcpus has CPU 99, which is not in cpus"),
        ({"vcpus": []}, "vcpus is empty, which policy exclusive does not allow"),
        ({"vcpus": [2.0]}, "vcpus[0] is 2.0; it must be an id from 0 to 16383"),
        ({"vcpus": "2,34"}, "vcpus is '2,34'; it must be a list of ids"),
        ({"cpus": ""}, "cpus is empty; a placement names at least one CPU"),
        ({"cpus": "2-"}, "cpus '2-': '2-' is neither a number nor a range like 2-5"),
        ({"ioThreadCpus": "0-1"}, "ioThreadCpus is '0-1'; it must be a list"),
        ({"ioThreadCpus": ["x"]}, "ioThreadCpus[0] 'x': 'x' is neither a number nor a range like 2-5"),
        ({"memory": {"x": 5}}, "memory['x'] is not the id of a NUMA node"),
        ({"memory": {"0": -5}}, "memory.0 is -5; it must be a whole number from 0 to "),
        ({"hugePages": {"-1": {"1Gi": 8}}}, "hugePages['-1'] is not the id of a NUMA node"),
        ({"hugePages": {"1_0": {"1Gi": 8}}}, "hugePages['1_0'] is not the id of a NUMA node"),
        ({"hugePages": {"0": {"1Gi": 1.5}}}, "hugePages.0['1Gi'] is 1.5; it must be a whole "),
        ({"hugePages": {"0": {"1Gi": -8}}}, "hugePages.0['1Gi'] is -8; it must be a whole "),
        ({"hugePages": {"0": 8}}, "hugePages.0 is 8; it must be an object of counts by page size"),
        ({"hugePages": [8]}, "hugePages is [8]; it must be an object"),
    ],
    ids=str,
)
def test_a_field_that_cannot_be_meant_is_named(change: dict[str, Any], fix: str) -> None:
    with pytest.raises(BadAnnotation) as caught:
        PodPlacement.from_json(json.dumps(DOCUMENT | change))
    assert caught.value.fix.startswith(fix)
    assert str(caught.value).startswith("annotation kvplace.io/placement: ")


@given(texts | disturbed(DOCUMENT).map(json.dumps))
def test_any_text_is_either_a_placement_or_one_sentence(text: str) -> None:
    placement, sentence = answer_or_sentence(PodPlacement.from_json, text, BadAnnotation)
    assert placement is not None or sentence.startswith("annotation kvplace.io/placement: ")
    if placement is not None:
        assert PodPlacement.from_json(placement.to_json()) == placement


INFINITE = '{"version":1,"podUid":"u","node":"n","policy":"none","cpus":"","hugePages":{"0":{"1Gi":1e999}}}'


@pytest.mark.parametrize("text", [*DEEP_OR_LONG, INFINITE], ids=lambda text: text[:12] + text[-12:])
def test_text_that_is_deep_long_or_infinite_is_not_a_crash(text: str) -> None:
    with pytest.raises(BadAnnotation):
        PodPlacement.from_json(text)
