"""Running pods get the cores that their edited annotations ask for, and no VM loses one meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplace.core.claim_changes import claim_while_relocating
from kvplace.core.errors import Unavailable
from kvplace.core.ledger import LedgerChange, Relocation, claim_of
from kvplace.core.request import Policy, Scope
from kvplace.core.request_json import PodRequest, write_request
from kvplace.core.scalars import CpuMask, NodeName, PodUid
from kvplace.kube.events import EventReason
from kvplace.kube.object_records import PodRecord
from tests.controller.relocations import (
    EXCLUSIVE,
    NONE,
    SHARE,
    NodeAgent,
    bound,
    condition,
    edit,
    node_with_agent,
    until_written,
    wide,
)
from tests.controller.replicas import asking_pod, replica
from tests.core.requests import request_with
from tests.kube.faults import Moment, Operation
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import EIGHT, TWO
from tests.profiles import examples

if TYPE_CHECKING:
    from _collections_abc import dict_values


async def test_exclusive_becomes_share_in_place_and_its_cores_stay_its_own_until_the_agent_has_confirmed_it(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as one:
        pod = await bound(one, agent, "vm")
        owned = agent.ledger.owned
        edit(cluster, pod, SHARE)
        after = await until_written(one, agent, pod, 2)
        assert (after.placement.policy, after.placement.cpus) == (Policy.SHARE, owned)
        await asyncio.sleep(60)
        assert agent.ledger.owned == owned
        agent.carry_out(pod)
        await one.until(lambda: not agent.ledger.owned)
        claim = agent.ledger.claims[pod.uid]
        assert (claim.policy, claim.cpus, claim.relocation) == (Policy.SHARE, owned, None)
        assert claim.revision == 2
        await one.until(lambda: condition(cluster, pod))
        found = condition(cluster, pod)
        assert found is not None
        assert found.status is True
        assert "revision 2" in found.message
        assert [event.reason for event in cluster.events][-1] is EventReason.RELOCATED


async def test_a_claim_under_relocation_is_not_restored_from_its_pod(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as one:
        pod = await bound(one, agent, "vm")
        edit(cluster, pod, SHARE)
        await until_written(one, agent, pod, 2)
        before = agent.ledger.claims[pod.uid]
        await one.controller.reconciler._restore(NodeName("n1"), [agent.live(pod)])
        assert agent.ledger.claims[pod.uid] == before
        assert before.relocation is not None


async def test_share_becomes_exclusive_when_there_is_room_and_waits_for_it_otherwise(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as one:
        sharing = await bound(one, agent, "sharing", 4, policy=Policy.SHARE)
        await bound(one, agent, "a", 8)
        more = await bound(one, agent, "b", 4)
        await bound(one, agent, "also-sharing", 4, policy=Policy.SHARE)
        edit(cluster, sharing, EXCLUSIVE)
        await one.until(lambda: condition(cluster, sharing))
        found = condition(cluster, sharing)
        assert found is not None
        assert found.status is False
        assert "4" in found.message
        assert agent.stored(sharing).revision == 1
        assert agent.ledger.claims[sharing.uid].relocation is None

        cluster.delete_pod("default", "b", force=True)
        del agent.in_force[more.uid]
        agent.report()
        after = await until_written(one, agent, sharing, 2)
        agent.carry_out(sharing)
        await one.until(lambda: agent.ledger.claims[sharing.uid].relocation is None)
        assert agent.ledger.claims[sharing.uid].owned == after.placement.owned


async def test_a_narrower_scope_moves_a_vm_and_gives_its_old_cores_to_others_afterwards(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as one:
        pod = await wide(one, agent)
        before = agent.ledger.owned
        edit(cluster, pod, {"cpu-set": "one-numa"})
        after = await until_written(one, agent, pod, 2)
        assert len(after.placement.numa_nodes) == 1
        assert agent.ledger.owned == before | after.placement.owned
        agent.carry_out(pod)
        await one.until(lambda: agent.ledger.claims[pod.uid].owned == after.placement.owned)


async def test_an_edit_that_cannot_be_read_does_not_keep_a_relocation_open(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    """Else a typo of its owner would keep both sets of cores from all other VMs."""
    async with replica(cluster) as one:
        pod = await wide(one, agent)
        edit(cluster, pod, {"cpu-set": "one-numa"})
        after = await until_written(one, agent, pod, 2)
        edit(cluster, pod, {"cpu-set": "no-such"})
        await asyncio.sleep(1)
        agent.carry_out(pod)
        await one.until(lambda: agent.ledger.claims[pod.uid].owned == after.placement.owned)
        await one.until(lambda: (found := condition(cluster, pod)) is not None and "no-such" in found.message)


async def test_exclusive_becomes_none_and_none_becomes_exclusive(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as one:
        pod = await bound(one, agent, "vm")
        edit(cluster, pod, NONE)
        after = await until_written(one, agent, pod, 2)
        assert after.placement.floats
        assert "cpu-map" not in cluster.pod_annotations(pod.namespace, pod.name)
        assert pod.uid in agent.ledger.claims
        agent.carry_out(pod)
        await one.until(lambda: pod.uid not in agent.ledger.claims)
        assert not agent.ledger.owned

        edit(cluster, pod, EXCLUSIVE)
        again = await until_written(one, agent, pod, 3)
        assert again.placement.owned == agent.ledger.owned
        assert "cpu-map" in cluster.pod_annotations(pod.namespace, pod.name)
        agent.carry_out(pod)
        await one.until(lambda: agent.ledger.claims[pod.uid].relocation is None)


async def test_a_pod_that_was_never_placed_can_get_cores(cluster: FaultyCluster, agent: NodeAgent) -> None:
    async with replica(cluster) as one:
        pod = asking_pod(cluster, "vm", policy=Policy.NONE)
        await cluster.bind("default", "vm", pod.uid, NodeName("n1"), {})
        await asyncio.sleep(40)
        assert not agent.ledger.claims
        edit(cluster, pod, EXCLUSIVE)
        await one.until(lambda: agent.live(pod).placement)
        first = agent.stored(pod)
        assert (first.revision, first.placement.owned) == (1, agent.ledger.owned)
        agent.carry_out(pod)
        await one.until(lambda: agent.ledger.claims[pod.uid].relocation is None)


async def test_a_plain_pod_is_edited_itself(cluster: FaultyCluster, agent: NodeAgent) -> None:
    async with replica(cluster) as one:
        asked = write_request(PodRequest(request_with(2)))
        made = cluster.create_pod("web", request=asked, resources={"cpu": 2000})
        assert await one.bind(made, "n1") == ""
        agent.carry_out(made)
        cluster.edit_pod("default", "web", SHARE)
        after = await until_written(one, agent, made, 2)
        assert after.placement.policy is Policy.SHARE


async def test_a_relocation_that_the_agent_refuses_is_undone_and_not_tried_again_until_the_next_edit(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as one:
        pod = await wide(one, agent)
        first = agent.stored(pod).placement
        edit(cluster, pod, {"cpu-set": "one-numa"})
        await until_written(one, agent, pod, 2)
        agent.fail(pod)
        back = await until_written(one, agent, pod, 3)
        assert back.placement == first
        assert agent.ledger.claims[pod.uid].owned & ~first.owned
        agent.carry_out(pod)
        await one.until(lambda: agent.ledger.claims[pod.uid].owned == first.owned)
        await asyncio.sleep(120)
        assert agent.stored(pod).revision == 3
        found = condition(cluster, pod)
        assert found is not None
        assert found.status is False
        assert "no free huge pages" in found.message


async def test_a_failed_relocation_is_undone_although_a_user_has_removed_the_claim_meanwhile(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as one:
        pod = await wide(one, agent)
        first = agent.stored(pod).placement
        edit(cluster, pod, {"cpu-set": "one-numa"})
        second = await until_written(one, agent, pod, 2)
        cluster.put_ledger("n1", agent.ledger.after(LedgerChange(releases=(pod.uid,))))
        await one.until(lambda: pod.uid in agent.ledger.claims)
        assert agent.ledger.claims[pod.uid].owned == second.placement.owned
        agent.fail(pod)
        back = await until_written(one, agent, pod, 3)
        assert back.placement == first
        agent.carry_out(pod)
        await one.until(lambda: agent.ledger.claims[pod.uid].relocation is None)
        assert agent.ledger.claims[pod.uid].owned == first.owned


async def test_a_vm_that_could_not_be_unpinned_has_its_cores_again_although_its_claim_was_taken_away(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as one:
        pod = await bound(one, agent, "vm")
        first = agent.stored(pod).placement
        edit(cluster, pod, NONE)
        await until_written(one, agent, pod, 2)
        cluster.put_ledger("n1", agent.ledger.after(LedgerChange(releases=(pod.uid,))))
        agent.fail(pod)
        back = await until_written(one, agent, pod, 3)
        assert back.placement == first
        agent.carry_out(pod)
        await one.until(lambda: agent.ledger.claims[pod.uid].relocation is None)
        assert agent.ledger.owned == first.owned


async def test_when_its_former_cores_were_given_away_meanwhile_its_owner_is_asked_to_restart_it(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as one:
        pod = await wide(one, agent)
        edit(cluster, pod, {"cpu-set": "one-numa"})
        await until_written(one, agent, pod, 2)
        cluster.put_ledger("n1", agent.ledger.after(LedgerChange(releases=(pod.uid,))))
        await one.until(lambda: pod.uid in agent.ledger.claims)
        assert await one.bind(asking_pod(cluster, "other", 6, scope=Scope.ANY), "n1") == ""
        before = agent.ledger
        agent.fail(pod)
        await one.until(lambda: "restart" in str(condition(cluster, pod)))
        assert (agent.ledger, agent.stored(pod).revision) == (before, 2)


async def test_a_placement_that_was_written_late_is_claimed_before_it_is_put_in_effect(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    """Its claim was taken away meanwhile, and another replica has begun anew with other cores."""
    async with replica(cluster) as one:
        pod = await wide(one, agent)
        first = agent.stored(pod)
        edit(cluster, pod, {"cpu-set": "one-numa"})
        late = await until_written(one, agent, pod, 2)
        free = TWO.allocatable & ~agent.ledger.owned
        other = CpuMask(free & -free)
        anew = replace(late, placement=replace(late.placement, cpus=other, owned=other))
        held = claim_of(pod.uid, first.placement, namespace="default", pod=pod.name, vmi=pod.vmi)
        cluster.put_ledger("n1", agent.ledger.after(LedgerChange(releases=(pod.uid,))))
        moving = claim_while_relocating(held, Relocation(anew, first))
        cluster.put_ledger("n1", agent.ledger.after(LedgerChange(claims=(moving,))))
        await one.until(lambda: not late.placement.owned & ~agent.ledger.claims[pod.uid].owned)
        agent.carry_out(pod)
        await one.until(lambda: agent.ledger.claims[pod.uid].relocation is None)
        assert agent.ledger.claims[pod.uid].owned == late.placement.owned


async def test_a_vm_is_not_moved_before_a_claim_that_was_taken_away_is_back(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as one:
        pod = await wide(one, agent)
        held = agent.ledger.claims[pod.uid]
        edit(cluster, pod, {"cpu-set": "one-numa"})
        cluster.put_ledger("n1", agent.ledger.after(LedgerChange(releases=(pod.uid,))))
        await one.until(lambda: one.cache.ledger(NodeName("n1")).claims.get(pod.uid) is None)
        await one.controller.relocator.relocate(NodeName("n1"))
        await until_written(one, agent, pod, 2)
        assert not held.owned & ~agent.ledger.claims[pod.uid].owned


async def test_a_way_back_that_fails_too_waits_for_the_agent_instead_of_going_in_circles(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as one:
        pod = await bound(one, agent, "vm")
        edit(cluster, pod, SHARE)
        for revision in (2, 3):
            await until_written(one, agent, pod, revision)
            agent.fail(pod)
        await asyncio.sleep(120)
        assert agent.stored(pod).revision == 3
        agent.carry_out(pod)
        await one.until(lambda: agent.ledger.claims[pod.uid].relocation is None)


async def test_a_way_back_to_cpus_that_the_machine_no_longer_has_ends_without_a_map_of_them(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as one:
        pod = await bound(one, agent, "vm", 12, scope=Scope.ANY)
        edit(cluster, pod, SHARE | {"cpu-set": "any"})
        await until_written(one, agent, pod, 2)
        agent.topology = EIGHT  # another machine has got the name of the node
        agent.fail(pod)
        await until_written(one, agent, pod, 3)
        assert not agent.live(pod).cpu_map
        agent.carry_out(pod)
        await one.until(lambda: agent.ledger.claims[pod.uid].relocation is None)


@pytest.mark.parametrize(
    ("options", "asking", "why"),
    [
        ({"policy": Policy.IMMOVABLE}, SHARE, "immovable"),
        ({}, {"cpu-set": "one-socket", "kvplace.io/guest-numa": "mirror"}, "NUMA cells"),
        ({}, {"cpu-set": "one-sockt"}, "one-socket"),
        ({}, {"kvplace.io/smt": "isolate", "kvplace.io/cpu-policy": "share"}, "isolate"),
    ],
)
async def test_an_edit_that_is_forbidden_for_a_running_vm_is_answered_and_changes_nothing(
    cluster: FaultyCluster, agent: NodeAgent, options: dict[str, Any], asking: dict[str, str], why: str
) -> None:
    async with replica(cluster) as one:
        pod = await bound(one, agent, "vm", **options)
        before = agent.ledger
        edit(cluster, pod, asking)
        await one.until(lambda: condition(cluster, pod))
        found = condition(cluster, pod)
        assert found is not None
        assert found.status is False
        assert why in found.message
        assert (agent.ledger.owners, agent.stored(pod).revision) == (before.owners, 1)


async def test_without_an_agent_and_while_it_live_migrates_a_vm_keeps_its_cores(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as one:
        pod = await bound(one, agent, "vm")
        cluster.put_topology("n1", TWO)
        edit(cluster, pod, SHARE)
        await one.until(lambda: condition(cluster, pod))
        assert "agent" in str(condition(cluster, pod))

        target = cluster.create_pod("vm-target", request=pod.request, vmi=pod.vmi, vmi_uid=pod.vmi_uid)
        agent.report()
        await one.until(lambda: "live-migrated" in str(condition(cluster, pod)))
        assert agent.stored(pod).revision == 1

        cluster.delete_pod("default", target.name, force=True)
        await until_written(one, agent, pod, 2)


async def test_a_pod_elsewhere_that_claims_to_be_of_the_vm_does_not_stop_its_edit(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    """The owner of a pod that its creator writes himself, UID included."""
    async with replica(cluster) as one:
        pod = await bound(one, agent, "vm")
        cluster.create_pod(
            "vm-target", namespace="other", request=pod.request, vmi=pod.vmi, vmi_uid=pod.vmi_uid
        )
        edit(cluster, pod, SHARE)
        await until_written(one, agent, pod, 2)


async def test_a_pod_that_claims_to_be_of_a_vm_elsewhere_gets_nothing_that_the_vm_asks_for(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as one:
        pod = await bound(one, agent, "vm")
        cluster.edit_vmi("other", pod.vmi, pod.vmi_uid, SHARE)
        await asyncio.sleep(1)
        assert (agent.stored(pod).revision, condition(cluster, pod)) == (1, None)


class Counted(dict[PodUid, PodRecord]):
    """Pods by UID; counts how often all are gone through."""

    passes = 0

    def values(self) -> dict_values[PodUid, PodRecord]:
        self.passes += 1
        return super().values()


async def test_an_edit_costs_no_check_of_the_pods_of_other_vms(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    """Otherwise an edit of every VM of a large cluster takes a time that grows with their square."""
    async with replica(cluster) as one:
        pod = await bound(one, agent, "vm")
        pods = one.cache.pods._records = Counted(one.cache.pods.records)
        edit(cluster, pod, SHARE)
        await until_written(one, agent, pod, 2)
        agent.carry_out(pod)
        await one.until(lambda: not agent.ledger.owned)
        assert pods.passes == 0


Strike = tuple[Operation, Moment, int]
strikes = st.lists(
    st.tuples(
        st.sampled_from(
            [
                Operation.WRITE_LEDGER,
                Operation.READ_POD,
                Operation.REPLACE_PLACEMENT,
                Operation.SET_POD_CONDITION,
            ]
        ),
        st.sampled_from(Moment),
        st.integers(1, 3),
    ),
    max_size=5,
)
edits = st.lists(
    st.sampled_from([SHARE, EXCLUSIVE, NONE, {"cpu-set": "one-numa"}, {"cpu-set": "spread-sockets"}]),
    min_size=1,
    max_size=3,
)


@settings(max_examples=examples(60), deadline=None)
@given(strikes, edits, st.booleans(), st.booleans())
def test_whatever_fails_and_whoever_dies_everything_agrees_in_the_end(
    strikes: list[Strike], edits: list[dict[str, str]], dies: bool, refuses: bool
) -> None:
    from tests.virtual_time import JumpingLoop

    async def story() -> None:
        cluster = node_with_agent(TWO)
        agent = NodeAgent(cluster, TWO)
        async with replica(cluster) as first:
            pod = await bound(first, agent, "vm", 4)
            other = await bound(first, agent, "other", 2)
        for operation, moment, nth in strikes:
            cluster.faults.fail(operation, Unavailable("away"), nth=nth, moment=moment)
        async with replica(cluster) as stays:
            for number, asking in enumerate(edits):
                if dies:
                    async with replica(cluster):
                        edit(cluster, pod, asking)
                        await asyncio.sleep(0.05 * number)
                else:
                    edit(cluster, pod, asking)
                for _ in range(4):
                    await asyncio.sleep(35)
                    agent.check(other.uid, agent.stored(other).placement.owned)
                    if refuses and agent.stored(pod).revision == 2 and pod.uid not in agent.failed:
                        agent.fail(pod)
                    elif agent.stored(pod) != agent.in_force[pod.uid]:
                        agent.carry_out(pod)
            await stays.until(lambda: _settled(agent, pod))
        _agrees(agent, pod)

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(story())


def _settled(agent: NodeAgent, pod: PodRecord) -> bool:
    claim = agent.ledger.claims.get(pod.uid)
    if agent.stored(pod) != agent.in_force[pod.uid]:
        agent.carry_out(pod)
    return claim is None or claim.relocation is None


def _agrees(agent: NodeAgent, pod: PodRecord) -> None:
    """Ledger, annotation and node report the same."""
    placement = agent.stored(pod).placement
    assert agent.in_force[pod.uid].placement == placement
    claim = agent.ledger.claims.get(pod.uid)
    if placement.floats:
        assert claim is None
    else:
        assert claim is not None
        assert (claim.cpus, claim.owned, claim.policy) == (placement.cpus, placement.owned, placement.policy)
    held = CpuMask(0)
    for cpu, owner in agent.ledger.owners.items():
        if owner == pod.uid:
            held |= CpuMask(1 << cpu)
    assert held == placement.owned
