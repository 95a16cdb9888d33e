"""The view of a cluster: read once or followed by watches, it reports the same."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.errors import Forbidden, Unavailable
from kvplace.core.placement import PodPlacement
from kvplace.core.request import Level, Policy
from kvplace.core.scalars import NodeName, PodUid
from kvplace.core.well_known_names import PINNED
from kvplace.kube.object_records import Condition, PodRecord
from kvplace.kube.watches import EVERYTHING, NODE_STATUSES, Interrupted
from kvplace.nodes.cluster_reading import read_cluster, read_node, watched_nodes
from kvplace.nodes.cluster_view import ClusterView, VmState, VmView
from tests.kube.example_claims import claim, taking
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import TWO

REQUEST = '{"version":1,"vcpus":2}'
NODE = NodeName("worker")


@pytest.fixture
async def cluster() -> FaultyCluster:
    """One node of two sockets; `db` owns four of its CPUs, `web` shares two, and `late` has no node."""
    made = FaultyCluster()
    made.create_node("worker", topology=TWO)
    made.create_pod("launcher-db", uid="db", request=REQUEST, vmi="db", node="worker")
    made.create_pod("launcher-web", uid="web", request=REQUEST, vmi="web", node="worker", namespace="shop")
    made.create_pod("late", uid="late", request=REQUEST, namespace="shop")
    made.create_pod("stranger", uid="stranger")
    shared = claim("web", 4, 12, policy=Policy.SHARE, owned=parse_cpu_list(""))
    await made.write_ledger(await made.create_ledger(NODE), taking(claim("db", 0, 1, 8, 9), shared))
    return made


async def test_a_node_reports_who_has_its_cpus(cluster: FaultyCluster) -> None:
    node = (await read_cluster(cluster)).nodes[NODE]
    assert (node.owned, node.shared) == (parse_cpu_list("0-1,8-9"), parse_cpu_list("4,12"))
    assert (node.free, node.reserved) == (parse_cpu_list("2-3,5-7,10-11,13-15"), 0)
    assert node.free_blocks is not None
    assert node.free_blocks.largest[Level.NUMA].cpus == 6
    assert node.problem == ""


async def test_vms_are_listed_by_namespace_and_name_with_their_claims(cluster: FaultyCluster) -> None:
    view = await read_cluster(cluster)
    assert [(vm.namespace, vm.name, vm.node) for vm in view.vms.values()] == [
        ("default", "db", "worker"),
        ("shop", "late", ""),
        ("shop", "web", "worker"),
    ]
    held = view.vms[PodUid("db")].claim
    assert held is not None
    assert held.owned == parse_cpu_list("0-1,8-9")
    assert [vm.name for vm in view.by_node[NODE]] == ["db", "web"]
    assert [vm.pod.uid for vm in view.named("shop", "late")] == ["late"]


async def test_a_node_of_which_only_a_ledger_is_left_is_shown_as_gone(cluster: FaultyCluster) -> None:
    await cluster.create_ledger(NodeName("gone"))
    view = await read_cluster(cluster)
    gone = view.nodes[NodeName("gone")]
    assert not gone.exists
    assert gone.problem == "the node is not known to the API server"
    assert (gone.cpus, gone.free_blocks) == (0, None)


async def test_one_node_can_be_read_alone(cluster: FaultyCluster) -> None:
    cluster.create_node("other", topology=TWO)
    view = await read_node(cluster, NODE)
    assert list(view.nodes) == ["worker"]
    assert list(view.vms) == ["db", "web"]
    assert (await read_node(cluster, NodeName("nowhere"))) == ClusterView({}, {})


async def test_a_list_that_fails_is_the_readers_error(cluster: FaultyCluster) -> None:
    class Broken(FaultyCluster):
        async def read_all(self, kind: object, selector: object = None) -> tuple[()]:
            raise Unavailable("the API server is away")

    with pytest.raises(Unavailable, match="away"):
        await read_cluster(Broken())


async def test_watched_nodes_are_those_that_are_read_and_then_the_changed_ones(
    cluster: FaultyCluster,
) -> None:
    other = NodeName("other")
    cluster.create_node(other, topology=TWO)
    async with contextlib.aclosing(watched_nodes(cluster, EVERYTHING)) as watched:
        read = await read_cluster(cluster, pods=None, kind=NODE_STATUSES)
        assert await anext(watched) == (True, tuple(read.nodes.values()))
        ledger = await cluster.read_ledger(NODE)
        assert ledger is not None
        await cluster.write_ledger(ledger, taking(claim("new", 2)))
        now = await read_cluster(cluster, pods=None, kind=NODE_STATUSES)
        assert await anext(watched) == (False, (now.nodes[NODE],))
        assert now.nodes[NODE].owned == parse_cpu_list("0-2,8-9")
        cluster.delete_node(other)
        first, nodes = await anext(watched)
        assert (first, [node.exists for node in nodes]) == (False, [False])


async def test_a_missing_right_to_watch_is_an_error_at_once(cluster: FaultyCluster) -> None:
    class Denying(FaultyCluster):
        async def watch(self, kind: Any, selector: Any = None) -> AsyncIterator[Any]:
            yield Interrupted(Forbidden("you may not list nodes"))
            await asyncio.Event().wait()

    with pytest.raises(Forbidden, match="may not list nodes"):
        await anext(watched_nodes(Denying(), EVERYTHING))


PLACED = PodPlacement.of_cpu_map('{"socket0":["0","1"]}')


def placement(uid: str, *, floats: bool = False) -> str:
    made = PodPlacement.floating(pod_uid=PodUid(uid), node=NODE) if floats else PLACED
    return replace(made, pod_uid=PodUid(uid), node=NODE).to_json()


def pinned(status: bool | None) -> tuple[Condition, ...]:
    return (Condition(PINNED, status, "AffinitiesRead", "revision 1"),)


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, VmState.WAITING),
        ({"node": NODE}, VmState.BOUND),
        ({"node": NODE, "phase": "Running", "placement": placement("u")}, VmState.RUNNING),
        ({"node": NODE, "phase": "Running", "conditions": pinned(None)}, VmState.RUNNING),
        ({"node": NODE, "phase": "Running", "conditions": pinned(True)}, VmState.PINNED),
        ({"node": NODE, "phase": "Running", "conditions": pinned(False)}, VmState.NOT_PINNED),
        ({"node": NODE, "phase": "Running", "placement": placement("u", floats=True)}, VmState.FLOATING),
        ({"node": NODE, "phase": "Running", "deleting": True}, VmState.ENDING),
        ({"node": NODE, "phase": "Succeeded", "deleting": True}, VmState.ENDED),
        ({"node": NODE, "phase": "Failed"}, VmState.FAILED),
    ],
)
def test_a_vm_states_how_far_it_has_come(changes: dict[str, object], state: VmState) -> None:
    pod = PodRecord("default", "launcher", PodUid("u"), request=REQUEST, **changes)  # type: ignore[arg-type]
    assert VmView(pod).state is state


def test_a_placement_that_was_made_for_another_pod_is_not_shown() -> None:
    pod = PodRecord("default", "launcher", PodUid("u"), NODE, placement=placement("other"))
    assert VmView(pod).placement is None


def test_annotations_that_kvplace_could_not_have_written_are_not_shown() -> None:
    vm = VmView(PodRecord("default", "p", PodUid("u"), NODE, request="{", placement="[]"))
    assert (vm.request, vm.placement) == (None, None)
