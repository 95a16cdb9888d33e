"""VMs that may move make room for one that fits nowhere, and no client is evicted meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.errors import Forbidden
from kvplace.core.free_resources import MemoryInUse
from kvplace.core.node_devices import DeviceReport, NodeDevices, TopologyPolicy
from kvplace.core.request import Policy, Scope
from kvplace.core.scalars import Bytes, NumaId, ResourceName
from kvplace.core.well_known_names import RELOCATED
from kvplace.kube.events import EventReason
from kvplace.kube.object_records import ResourceClaimRecord
from kvplace.nodes.movable_vms import MovableVms
from kvplace.nodes.node_cache import PEACE_S
from kvplace.nodes.node_machine import NodeSnapshot
from kvplace.scheduler.extender import ExtenderSettings
from kvplace.scheduler.limits import AT_ONCE, MOVES_S, PAUSE_S
from kvplace.scheduler.room_maker import MakeRoom
from tests.controller.relocations import SHARE, NodeAgent, edit, until_written
from tests.controller.replicas import asking_pod, replica
from tests.kube.example_claims import claim
from tests.kube.faults import Operation
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import TWO
from tests.scheduler.crowded_node import N1, halved, moved, moved_and_bound, notes, running, victims

AUTOMATIC = ExtenderSettings(make_room=MakeRoom.AUTOMATIC)
ON_REQUEST = ExtenderSettings(make_room=MakeRoom.ON_REQUEST)


async def test_a_vm_that_may_move_moves_and_the_one_that_waited_gets_its_socket(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster, extending=AUTOMATIC) as one:
        left = await halved(one, agent, movable=True)
        big = asking_pod(cluster, "big", 8)
        assert not (await one.filter(big)).names
        await one.until(lambda: moved(agent))
        (mover,) = moved(agent)
        assert mover.uid in {vm.uid for vm in left}
        small = asking_pod(cluster, "small", 4)
        assert not (await one.filter(small)).names  # all that is free is about to be used
        before = agent.in_force[mover.uid].placement
        assert agent.ledger.claims[mover.uid].owned & before.owned == before.owned

        agent.carry_out(mover)
        await one.until(lambda: agent.ledger.claims[mover.uid].relocation is None)
        assert not (await one.filter(small)).names  # what was released is reserved
        assert (await one.filter(big)).names == [N1]
        assert await one.bind(big, "n1") == ""
        assert agent.stored(big).placement.cpus in map(parse_cpu_list, ("0-3,8-11", "4-7,12-15"))
        assert agent.stored(mover).revision == 2
        await one.until(lambda: agent.live(mover).condition(RELOCATED))
        way = "from CPUs"
        assert notes(cluster, "big", EventReason.MAKING_ROOM)[0].startswith(
            f"default/{mover.vmi} moves {way}"
        )
        assert "make room for default/big" in notes(cluster, mover.vmi, EventReason.MAKING_ROOM)[0]


async def test_room_is_made_in_the_pool_of_a_numa_vm_which_keeps_one_core(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster, extending=AUTOMATIC) as one:
        await halved(one, agent, movable=True)
        await running(one, agent, "pool", 2, policy=Policy.NUMA)
        big = asking_pod(cluster, "big", 6)
        assert not (await one.filter(big)).names
        await one.until(lambda: moved(agent))
        await moved_and_bound(one, agent, big)
        assert agent.stored(big).placement.owned.bit_count() == 6


@pytest.mark.parametrize("holds", [[], ["waiting"], ["stored"], ["waiting", "stored"]])
async def test_the_search_for_room_finds_the_same_resources_free_as_any_decision(
    cluster: FaultyCluster, agent: NodeAgent, holds: list[str]
) -> None:
    vf = (ResourceName("intel.com/vf"), NumaId(0), 2)
    agent.devices = DeviceReport(NodeDevices.all_free([vf], TopologyPolicy()))
    async with replica(cluster, extending=AUTOMATIC) as one:
        (left, _) = await halved(one, agent, movable=True)
        await running(one, agent, "pool", 2, policy=Policy.NUMA)
        in_use = MemoryInUse({NumaId(1): Bytes(1 << 30)})
        cluster._put_topology(replace(cluster._topologies.records[N1], in_use=in_use))
        await asyncio.sleep(1)
        stored = one.cache.ledger(N1).claims[left.uid]
        taken = {"waiting": claim("waiting", 15), "stored": stored}
        held = [taken[name] for name in holds]
        node = MovableVms(one.cache).crowded(N1, held)
        snapshot = one.cache.snapshot(N1, held)
        assert node is not None
        assert isinstance(snapshot, NodeSnapshot)
        assert node.free == snapshot.free
        assert node.free.devices is not None
        assert not node.free.cpus & stored.owned


@pytest.mark.parametrize("staying", [0, 1])
async def test_a_vm_with_devices_of_resource_claims_does_not_leave_its_numa_node_to_make_room(
    cluster: FaultyCluster, agent: NodeAgent, staying: int
) -> None:
    async with replica(cluster, extending=AUTOMATIC) as one:
        left = await halved(one, agent, movable=True)
        given = (("gpu.example.com", "n1", "gpu"),)
        cluster.put_resource_claim(ResourceClaimRecord("default", "io", (), given))
        cluster._put_pod(replace(agent.live(left[staying]), resource_claims=("io",)))
        await asyncio.sleep(1)
        big = asking_pod(cluster, "big", 8)
        assert not (await one.filter(big)).names
        await one.until(lambda: moved(agent))
        assert [pod.uid for pod in moved(agent)] == [left[1 - staying].uid]


async def test_room_is_made_for_a_vm_whose_nominated_node_is_the_only_one_that_kube_scheduler_accepts(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    """kube-scheduler asks about the nominated node, then about all nodes that it accepts: the same one."""
    async with replica(cluster, extending=AUTOMATIC) as one:
        await halved(one, agent, movable=True)
        asking_pod(cluster, "big", 8)
        big = cluster.change_pod("default", "big", nominated="n1")
        for _ in range(2):
            assert not (await one.filter(big)).names
            assert not await one.extender.room.is_under_way(big.uid)
            await asyncio.sleep(1.5)  # another attempt
        assert not (await one.filter(big)).names
        assert not (await one.filter(big)).names
        assert await one.extender.room.is_under_way(big.uid)
        await one.until(lambda: moved(agent))


async def test_no_room_is_made_for_a_vm_that_may_still_go_to_another_than_its_nominated_node(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster, extending=AUTOMATIC) as one:
        await halved(one, agent, movable=True)
        cluster.create_node("n2", topology=TWO)
        await one.until(lambda: "n2" in one.cache.nodes.records)
        asking_pod(cluster, "big", 8)
        big = cluster.change_pod("default", "big", nominated="n1")
        assert not (await one.filter(big, "n1")).names
        assert (await one.filter(big, "n1", "n2")).names == ["n2"]
        assert not await one.extender.room.is_under_way(big.uid)


async def test_no_vm_moves_that_has_not_opted_in_or_for_a_vm_that_has_not_asked(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster, extending=ON_REQUEST) as one:
        first = (await halved(one, agent))[0]
        big = asking_pod(cluster, "big", 8, make_room=True)
        assert not (await one.filter(big)).names
        assert await victims(one, big) == []
        await asyncio.sleep(2 * PAUSE_S)
        assert not moved(agent)

        options = {"cpu-set": "one-socket", "kvplace.io/movable": "true"}
        cluster.edit_vmi(first.namespace, first.vmi, first.vmi_uid, options)  # it agrees while it runs
        silent = asking_pod(cluster, "silent", 8)
        await asyncio.sleep(1)
        assert not (await one.filter(silent)).names
        await asyncio.sleep(PAUSE_S)
        assert not moved(agent)
        assert not (await one.filter(big)).names
        await one.until(lambda: moved(agent))
        assert [pod.uid for pod in moved(agent)] == [first.uid]


@pytest.mark.parametrize(
    "why",
    ["off", "immovable", "migrates", "not pinned", "edited", "cpu-set removed", "no agent", "is moving"],
)
async def test_no_move_begins_where_one_must_not(cluster: FaultyCluster, agent: NodeAgent, why: str) -> None:
    off = ExtenderSettings()
    async with replica(cluster, extending=off if why == "off" else AUTOMATIC) as one:
        policy = Policy.IMMOVABLE if why == "immovable" else Policy.EXCLUSIVE
        left = await halved(one, agent, movable=True, policy=policy)
        for vm in left:
            match why:
                case "migrates":
                    cluster.create_pod(f"{vm.name}-2", request=vm.request, vmi=vm.vmi, vmi_uid=vm.vmi_uid)
                case "not pinned":
                    agent.in_force.pop(vm.uid)
                    agent.report()
                case "edited":
                    options = {"cpu-set": "any", "kvplace.io/movable": "true"}
                    cluster.edit_vmi(vm.namespace, vm.vmi, vm.vmi_uid, options)
                case "cpu-set removed":
                    options = {"kvplace.io/movable": "true"} if vm is left[0] else {}
                    cluster.edit_vmi(vm.namespace, vm.vmi, vm.vmi_uid, options)
                case "no agent":
                    cluster.put_topology("n1", TWO)
        if why == "is moving":
            share = {"cpu-set": "one-socket", "kvplace.io/cpu-policy": "share"}
            for vm in left:
                cluster.edit_vmi("default", vm.vmi, vm.vmi_uid, share)
            await one.until(lambda: len(moved(agent)) == len(left))
        else:
            await asyncio.sleep(1)
        revisions = {vm.uid: agent.stored(vm).revision for vm in left}
        big = asking_pod(cluster, "big", 8)
        assert not (await one.filter(big)).names
        await asyncio.sleep(PAUSE_S)
        after = {vm.uid: agent.stored(vm).revision for vm in left}
        assert after == revisions or why == "edited"
        assert notes(cluster, "big", EventReason.MAKING_ROOM) == []


async def test_a_vm_moves_again_once_the_qemu_of_its_migrations_other_pod_has_ended(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    """The source of a migration may keep other containers for a while."""
    async with replica(cluster, extending=AUTOMATIC) as one:
        for vm in await halved(one, agent, movable=True):
            source = cluster.create_pod(f"{vm.name}-0", request=vm.request, vmi=vm.vmi, vmi_uid=vm.vmi_uid)
            cluster._put_pod(replace(source, phase="Running", compute_terminated=True))
        await asyncio.sleep(1)
        assert not (await one.filter(asking_pod(cluster, "big", 8))).names
        await one.until(lambda: moved(agent))


async def test_a_pod_elsewhere_that_claims_to_be_of_a_vm_does_not_keep_it_from_making_room(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    """The owner of a pod that its creator writes himself, UID included."""
    async with replica(cluster, extending=AUTOMATIC) as one:
        for vm in await halved(one, agent, movable=True):
            cluster.create_pod(vm.name, namespace="other", request=vm.request, vmi=vm.vmi, vmi_uid=vm.vmi_uid)
        await asyncio.sleep(1)
        assert not (await one.filter(asking_pod(cluster, "big", 8))).names
        await one.until(lambda: moved(agent))


async def test_no_pod_is_evicted_while_room_is_made_but_one_may_be_when_it_cannot_be_made(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster, extending=AUTOMATIC) as one:
        left = await halved(one, agent, movable=True)
        big = asking_pod(cluster, "big", 8, priority=10)
        assert not (await one.filter(big)).names
        assert await victims(one, big, left[0].uid) == []
        await one.until(lambda: moved(agent))
        (mover,) = moved(agent)
        assert await victims(one, big, left[0].uid) == []

        agent.fail(mover)
        await one.until(lambda: agent.stored(mover).revision == 3)
        await one.until(lambda: notes(cluster, "big", EventReason.ROOM_NOT_MADE))
        agent.carry_out(mover)
        await one.until(lambda: agent.ledger.claims[mover.uid].relocation is None)
        assert agent.stored(mover).placement == agent.in_force[mover.uid].placement
        assert not (await one.filter(big)).names
        assert len(await victims(one, big, left[0].uid)) == 1

        await asyncio.sleep(PAUSE_S)
        assert not (await one.filter(big)).names
        await one.until(lambda: moved(agent))
        assert [pod.uid for pod in moved(agent)] == [vm.uid for vm in left if vm.uid != mover.uid]


async def test_a_move_that_no_client_confirms_is_given_up_and_its_cores_stay_its_own(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster, extending=AUTOMATIC) as one:
        await halved(one, agent, movable=True)
        big = asking_pod(cluster, "big", 8)
        assert not (await one.filter(big)).names
        await one.until(lambda: moved(agent))
        (mover,) = moved(agent)
        await asyncio.sleep(MOVES_S + 10)
        assert "in time" in notes(cluster, "big", EventReason.ROOM_NOT_MADE)[0]
        assert not await one.extender.room.is_under_way(big.uid)
        claim = agent.ledger.claims[mover.uid]
        assert claim.owned == agent.in_force[mover.uid].placement.owned | agent.stored(mover).placement.owned
        agent.carry_out(mover)
        await one.until(lambda: agent.ledger.claims[mover.uid].relocation is None)
        assert (await one.filter(asking_pod(cluster, "small", 4))).names == [N1]  # nothing is reserved


async def test_a_vm_that_is_deleted_while_room_is_made_for_it_leaves_nothing_behind(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster, extending=AUTOMATIC) as one:
        await halved(one, agent, movable=True)
        big = asking_pod(cluster, "big", 8)
        assert not (await one.filter(big)).names
        await one.until(lambda: moved(agent))
        cluster.delete_pod("default", "big", force=True)
        agent.carry_out(moved(agent)[0])
        await one.until(lambda: not any(claim.relocation for claim in agent.ledger.claims.values()))
        assert (await one.filter(asking_pod(cluster, "next", 8))).names == [N1]
        assert notes(cluster, "big", EventReason.ROOM_NOT_MADE) == []


async def test_a_ledger_that_cannot_be_written_stops_it(cluster: FaultyCluster, agent: NodeAgent) -> None:
    async with replica(cluster, extending=AUTOMATIC) as one:
        await halved(one, agent, movable=True)
        big = asking_pod(cluster, "big", 8)
        cluster.faults.fail(Operation.WRITE_LEDGER, Forbidden("no right to write ledgers"))
        assert not (await one.filter(big)).names
        await one.until(lambda: notes(cluster, "big", EventReason.ROOM_NOT_MADE))
        assert not moved(agent)
        assert (await one.filter(asking_pod(cluster, "small", 4))).names == [N1]


async def test_vms_of_another_namespace_are_not_named(cluster: FaultyCluster, agent: NodeAgent) -> None:
    async with replica(cluster, extending=AUTOMATIC) as one:
        await halved(one, agent, movable=True)
        waiting = asking_pod(cluster, "template", 8)
        foreign = cluster.create_pod("big", namespace="other", request=waiting.request, vmi="big")
        cluster.delete_pod("default", "template", force=True)
        assert not (await one.filter(foreign)).names
        await one.until(lambda: moved(agent))
        told = notes(cluster, "big", EventReason.MAKING_ROOM)
        told += notes(cluster, moved(agent)[0].vmi, EventReason.MAKING_ROOM)
        assert len(told) == 2
        assert all("a VM of another namespace" in note for note in told)


async def test_room_is_made_for_a_few_vms_at_a_time_and_one_on_each_node(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster, extending=AUTOMATIC) as one:
        await halved(one, agent, movable=True)
        waiting = [asking_pod(cluster, f"big-{number}", 8) for number in range(AT_ONCE + 2)]
        for pod in waiting:
            assert not (await one.filter(pod)).names
        await one.until(lambda: moved(agent))
        assert sum([await one.extender.room.is_under_way(pod.uid) for pod in waiting]) == 1
        assert len(moved(agent)) == 1


async def test_two_moves_are_made_one_after_the_other_and_no_other_pod_gets_the_cores_of_the_first(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster, extending=AUTOMATIC) as one:
        await halved(one, agent, vcpus=2, movable=True)
        big = asking_pod(cluster, "big", 8)
        assert not (await one.filter(big)).names
        movers = []
        for number in (1, 2):
            await one.until(lambda: moved(agent))
            (mover,) = moved(agent)
            movers.append(mover.uid)
            assert f"move {number} of 2" in notes(cluster, "big", EventReason.MAKING_ROOM)[-1]
            assert (await one.filter(asking_pod(cluster, f"small-{number}", 3))).names == []
            agent.carry_out(mover)
        await one.until(lambda: not any(claim.relocation for claim in agent.ledger.claims.values()))
        assert len(set(movers)) == 2
        assert (await one.filter(big)).names == [N1]
        assert await one.bind(big, "n1") == ""


async def test_two_replicas_move_one_vm_at_a_time_on_a_node(cluster: FaultyCluster, agent: NodeAgent) -> None:
    async with replica(cluster, extending=AUTOMATIC) as one, replica(cluster, extending=AUTOMATIC) as two:
        await halved(one, agent, vcpus=2, movable=True)
        big, other = (asking_pod(cluster, name, 8) for name in ("big", "other"))
        await one.until(lambda: other.uid in two.cache.pods.records)
        asked = await asyncio.gather(one.filter(big), two.filter(other))
        assert [answer.names for answer in asked] == [[], []]
        await one.until(lambda: moved(agent))
        await asyncio.sleep(30)
        assert len(moved(agent)) == 1


async def test_a_vm_that_was_edited_moves_within_its_present_scope(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster, extending=AUTOMATIC) as one:
        edited, _ = await halved(one, agent, movable=True)
        edit(cluster, edited, {"cpu-set": "any", "kvplace.io/smt": "require", "kvplace.io/movable": "true"})
        await until_written(one, agent, edited, 2)
        agent.carry_out(edited)
        await one.until(lambda: agent.ledger.claims[edited.uid].relocation is None)
        await asyncio.sleep(PEACE_S)
        node = MovableVms(one.cache).crowded(N1, [])
        assert node is not None
        scopes = {vm.id: vm.request.options.scope for vm in node.running if vm.movable}
        assert scopes == {vm: Scope.ANY if vm == edited.uid else Scope.ONE_SOCKET for vm in scopes}
        assert len(scopes) == 2


async def test_a_vm_whose_relocation_stays_open_does_not_stop_the_moves_of_others(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster, extending=AUTOMATIC) as one:
        open_for_ever, *_ = await halved(one, agent, 2, movable=True)
        edit(cluster, open_for_ever, SHARE)
        await until_written(one, agent, open_for_ever, 2)
        waiting = asking_pod(cluster, "big", 6)
        assert not (await one.filter(waiting)).names
        await one.until(lambda: len(moved(agent)) == 2)
        (mover,) = (vm for vm in moved(agent) if vm.uid != open_for_ever.uid)
        agent.carry_out(mover)
        await one.until(lambda: agent.ledger.claims[mover.uid].relocation is None)
        assert agent.ledger.claims[open_for_ever.uid].relocation is not None
        assert (await one.filter(waiting)).names == [N1]
