"""The contract of a cluster, run against the in-memory cluster and a real API server."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvplace.core.errors import Conflict, Refused
from kvplace.core.ledger import Ledger, LedgerChange, OwnershipConflict
from kvplace.core.placement import PodPlacement
from kvplace.core.request import Policy
from kvplace.core.scalars import CpuId, NodeName, PodUid
from kvplace.core.well_known_names import CPU_MAP, PLACED_LABEL
from kvplace.kube.events import EventReason, EventRecord, pod_reference
from kvplace.kube.watches import (
    LEDGERS,
    NAME_FIELD,
    NODE_FIELD,
    NODES,
    PLACED_PODS,
    PODS,
    TOPOLOGIES,
    Apply,
    Delete,
    Init,
    InitApply,
    InitDone,
    Kind,
    Selector,
)
from tests.kube.example_claims import claim, taking
from tests.kube.worlds import MACHINE, REQUEST, ApiWorld, Cluster, MemoryWorld, Watcher, World, watching

WORKER, OTHER = NodeName("worker"), NodeName("other")
PLACEMENT = '{"version":1}'
PLACEMENT_KEY = "kvplace.io/placement"
RESULTS = {PLACEMENT_KEY: PLACEMENT, "cpu-map": '{"socket0":["2"]}'}


class Contract:
    """The rules that hold on either side; the subclasses choose the side."""

    # Binding

    async def test_a_bind_stores_node_and_annotations_in_one_write(self, world: World) -> None:
        uid = world.create_pod("vm")
        async with watching(world.cluster, PODS) as seen:
            await world.cluster.bind(world.namespace, "vm", uid, WORKER, RESULTS)
            await seen.until(lambda event: event.record.uid == uid and event.record.node)
            applied = [
                event.record for event in seen.events if isinstance(event, Apply) and event.record.uid == uid
            ]
        assert [(pod.node, pod.placement, pod.cpu_map) for pod in applied] == [
            ("worker", PLACEMENT, RESULTS["cpu-map"])
        ]
        assert world.pod_annotations("vm") == {"kvplace.io/request": REQUEST, **RESULTS}

    async def test_a_pod_is_bound_once(self, world: World) -> None:
        uid = world.create_pod("vm")
        await world.cluster.bind(world.namespace, "vm", uid, WORKER, RESULTS)
        with pytest.raises(Conflict, match="already assigned"):
            await world.cluster.bind(world.namespace, "vm", uid, OTHER, {"cpu-map": "other"})
        pod = await world.cluster.read_pod(world.namespace, "vm")
        assert pod is not None
        assert (pod.node, pod.cpu_map) == (WORKER, RESULTS["cpu-map"])

    async def test_a_node_is_nominated_for_a_pod_that_has_not_changed_until_it_is_bound(
        self, world: World
    ) -> None:
        uid = world.create_pod("vm")
        waiting = await world.cluster.read_pod(world.namespace, "vm")
        assert waiting is not None
        await world.cluster.nominate_node(waiting, WORKER)
        nominated = await world.cluster.read_pod(world.namespace, "vm")
        assert nominated is not None
        assert (nominated.nominated, nominated.node) == (WORKER, "")
        with pytest.raises(Conflict):
            await world.cluster.nominate_node(waiting, OTHER)
        await world.cluster.bind(world.namespace, "vm", uid, OTHER, RESULTS)
        bound = await world.cluster.read_pod(world.namespace, "vm")
        assert bound is not None
        assert (bound.nominated, bound.node) == ("", OTHER)

    async def test_of_many_racing_binds_one_wins(self, world: World) -> None:
        uid = world.create_pod("vm")
        clients = [world.cluster, await world.another_client()]
        outcomes = await asyncio.gather(
            *(
                clients[number % 2].bind(
                    world.namespace, "vm", uid, NodeName(f"node-{number}"), {"cpu-map": str(number)}
                )
                for number in range(8)
            ),
            return_exceptions=True,
        )
        winners = [number for number, outcome in enumerate(outcomes) if outcome is None]
        assert len(winners) == 1
        assert all(isinstance(outcome, Conflict) for outcome in outcomes if outcome is not None)
        pod = await world.cluster.read_pod(world.namespace, "vm")
        assert pod is not None
        assert (pod.node, pod.cpu_map) == (f"node-{winners[0]}", str(winners[0]))

    async def test_a_pod_created_again_under_the_same_name_is_not_bound(self, world: World) -> None:
        old = world.create_pod("vm")
        world.delete_pod("vm", force=True)
        world.create_pod("vm")
        with pytest.raises(Conflict):
            await world.cluster.bind(world.namespace, "vm", old, WORKER, {})
        pod = await world.cluster.read_pod(world.namespace, "vm")
        assert pod is not None
        assert not pod.node

    async def test_a_gated_pod_is_not_bound(self, world: World) -> None:
        uid = world.create_pod("vm", gated=True)
        with pytest.raises(Conflict, match="schedulingGates"):
            await world.cluster.bind(world.namespace, "vm", uid, WORKER, {})

    async def test_a_pod_that_is_gone_is_refused(self, world: World) -> None:
        with pytest.raises(Refused):
            await world.cluster.bind(world.namespace, "nobody", PodUid("some-uid"), WORKER, {})
        assert await world.cluster.read_pod(world.namespace, "nobody") is None

    async def test_a_pod_that_is_being_deleted_keeps_its_node(self, world: World) -> None:
        uid = world.create_pod("vm")
        await world.cluster.bind(world.namespace, "vm", uid, WORKER, {})
        world.delete_pod("vm")
        pod = await world.cluster.read_pod(world.namespace, "vm")
        assert pod is not None
        assert (pod.deleting, pod.node) == (True, "worker")
        with pytest.raises(Conflict):
            await world.cluster.bind(world.namespace, "vm", uid, OTHER, {})

    # Placements of a running pod

    async def test_revisions_of_a_placement_are_written_one_after_the_other(self, world: World) -> None:
        uid = world.create_pod("vm")
        node = world.named("n1")
        await world.cluster.bind(world.namespace, "vm", uid, node, {PLACEMENT_KEY: revision(uid, node, 1)})
        for number in (2, 2, 3):  # a repeated write of the same revision is not an error
            results = {PLACEMENT_KEY: revision(uid, node, number), CPU_MAP: f'{{"socket0":["{number}"]}}'}
            await world.cluster.replace_placement(world.namespace, "vm", uid, results)
            pod = await world.cluster.read_pod(world.namespace, "vm")
            assert pod is not None
            assert (pod.placement, pod.cpu_map) == (results[PLACEMENT_KEY], results[CPU_MAP])
        gone = {PLACEMENT_KEY: revision(uid, node, 4), CPU_MAP: None}
        await world.cluster.replace_placement(world.namespace, "vm", uid, gone)
        assert CPU_MAP not in world.pod_annotations("vm")

    async def test_the_placement_of_another_pod_of_the_same_name_is_not_replaced(self, world: World) -> None:
        uid = world.create_pod("vm")
        node = world.named("n1")
        await world.cluster.bind(world.namespace, "vm", uid, node, {PLACEMENT_KEY: revision(uid, node, 1)})
        with pytest.raises(Refused):
            await world.cluster.replace_placement(
                world.namespace, "vm", PodUid("another"), {PLACEMENT_KEY: revision(uid, node, 2)}
            )
        world.delete_pod("vm", force=True)
        with pytest.raises(Refused):
            await world.cluster.replace_placement(
                world.namespace, "vm", uid, {PLACEMENT_KEY: revision(uid, node, 2)}
            )

    # What a pod should be

    async def test_a_pod_becomes_its_record(self, world: World) -> None:
        uid = world.create_pod("vm", vmi="the-vm")
        waiting = await world.cluster.read_pod(world.namespace, "vm")
        assert waiting is not None
        assert (waiting.uid, waiting.request, waiting.vmi) == (uid, REQUEST, "the-vm")
        assert (waiting.phase, waiting.node) == ("Pending", "")
        await world.cluster.bind(world.namespace, "vm", uid, WORKER, {})
        bound = await world.cluster.read_pod(world.namespace, "vm")
        assert bound is not None
        assert bound.node == WORKER
        world.set_pod_status("vm", phase="Running", compute_terminated=True)
        ended = await world.cluster.read_pod(world.namespace, "vm")
        assert ended is not None
        assert (ended.phase, ended.compute_terminated) == ("Running", True)

    # Disruption budgets

    async def test_disruption_budgets_are_read_with_their_selectors(self, world: World) -> None:
        world.create_disruption_budget("everything", {})
        world.create_disruption_budget("of-vm", {"matchLabels": {"kubevirt.io/created-by": "vm"}})
        expressions = [
            {"key": "tier", "operator": "In", "values": ["gold", "silver"]},
            {"key": "zone", "operator": "NotIn", "values": ["z"]},
            {"key": "app", "operator": "Exists"},
            {"key": "old", "operator": "DoesNotExist"},
        ]
        world.create_disruption_budget("many", {"matchExpressions": expressions})
        read = await world.cluster.read_disruption_budgets()
        budgets = {one.name: one for one in read if one.namespace == world.namespace}

        def counting(labels: dict[str, str], namespace: str = world.namespace) -> set[str]:
            return {name for name, one in budgets.items() if one.counts(namespace, "pod", labels)}

        gold = {"tier": "gold", "app": "", "kubevirt.io/created-by": "vm"}
        assert {one.allowed for one in budgets.values()} == {0}
        assert counting(gold) == {
            "of-vm",
            "many",
        }  # an empty selector selects nothing
        assert counting({**gold, "zone": "z"}) == {"of-vm"}
        assert counting({**gold, "old": ""}) == {"of-vm"}
        assert counting({"tier": "bronze", "app": ""}) == counting({"tier": "gold"}) == counting({}) == set()
        assert counting(gold, "elsewhere") == set()

    # Watching a part

    async def test_pods_are_selected_by_label(self, world: World) -> None:
        world.create_pod("bystander", asks=False)
        world.create_pod("early")
        async with watching(world.cluster, PODS, PLACED_PODS) as seen:
            world.create_pod("another-bystander", asks=False)
            late = world.create_pod("late")
            await seen.until(lambda event: event.record.uid == late)
        assert of_namespace(seen, world) == [(InitApply, "early"), (Apply, "late")]

    async def test_an_object_whose_label_goes_is_deleted_for_the_watch_and_comes_back_with_it(
        self, world: World
    ) -> None:
        uid = world.create_pod("vm")
        async with watching(world.cluster, PODS, PLACED_PODS) as seen:
            world.label_pod("vm", {PLACED_LABEL: None, "other": "label"})
            await seen.until(lambda event: isinstance(event, Delete) and event.record.uid == uid)
            world.set_pod_status("vm", phase="Running")
            world.label_pod("vm", {PLACED_LABEL: "true"})
            await seen.until(lambda event: isinstance(event, Apply) and event.record.uid == uid)
        assert of_namespace(seen, world) == [(InitApply, "vm"), (Delete, "vm"), (Apply, "vm")]

    async def test_an_agent_watches_the_pods_of_its_own_node_only(self, world: World) -> None:
        mine, other = world.named("mine"), world.named("other")
        uids = {name: world.create_pod(name) for name in ("here", "there", "unbound", "comes")}
        uids["plain"] = world.create_pod("plain", asks=False)
        for name, node in (("here", mine), ("there", other), ("plain", mine)):
            await world.cluster.bind(world.namespace, name, uids[name], node, {})
        selector = Selector(PLACED_PODS.labels, {NODE_FIELD: mine})
        async with watching(world.cluster, PODS, selector) as seen:
            assert of_namespace(seen, world) == [(InitApply, "here")]
            world.set_pod_status("there", phase="Running")
            await world.cluster.bind(world.namespace, "comes", uids["comes"], mine, {})
            await seen.until(lambda event: event.record.name == "comes")
            world.delete_pod("here", force=True)
            await seen.until(lambda event: isinstance(event, Delete))
        reported = of_namespace(seen, world)
        assert [*reported[:2], reported[-1]] == [(InitApply, "here"), (Apply, "comes"), (Delete, "here")]
        assert {name for _, name in reported} == {"here", "comes"}

    async def test_pods_are_selected_by_namespace(self, world: World) -> None:
        world.create_pod("early")
        one, other = Selector(namespace=world.namespace), Selector(namespace="kube-system")
        async with watching(world.cluster, PODS, one) as here, watching(world.cluster, PODS, other) as there:
            late = world.create_pod("late")
            await here.until(lambda event: event.record.uid == late)
        assert not of_namespace(there, world)
        assert of_namespace(here, world) == [(InitApply, "early"), (Apply, "late")]

    @pytest.mark.parametrize("kind", [NODES, TOPOLOGIES, LEDGERS])
    async def test_one_object_is_selected_by_name(self, world: World, kind: Kind[Any, Any]) -> None:
        mine, other = world.named("mine"), world.named("other")

        async def make(name: NodeName) -> None:
            if kind is NODES:
                world.create_node(name)
            elif kind is TOPOLOGIES:
                world.put_topology(name, MACHINE)
            else:
                await world.cluster.create_ledger(name)

        await make(other)
        selector = Selector(fields={NAME_FIELD: mine})
        async with watching(world.cluster, kind, selector) as seen:
            assert seen.events == [Init(), InitDone()]
            await make(world.named("third"))
            await make(mine)
            await seen.until(lambda event: isinstance(event, Apply))
        assert [type(event) for event in seen.events] == [Init, InitDone, Apply]
        assert len(seen.records(mine)) == 1

    def test_a_field_that_the_api_server_does_not_select_by_is_an_error_at_once(self, world: World) -> None:
        with pytest.raises(ValueError, match=r"nodes cannot be selected by field spec\.nodeName"):
            world.cluster.watch(NODES, Selector(fields={NODE_FIELD: "worker"}))
        with pytest.raises(ValueError, match=r"nodes cannot be selected by field metadata\.namespace"):
            world.cluster.watch(NODES, Selector(namespace="default"))

    # Watching

    async def test_two_watches_report_the_same_events_in_the_same_order(self, world: World) -> None:
        node = world.named("worker")
        async with (
            watching(world.cluster, LEDGERS) as first,
            watching(await world.another_client(), LEDGERS) as second,
        ):
            record = await world.cluster.create_ledger(node)
            for number in range(5):
                record = await world.cluster.write_ledger(record, taking(claim(f"pod-{number}", number)))
            record = await world.cluster.write_ledger(
                record, LedgerChange(releases=tuple(PodUid(f"pod-{number}") for number in range(5)))
            )
            await world.cluster.delete_ledger(record)
            for watcher in (first, second):
                await watcher.until(lambda event: isinstance(event, Delete) and event.record.node == node)
        assert [type(event) for event in first.records(node)] == [Apply] * 7 + [Delete]
        assert [len(event.record.ledger.owners) for event in first.records(node)[:7]] == [0, 1, 2, 3, 4, 5, 0]
        assert [strip(event) for event in first.records(node)] == [
            strip(event) for event in second.records(node)
        ]

    async def test_a_watch_begins_with_all_there_is(self, world: World) -> None:
        names = [world.named(f"worker-{number}") for number in range(7)]
        for name in names:
            world.create_node(name)
        async with watching(world.cluster, NODES) as seen:
            listed = {event.record.name for event in seen.events if isinstance(event, InitApply)}
            assert set(names) <= listed
            assert isinstance(seen.events[-1], InitDone)

    async def test_a_topology_that_is_not_valid_is_reported_with_its_problem(self, world: World) -> None:
        node = world.named("worker")
        async with watching(world.cluster, TOPOLOGIES) as seen:
            world.put_topology(node, MACHINE)
            good = (await seen.until(lambda event: event.record.node == node)).record
            world.put_topology(node, {**MACHINE, "cores": ["0,2", "1,2,3"]})
            bad = (await seen.until(lambda event: event.record.node == node and event.record.problem)).record
            world.delete_topology(node)
            await seen.until(lambda event: isinstance(event, Delete) and event.record.node == node)
        assert good.topology is not None
        assert (good.problem, good.topology.cpus, good.topology.reserved) == ("", 0b1111, 0b1)
        assert bad.topology is None
        assert "cores" in bad.problem

    # The ledger

    async def test_making_a_ledger_twice_answers_the_same(self, world: World) -> None:
        node = world.named("worker")
        assert await world.cluster.read_ledger(node) is None
        made = await world.cluster.create_ledger(node)
        assert (made.node, made.ledger, made.problem) == (node, Ledger(), "")
        assert await world.cluster.create_ledger(node) == made
        assert await world.cluster.read_ledger(node) == made

    async def test_a_write_returns_the_stored_ledger(self, world: World) -> None:
        record = await world.cluster.create_ledger(world.named("worker"))
        full = claim("pod-a", 1, 3, vmi="vm", memory={0: 5, 1: 7}, huge_pages={1: {1 << 30: 2}})
        sharing = claim("pod-b", 2, policy=Policy.SHARE, owned=0)
        written = await world.cluster.write_ledger(record, taking(full, sharing))
        assert written.ledger.claims == {"pod-a": full, "pod-b": sharing}
        assert written.ledger.owners == {1: "pod-a", 3: "pod-a"}
        assert await world.cluster.read_ledger(record.node) == written

    async def test_a_claim_on_other_memory_leaves_nothing_of_the_old_one(self, world: World) -> None:
        record = await world.cluster.create_ledger(world.named("worker"))
        record = await world.cluster.write_ledger(
            record, taking(claim("pod-a", 1, 2, memory={0: 5}, huge_pages={0: {1 << 30: 1}}))
        )
        moved = claim("pod-a", 2, 3, memory={1: 5})
        await world.cluster.write_ledger(record, taking(moved))
        stored = await world.cluster.read_ledger(record.node)
        assert stored is not None
        assert stored.ledger == Ledger(
            {CpuId(2): PodUid("pod-a"), CpuId(3): PodUid("pod-a")}, {PodUid("pod-a"): moved}
        )

    async def test_a_write_that_was_decided_on_an_old_ledger_is_a_conflict(self, world: World) -> None:
        record = await world.cluster.create_ledger(world.named("worker"))
        await world.cluster.write_ledger(record, taking(claim("pod-a", 1)))
        with pytest.raises(Conflict) as failure:
            await world.cluster.write_ledger(record, taking(claim("pod-b", 2)))
        assert not isinstance(failure.value, OwnershipConflict)

    async def test_a_cpu_never_goes_from_one_pod_to_another_in_one_write(self, world: World) -> None:
        record = await world.cluster.create_ledger(world.named("worker"))
        held = await world.cluster.write_ledger(record, taking(claim("pod-a", 1, 2)))
        with pytest.raises(OwnershipConflict):
            await world.cluster.write_ledger(held, taking(claim("pod-b", 2, 3)))
        with pytest.raises(OwnershipConflict):
            await world.cluster.write_ledger(
                held, LedgerChange(claims=(claim("pod-b", 2),), releases=(PodUid("pod-a"),))
            )
        assert await world.cluster.read_ledger(record.node) == held
        free = await world.cluster.write_ledger(held, LedgerChange(releases=(PodUid("pod-a"),)))
        taken = await world.cluster.write_ledger(free, taking(claim("pod-b", 2)))
        assert taken.ledger.owners == {2: "pod-b"}

    async def test_a_writer_who_takes_an_owned_cpu_for_free_is_refused(self, world: World) -> None:
        record = await world.cluster.create_ledger(world.named("worker"))
        held = await world.cluster.write_ledger(record, taking(claim("pod-a", 1, 2)))
        with pytest.raises(OwnershipConflict):
            await world.cluster.write_ledger(replace(held, ledger=Ledger()), taking(claim("pod-b", 2, 3)))

    async def test_a_ledger_that_is_gone_cannot_be_written(self, world: World) -> None:
        record = await world.cluster.create_ledger(world.named("worker"))
        await world.cluster.delete_ledger(record)
        with pytest.raises(Conflict):
            await world.cluster.write_ledger(record, taking(claim("pod-a", 1)))
        await world.cluster.delete_ledger(record)

    async def test_a_ledger_created_again_is_another_one(self, world: World) -> None:
        old = await world.cluster.create_ledger(world.named("worker"))
        await world.cluster.delete_ledger(old)
        new = await world.cluster.create_ledger(old.node)
        with pytest.raises(Conflict):
            await world.cluster.write_ledger(old, taking(claim("pod-a", 1)))
        with pytest.raises(Conflict):
            await world.cluster.delete_ledger(replace(old, resource_version=new.resource_version))

    async def test_a_ledger_with_owners_cannot_be_deleted(self, world: World) -> None:
        record = await world.cluster.create_ledger(world.named("worker"))
        held = await world.cluster.write_ledger(record, taking(claim("pod-a", 1)))
        with pytest.raises(Conflict):
            await world.cluster.delete_ledger(record)
        with pytest.raises(Conflict, match="owners"):
            await world.cluster.delete_ledger(held)
        empty = await world.cluster.write_ledger(held, LedgerChange(releases=(PodUid("pod-a"),)))
        await world.cluster.delete_ledger(empty)
        assert await world.cluster.read_ledger(record.node) is None

    async def test_racing_writers_share_the_cpus_out_without_a_double(self, world: World) -> None:
        node = world.named("worker")
        await world.cluster.create_ledger(node)
        clients = [world.cluster, await world.another_client()]
        won = await asyncio.gather(
            *(take_two_cpus(clients[number % 2], node, f"pod-{number}") for number in range(8))
        )
        stored = await world.cluster.read_ledger(node)
        assert stored is not None
        stored.ledger.check()
        assert len(stored.ledger.owners) == 16
        assert {
            cpu: f"pod-{number}" for number, cpus in enumerate(won) for cpu in cpus
        } == stored.ledger.owners

    # Events

    async def test_an_event_is_stored_about_its_object(self, world: World) -> None:
        about = pod_reference(world.namespace, "vm", world.create_pod("vm"))
        event = EventRecord(about, EventReason.DOES_NOT_FIT, "3 nodes: no NUMA node with 4 free CPUs")
        await world.cluster.record_event(event)
        assert world.events(EventReason.DOES_NOT_FIT) == [event]

    async def test_annotations_of_a_node_are_set_and_taken_away_one_by_one(self, world: World) -> None:
        node = world.named("worker")
        world.create_node(node)
        await world.cluster.annotate_node(node, {"cpu-map": "{}", "kvplace.io/note": "one"})
        await world.cluster.annotate_node(node, {"kvplace.io/note": None})
        assert world.node_annotations(node) == {"cpu-map": "{}"}
        with pytest.raises(Refused):
            await world.cluster.annotate_node(world.named("nobody"), {"cpu-map": "{}"})

    async def test_there_is_no_vmi_where_there_is_none(self, world: World) -> None:
        assert await world.cluster.read_vmi(world.namespace, "nobody") is None


class TestMemoryCluster(Contract):
    @pytest.fixture
    def world(self, memory_world: MemoryWorld) -> World:
        return memory_world


class TestApiCluster(Contract):
    @pytest.fixture
    def world(self, api_world: ApiWorld) -> World:
        return api_world


def revision(uid: PodUid, node: NodeName, number: int) -> str:
    """Write some placement of a pod, with a revision."""
    return replace(PodPlacement.floating(pod_uid=uid, node=node), revision=number).to_json()


def of_namespace(seen: Watcher, world: World) -> list[tuple[type, str]]:
    """The reports of a watch of pods about this world, in order."""
    return [
        (type(event), event.record.name)
        for event in seen.events
        if isinstance(event, InitApply | Apply | Delete) and event.record.namespace == world.namespace
    ]


def strip(event: Any) -> tuple[type, Any]:
    return type(event), event.record


async def take_two_cpus(cluster: Cluster, node: NodeName, uid: str) -> list[int]:
    """Claim the two lowest free CPUs as a replica does: read, decide, write; all again after Conflict."""
    while True:
        record = await cluster.read_ledger(node)
        assert record is not None
        free = [cpu for cpu in range(16) if cpu not in record.ledger.owners][:2]
        try:
            await cluster.write_ledger(record, taking(claim(uid, *free)))
        except Conflict:
            continue
        return free
