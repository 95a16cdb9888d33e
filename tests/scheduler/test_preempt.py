"""Preempt names the victims whose cores make the VM fit, and none in vain; what they leave is reserved."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

import msgspec
import pytest

from kvplace.core.cluster.victims import DisruptionBudget
from kvplace.core.free_resources import MemoryInUse
from kvplace.core.label_terms import LabelTerm, Operator
from kvplace.core.node_devices import DeviceCount, DeviceReport, NodeDevices, PodDevice, TopologyPolicy
from kvplace.core.request import DeviceNuma, OnFailure, Scope
from kvplace.core.scalars import Bytes, NodeName, NumaId, PodUid, ResourceName
from kvplace.kube.object_records import PodRecord
from kvplace.scheduler.extender_protocol import (
    NodeVictims,
    PreemptionArgs,
    preemption_answer,
    read_preemption_args,
)
from tests.controller.replicas import Replica, asking_pod, replica
from tests.event_loop_turns import with_turns
from tests.kube.example_claims import claim, taking
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import EIGHT, TWO

HIGH = 1000
HTTP_TIMEOUT_S = 10.0
"""Of the extender in our configuration of kube-scheduler."""


@pytest.fixture
def cluster() -> FaultyCluster:
    return FaultyCluster()


@pytest.fixture
async def one(cluster: FaultyCluster) -> AsyncIterator[Replica]:
    """A replica on two nodes: `two` with two NUMA nodes of eight CPUs, `eight` with one socket of eight."""
    cluster.create_node("two", topology=TWO)
    async with replica(cluster) as made:
        yield made


async def running(one: Replica, name: str, vcpus: int, node: str = "two", **asked: object) -> PodRecord:
    """Bind a VM to a node."""
    asked = {"scope": Scope.ONE_NUMA, **asked}
    pod = asking_pod(one.cluster, name, vcpus, **asked)  # type: ignore[arg-type]
    assert (await one.filter(pod, node)).names == [node]
    assert await one.bind(pod, node) == ""
    await one.until(lambda: one.cache.pods.records[pod.uid].node == node)
    return one.cache.pods.records[pod.uid]


def important(cluster: FaultyCluster, name: str = "important", vcpus: int = 8, **asked: object) -> PodRecord:
    asked = {"scope": Scope.ONE_NUMA, "priority": HIGH, **asked}
    return asking_pod(cluster, name, vcpus, **asked)  # type: ignore[arg-type]


def sent(
    pod: PodRecord, violations: int = 0, *, alone: bool = True, **nodes: Iterable[PodRecord]
) -> PreemptionArgs:
    """The request of kube-scheduler."""
    victims = {
        NodeName(node): NodeVictims(tuple(one.uid for one in pods), violations)
        for node, pods in nodes.items()
    }
    return PreemptionArgs(pod, pod.resources, not alone, False, victims)


async def answer(one: Replica, args: PreemptionArgs) -> dict[str, list[str]]:
    """The names of the victims by node."""
    result = await one.extender.preempt(args)
    names = {uid: record.name for uid, record in one.cache.pods.records.items()}
    return {node: [names.get(uid, uid) for uid in victims.uids] for node, victims in result.items()}


async def test_the_victims_are_those_whose_cores_lie_together_not_those_that_were_sent(one: Replica) -> None:
    vms = [await running(one, f"vm-{number}", 4) for number in range(4)]  # two on each NUMA node
    apart = [vms[0], vms[2]]
    nodes = [one.claims("two")[vm.uid].cpus for vm in vms]
    assert nodes[0] | nodes[1] == TWO.numa_nodes[0].cpus
    found = await answer(one, sent(important(one.cluster), two=apart))
    assert found in ({"two": ["vm-0", "vm-1"]}, {"two": ["vm-2", "vm-3"]})


async def test_the_lowest_priorities_go_first(one: Replica) -> None:
    vms = [await running(one, f"vm-{number}", 4, priority=number) for number in range(4)]
    assert await answer(one, sent(important(one.cluster), two=vms)) == {"two": ["vm-1", "vm-0"]}


async def test_pods_that_ran_before_a_replica_started_are_known_to_it(cluster: FaultyCluster) -> None:
    cluster.create_node("two", topology=TWO)
    async with replica(cluster) as before:
        vms = [await running(before, f"vm-{number}", 8) for number in range(2)]
    async with replica(cluster) as after:
        assert await answer(after, sent(important(cluster), two=vms)) == {"two": ["vm-0"]}


async def test_where_no_victims_help_no_pod_is_evicted(one: Replica) -> None:
    low = [await running(one, f"low-{number}", 4) for number in range(2)]
    await running(one, "equal", 4, priority=HIGH)
    await running(one, "higher", 4, priority=HIGH + 1)
    assert await answer(one, sent(important(one.cluster, vcpus=16, scope=Scope.ANY), two=low)) == {}
    assert await answer(one, sent(important(one.cluster, "other"), two=low)) == {"two": ["low-0", "low-1"]}


async def test_a_node_where_filter_has_just_found_only_cores_missing_is_checked_too(one: Replica) -> None:
    """kube-scheduler finds no victims there: in number there are CPUs enough."""
    one.cluster.create_node("eight", topology=EIGHT)
    keep = [await running(one, f"vm-{number}", 6) for number in range(2)]  # leaves 2 + 2
    await running(one, "other", 8, "eight", scope=Scope.ONE_SOCKET, priority=5)
    pod = important(one.cluster, vcpus=4)
    assert (await one.filter(pod, "two")).names == []
    other = one.cache.pods.records
    on_eight = [record for record in other.values() if record.node == "eight"]
    assert await answer(one, sent(pod, eight=on_eight)) == {"two": ["vm-0"]}
    assert keep[0].name == "vm-0"


async def test_no_victim_is_searched_where_memory_outside_kvplace_leaves_too_little(one: Replica) -> None:
    one.cluster.create_node("crowded", topology=TWO)
    await asyncio.sleep(1)
    vms = {
        node: [await running(one, f"{node}-{number}", 8, node) for number in range(2)]
        for node in ("crowded", "two")
    }
    in_use = MemoryInUse({NumaId(node): Bytes(12 << 30) for node in range(2)})
    one.cluster.use_memory("crowded", in_use)
    await asyncio.sleep(1)
    pod = important(one.cluster, memory=Bytes(8 << 30))
    assert await answer(one, sent(pod, crowded=vms["crowded"], two=vms["two"])) == {"two": ["two-0"]}


async def test_victims_that_end_anyway_are_waited_for_and_no_other_client_is_evicted(one: Replica) -> None:
    vms = [await running(one, f"vm-{number}", 8) for number in range(2)]
    one.cluster.delete_pod("default", "vm-0")
    await one.until(lambda: one.cache.pods.records[vms[0].uid].deleting)
    assert await answer(one, sent(important(one.cluster), two=[vms[1]])) == {}


async def test_a_pod_that_waits_in_vain_may_evict_others_after_a_while(one: Replica) -> None:
    vms = [await running(one, f"vm-{number}", 8) for number in range(2)]
    one.cluster.delete_pod("default", "vm-0")
    await one.until(lambda: one.cache.pods.records[vms[0].uid].deleting)
    pod = important(one.cluster)
    assert await answer(one, sent(pod, two=[vms[1]])) == {}
    await asyncio.sleep(121)
    assert await answer(one, sent(pod, two=[vms[1]])) == {"two": ["vm-1"]}


async def leaving(one: Replica, vm: PodRecord) -> None:
    """Delete a VM, which takes its time to end."""
    one.cluster.delete_pod("default", vm.name)
    await one.until(lambda: one.cache.pods.records[vm.uid].deleting)


async def test_after_a_wait_that_came_to_its_end_the_next_one_begins_anew(one: Replica) -> None:
    vms = [await running(one, f"vm-{number}", 8) for number in range(2)]
    pod = important(one.cluster)
    await leaving(one, vms[0])
    assert await answer(one, sent(pod, two=[vms[1]])) == {}
    one.cluster.delete_pod("default", "vm-0", force=True)
    await one.until(lambda: vms[0].uid not in one.claims("two"))
    faster = await running(one, "faster", 8)
    await asyncio.sleep(121)
    await leaving(one, vms[1])
    assert await answer(one, sent(pod, two=[faster])) == {}
    await asyncio.sleep(121)
    assert await answer(one, sent(pod, two=[faster])) == {"two": ["faster"]}


async def test_a_vm_that_does_not_end_changes_no_patience_with_another_one(one: Replica) -> None:
    one.cluster.create_node("eight", topology=EIGHT)
    await one.until(lambda: one.topology("eight"))
    stuck, vm = [await running(one, f"vm-{number}", 8) for number in range(2)]
    other = await running(one, "other", 8, "eight", scope=Scope.ONE_SOCKET)
    pod = important(one.cluster)
    await leaving(one, stuck)
    assert await answer(one, sent(pod, two=[vm], eight=[other])) == {}
    await asyncio.sleep(121)
    await leaving(one, vm)
    assert await answer(one, sent(pod, eight=[other], two=[vm])) == {}
    await asyncio.sleep(121)
    assert await answer(one, sent(pod, eight=[other])) == {"eight": ["other"]}


async def test_vms_that_do_not_end_on_several_nodes_are_waited_for_at_the_same_time(one: Replica) -> None:
    one.cluster.create_node("eight", topology=EIGHT)
    await one.until(lambda: one.topology("eight"))
    vms = [await running(one, f"vm-{number}", 8) for number in range(2)]
    small = [await running(one, f"small-{number}", 4, "eight", scope=Scope.ONE_SOCKET) for number in range(2)]
    pod = important(one.cluster, vcpus=4)
    for vm in (vms[0], small[0]):
        await leaving(one, vm)
    asked = sent(pod, two=[vms[1]], eight=[small[1]])
    assert await answer(one, asked) == {}
    await asyncio.sleep(121)
    assert len(await answer(one, asked)) == 1


async def test_whom_a_pod_waits_for_is_forgotten_with_their_claims_and_with_the_pod(one: Replica) -> None:
    vms = [await running(one, f"vm-{number}", 8) for number in range(2)]
    pod = important(one.cluster)
    for vm, other in (vms, reversed(vms)):
        await leaving(one, vm)
        assert await answer(one, sent(pod, two=[other])) == {}
        assert one.extender.pending.record(pod.uid).leaving.keys() == {vm.uid}
        one.cluster.delete_pod("default", vm.name, force=True)
        await one.until(lambda vm=vm: vm.uid not in one.claims("two"))
        if vm is vms[0]:
            await running(one, "next", 8)
    one.cluster.delete_pod("default", pod.name, force=True)
    await one.until(lambda: pod.uid not in one.cache.pods.records)
    assert not one.extender.pending.record(pod.uid).leaving


async def test_the_cores_of_victims_are_kept_for_the_vm_that_needed_them(one: Replica) -> None:
    vms = [await running(one, f"vm-{number}", 8) for number in range(2)]
    pod = important(one.cluster)
    assert (await one.filter(pod)).names == []
    assert await answer(one, sent(pod, two=vms)) == {"two": ["vm-0"]}
    one.cluster.delete_pod("default", "vm-0")
    await one.until(lambda: one.cache.pods.records[vms[0].uid].deleting)

    assert (await one.filter(pod)).names == []  # its QEMU still runs
    assert await answer(one, sent(pod, two=[vms[1]])) == {}
    assert await answer(one, sent(important(one.cluster, "next"), two=[vms[1]])) == {"two": ["vm-1"]}

    one.cluster.change_pod("default", "vm-0", compute_terminated=True)
    await one.until(lambda: vms[0].uid not in one.claims("two"))
    await one.until(lambda: vms[0].uid not in one.cache.ledger(NodeName("two")).claims)
    again = asking_pod(one.cluster, "vm-0-again", 4)
    assert (await one.filter(again)).names == []  # the evicted VM, created again
    assert (await one.filter(pod)).names == ["two"]
    assert await one.bind(pod, "two") == ""


async def test_a_pod_of_still_higher_priority_takes_the_reserved_cores(one: Replica) -> None:
    vms = [await running(one, f"vm-{number}", 8, priority=number * 5000) for number in range(2)]
    pod = important(one.cluster)
    assert await answer(one, sent(pod, two=vms[:1])) == {"two": ["vm-0"]}
    one.cluster.delete_pod("default", "vm-0", force=True)
    await one.until(lambda: vms[0].uid not in one.cache.ledger(NodeName("two")).claims)
    equal = important(one.cluster, "equal")
    assert (await one.filter(equal)).names == []
    assert (await one.filter(important(one.cluster, "higher", priority=HIGH + 1))).names == ["two"]


async def test_a_reservation_ends_when_no_pod_is_evicted(one: Replica) -> None:
    vms = [await running(one, f"vm-{number}", 6) for number in range(2)]
    pod = important(one.cluster, vcpus=8)
    assert await answer(one, sent(pod, two=vms[:1])) == {"two": ["vm-0"]}
    small = asking_pod(one.cluster, "small", 2, scope=Scope.ONE_NUMA)
    first = await one.filter(small)
    held = one.extender.pending.hold_of(small.uid, NodeName("two"))
    assert first.names == ["two"]
    assert held is not None
    assert held.claim.cpus & TWO.numa_nodes[1].cpus  # not beside the victim
    await asyncio.sleep(31)
    assert (await one.filter(important(one.cluster, "none", vcpus=16))).names == []
    assert pod.uid not in one.claims("two")


async def test_disruption_budgets_are_respected_and_their_violations_counted(one: Replica) -> None:
    vms = [
        await running(
            one, f"vm-{number}", 4, labels={"app": "kept" if number < 2 else "any"}, priority=number
        )
        for number in range(4)
    ]
    kept = LabelTerm("app", Operator.IN, ("kept",))
    one.cluster.disruption_budgets = [DisruptionBudget("default", "kept", (kept,), allowed=0)]
    pod = important(one.cluster)
    result = await one.extender.preempt(sent(pod, 2, two=vms[:2]))
    assert result == {"two": NodeVictims((vms[3].uid, vms[2].uid), 0)}

    whole = important(one.cluster, "whole", 16, scope=Scope.ANY, priority=HIGH + 1)
    everybody = await one.extender.preempt(sent(whole, 7, two=vms))
    assert everybody[NodeName("two")].violations == 7  # kube-scheduler's own victims and number


async def test_the_violations_of_other_victims_are_counted_here(one: Replica) -> None:
    vms = [await running(one, f"vm-{number}", 4, labels={"app": "kept"}) for number in range(4)]
    kept = LabelTerm("app", Operator.EXISTS)
    one.cluster.disruption_budgets = [DisruptionBudget("default", "kept", (kept,), allowed=1)]
    result = await one.extender.preempt(sent(important(one.cluster), 1, two=[vms[0], vms[3]]))
    (victims,) = result.values()
    assert (len(victims.uids), victims.violations) == (2, 1)


async def test_a_victim_that_ends_anyway_violates_nothing(one: Replica) -> None:
    vms = [await running(one, f"vm-{number}", 8, labels={"app": f"{number}"}) for number in range(2)]
    first = LabelTerm("app", Operator.IN, ("0",))
    one.cluster.disruption_budgets = [DisruptionBudget("default", "first", (first,), allowed=0)]
    one.cluster.delete_pod("default", "vm-0")
    await one.until(lambda: one.cache.pods.records[vms[0].uid].deleting)
    whole = important(one.cluster, "whole", 16, scope=Scope.ANY)
    result = await one.extender.preempt(sent(whole, 1, alone=False, two=vms))
    assert result == {"two": NodeVictims((vms[1].uid,), 0)}


async def test_pods_without_cores_stay_victims_only_where_they_are_needed(one: Replica) -> None:
    vms = [await running(one, f"vm-{number}", 8) for number in range(2)]
    stranger = PodRecord("default", "stranger", PodUid("stranger"))
    pod = important(one.cluster)
    args = sent(pod, two=[stranger])
    assert await answer(one, args) == {"two": ["vm-0"]}  # gives as much as the pod itself requests
    tied = sent(important(one.cluster, "tied", priority=HIGH + 1), alone=False, two=[stranger, vms[0]])
    assert await answer(one, tied) == {"two": ["stranger", "vm-0"]}


async def test_who_does_not_care_for_cores_is_passed_on_unchanged(one: Replica) -> None:
    vms = [await running(one, f"vm-{number}", 8) for number in range(2)]
    plain = one.cluster.create_pod("plain", priority=HIGH, resources={"cpu": 8000})
    floating = important(one.cluster, "floating", on_failure=OnFailure.FLOAT)
    for pod in (plain, floating):
        assert await answer(one, sent(pod, two=vms)) == {"two": ["vm-0", "vm-1"]}


async def test_a_pod_that_must_not_preempt_does_not(one: Replica) -> None:
    vms = [await running(one, f"vm-{number}", 8) for number in range(2)]
    pod = important(one.cluster)
    args = PreemptionArgs(pod, pod.resources, False, True, sent(pod, two=vms).victims)
    assert await answer(one, args) == {}


def test_requests_are_read_in_both_forms_and_any_case() -> None:
    pod = {
        "metadata": {"name": "vm", "namespace": "shop", "uid": "u"},
        "spec": {
            "priority": 7,
            "preemptionPolicy": "Never",
            "containers": [{"resources": {"requests": {"cpu": "1500m", "memory": "1Gi", "a": "x", "b": []}}}],
        },
    }
    meta = {"Pods": [{"UID": "a"}, {"UID": "b"}], "NumPDBViolations": 2}
    whole = {"pods": [{"metadata": {"uid": "a"}}, {"metadata": {"uid": "b"}}], "numPDBViolations": 2}
    for body in (
        {"Pod": pod, "NodeNameToMetaVictims": {"n": meta, "gone": None}, "NodeNameToVictims": None},
        {"pod": pod, "nodeNameToVictims": {"n": whole, "gone": {"pods": None}}},
    ):
        args = read_preemption_args(json.dumps(body).encode())
        assert args.victims == {"n": NodeVictims(("a", "b"), 2), "gone": NodeVictims((), 0)}  # type: ignore[arg-type]
        assert (args.pod.priority, args.never, args.depends_on_pods) == (7, True, False)
        assert args.resources == {"cpu": 1500, "memory": 1000 << 30}  # an invalid amount counts nothing


async def test_a_hundred_nodes_are_answered_without_holding_up_others(cluster: FaultyCluster) -> None:
    for number in range(100):
        cluster.create_node(f"n{number:03d}", topology=TWO)
    async with replica(cluster) as one:
        vms = {}
        for number in range(100):
            name = f"n{number:03d}"
            vms[name] = [await running(one, f"{name}-{part}", 8, name, priority=number) for part in range(2)]
        await asyncio.sleep(1)  # else what is reserved is gathered with the last bind
        args = sent(important(cluster), 0, alone=True, **{name: pods[:1] for name, pods in vms.items()})
        victims, turns = await with_turns(answer(one, args))
        assert victims == {"n000": ["n000-0"]}
        assert turns >= 100


async def test_searching_again_ends_before_kube_scheduler_gives_up(one: Replica) -> None:
    """The claim of another attempt at the pod on the node keeps it from being reserved."""
    read = one.cluster.read_disruption_budgets

    async def read_slowly() -> tuple[DisruptionBudget, ...]:
        await asyncio.sleep(4.5)
        return await read()

    one.cluster.read_disruption_budgets = read_slowly  # type: ignore[method-assign]
    vms = [await running(one, f"vm-{number}", 6) for number in range(2)]
    pod = important(one.cluster)
    left = next(cpu for cpu in range(16) if cpu not in one.cache.ledger(NodeName("two")).owners)
    await one.cache.ledgers.change(NodeName("two"), lambda _: (taking(claim(pod.uid, left)), None))
    began = asyncio.get_running_loop().time()
    assert await answer(one, sent(pod, two=vms)) == {}
    assert asyncio.get_running_loop().time() - began < HTTP_TIMEOUT_S


async def test_the_answer_does_not_wait_for_claims_that_gather(one: Replica) -> None:
    """kube-scheduler tries no other pod before it has it."""
    vms = [await running(one, f"vm-{number}", 8) for number in range(2)]
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await answer(one, sent(important(one.cluster), two=vms)) == {"two": ["vm-0"]}
    assert loop.time() == began


def test_an_answer_has_the_shape_that_kube_scheduler_reads() -> None:
    result = preemption_answer({NodeName("n"): NodeVictims((PodUid("a"),), 1)})
    assert json.loads(msgspec.json.encode(result)) == {
        "NodeNameToMetaVictims": {"n": {"Pods": [{"UID": "a"}], "NumPDBViolations": 1}}
    }


VF = ResourceName("intel.com/vf")


def reported(*pods: PodRecord) -> DeviceReport:
    """A virtual function on each NUMA node, and the pods that have them, the pod of node 0 first."""
    counts = (DeviceCount(VF, NumaId(node), 1, int(node >= len(pods))) for node in range(2))
    given = {pod.uid: (PodDevice(VF, NumaId(node)),) for node, pod in enumerate(pods)}
    return DeviceReport(NodeDevices.of(counts, TopologyPolicy("best-effort")), given)


@pytest.mark.parametrize("mode", [DeviceNuma.REQUIRED, DeviceNuma.PREFERRED])
@pytest.mark.parametrize("is_reported", [True, False])
async def test_the_device_of_a_victim_is_free_and_its_place_beside_it_reserved(
    one: Replica, is_reported: bool, mode: DeviceNuma
) -> None:
    asked: dict[str, Any] = {"devices": {VF: 1}, "device_numa": mode}
    one.cluster.put_topology("two", TWO, devices=reported())
    await asyncio.sleep(1)
    staying = await running(one, "staying", 4, priority=HIGH, **asked)
    owner = await running(one, "owner", 4, priority=1, **asked)
    places = [one.claims("two")[pod.uid].cpus for pod in (staying, owner)]
    assert [bool(cpus & TWO.numa_nodes[1].cpus) for cpus in places] == [False, True]
    others = [await running(one, f"vm-{number}", 4) for number in range(2)]
    if is_reported:
        one.cluster.put_topology("two", TWO, devices=reported(staying, owner))
        await asyncio.sleep(1)
    waiting = important(one.cluster, vcpus=4, **asked)
    assert await answer(one, sent(waiting, two=[owner, others[0]])) == {"two": ["owner"]}
    reserved = one.claims("two")[waiting.uid].reserved
    assert reserved is not None
    assert reserved.owned == places[1]
