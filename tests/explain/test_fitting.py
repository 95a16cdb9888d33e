"""The report about a waiting VM is the scheduler's answer, and each change that it suggests helps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplace.cli.explain_lines import fitting_lines
from kvplace.core.allocator.allocate import try_place
from kvplace.core.cluster.node_choice import Strategy
from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.ledger import Ledger, claim_of
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import OnFailure, Policy, Request, Scope
from kvplace.core.request_json import PodRequest, read_pod_request, write_request
from kvplace.core.scalars import NO_CPUS, CpuMask, NodeName, PodUid
from kvplace.core.topology import Topology
from kvplace.explain.explanation import Fitting, fit
from kvplace.kube.object_records import LedgerRecord, PodRecord
from kvplace.nodes.cluster_reading import read_cluster
from kvplace.nodes.cluster_view import ClusterView, NodeView, VmView
from kvplace.nodes.node_machine import NodeMachine, NodeSnapshot, Unusable
from kvplace.scheduler.extender import ExtenderSettings, Mode
from tests.controller.replicas import asking_pod, replica
from tests.core.requests import request_with
from tests.kube.example_claims import claim, taking
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import EIGHT, TWO
from tests.profiles import examples


def asked(
    name: str,
    topology: Topology = TWO,
    *,
    taken: str = "",
    pool: str = "",
    pools_shrink: bool = False,
    running: tuple[VmView, ...] = (),
) -> NodeView:
    ledger = Ledger()
    if taken:
        ledger = ledger.after(taking(claim("others", *_ids(taken), memory={})))
    if pool:
        of_pool = claim("pool", *_ids(pool), policy=Policy.NUMA, owned=NO_CPUS, memory={})
        ledger = ledger.after(taking(of_pool))
    for vm in running:
        assert vm.claim is not None
        ledger = ledger.after(taking(vm.claim))
    machine = NodeMachine(topology, pools_shrink)
    return NodeView(NodeName(name), machine, ledger_record=LedgerRecord(NodeName(name), ledger, "1"))


UNKNOWN = NodeView(NodeName("unknown"), Unusable("nothing describes it"))


def fitted(
    nodes: Iterable[NodeView],
    request: Request,
    obstacles: Mapping[NodeName, str] | None = None,
    *,
    strategy: Strategy = Strategy.PACK,
    running: Iterable[VmView] = (),
) -> Fitting:
    view = ClusterView({node.name: node for node in nodes}, {vm.pod.uid: vm for vm in running})
    return fit(view, request, obstacles or {}, strategy)


def _ids(cpus: str) -> list[int]:
    mask = parse_cpu_list(cpus)
    return [cpu for cpu in range(mask.bit_length()) if mask >> cpu & 1]


def running_vm(name: str, cpus: str, *, uid: str = "", movable: bool = False) -> VmView:
    mask = parse_cpu_list(cpus)
    request, uid = request_with(mask.bit_count()), PodUid(uid or name)
    machine = NodeMachine(TWO.giving_out(CpuMask(mask)))
    placement = try_place(TWO, machine.free(Ledger()), request)
    assert isinstance(placement, Placement)
    bound = PodPlacement(uid, NodeName("n"), TWO.fingerprint, OnFailure.WAIT, placement)
    pod = PodRecord(
        "team", name, uid, bound.node, "Running",
        request=write_request(PodRequest(request, movable=movable)), placement=bound.to_json(),
    )  # fmt: skip
    return VmView(pod, claim_of(uid, placement, namespace="team", pod=name))


async def test_nodes_and_reasons_are_those_that_filter_gives() -> None:
    cluster = FaultyCluster()
    for number in range(6):
        cluster.create_node(f"two-{number}", topology=TWO)
        ledger = await cluster.create_ledger(NodeName(f"two-{number}"))
        if number:
            await cluster.write_ledger(ledger, taking(claim(f"vm-{number}", *range(number, 8), memory={})))
    cluster.create_node("eight", topology=EIGHT)
    cluster.create_node("unknown")
    for scope in Scope:
        for vcpus in (1, 3, 7, 9, 17):
            async with replica(cluster, extending=ExtenderSettings(mode=Mode.ADVISE)) as one:
                pod = asking_pod(cluster, f"{scope.value}-{vcpus}", vcpus, scope=scope)
                answer = await one.filter(pod)
                record = await cluster.read_pod("default", f"{scope.value}-{vcpus}")
            view = await read_cluster(cluster)
            assert record is not None
            request = read_pod_request(record.request).request
            found = fit(view, request, {})
            assert {one.node for one in found.candidates} == set(answer.names or ())
            if not found.candidates:
                assert found.refusals.texts == answer.unresolvable
            assert found.nodes == 8


def test_refusals_of_kube_scheduler_come_first_and_name_the_nodes_that_had_the_cores() -> None:
    nodes = [asked("a"), asked("b", taken="0-15"), asked("c", taken="0-14")]
    cordoned = "the node is cordoned (spec.unschedulable)"
    obstacles = {NodeName("a"): cordoned, NodeName("b"): cordoned, NodeName("c"): ""}
    found = fitted(nodes, request_with(4), obstacles)
    (obstacle,) = found.obstacles
    assert (obstacle.nodes, obstacle.would_fit) == (("a", "b"), ("a",))
    assert [group.nodes for group in found.refusals.groups] == [("c",)]
    assert found.candidates == ()


def test_an_empty_machine_is_named_where_the_vm_is_too_large_and_not_where_nothing_describes_it() -> None:
    lines = [line.strip() for line in fitting_lines(fitted([asked("a"), UNKNOWN], request_with(99)), 3)]
    (described,) = (line for line in lines if "nothing describes it" in line)
    assert described.endswith("1 node: nothing describes it")
    assert [line.endswith("(an empty machine would not hold it, either)") for line in lines].count(True) == 1


def test_the_nodes_that_fit_come_in_the_order_of_the_strategy() -> None:
    nodes = [asked("empty"), asked("fuller", taken="0-1,8-9")]
    names = {
        strategy: [one.node for one in fitted(nodes, request_with(2), strategy=strategy).candidates]
        for strategy in (Strategy.PACK, Strategy.SPREAD)
    }
    assert names == {Strategy.PACK: ["fuller", "empty"], Strategy.SPREAD: ["empty", "fuller"]}


def test_changes_are_searched_on_the_nodes_where_least_is_missing() -> None:
    nodes = [asked("far", taken="0-6,8-15"), asked("near", taken="0,4"), asked("none", EIGHT, taken="0-7")]
    found = fitted(nodes, request_with(8, scope=Scope.ONE_SOCKET))
    assert found.suggestions[0].node == "near"
    assert {one.field for one in found.suggestions[0].suggestions.found} >= {"cpuSet", "vcpus"}


def test_a_move_is_suggested_of_a_running_vm_with_a_known_placement() -> None:
    running = (running_vm("db", "0,8"), running_vm("web", "4,12"))
    for known, moved in (
        (running, "move team/"),
        (running[:1], "move team/db "),
        (running[1:], "move team/web "),
    ):
        nodes = [asked("n", running=running)]
        found = fitted(nodes, request_with(8, scope=Scope.ONE_SOCKET), running=known)
        (move,) = [one for one_node in found.suggestions for one in one_node.suggestions.found if one.moves]
        assert moved in move.sentence


@pytest.mark.parametrize("shrinks", [False, True])
def test_a_move_to_cpus_of_a_pool_is_suggested_only_where_an_agent_can_shrink_it(*, shrinks: bool) -> None:
    running = (running_vm("db", "0,8"),)
    nodes = [asked("n", pool="4-7,12-15", pools_shrink=shrinks, running=running)]
    found = fitted(nodes, request_with(8, scope=Scope.ONE_SOCKET), running=running)
    moves = [move for node in found.suggestions for one in node.suggestions.found for move in one.moves]
    assert [move.id for move in moves] == (["team/db"] if shrinks else [])


def test_of_two_claims_of_one_pod_name_neither_is_overlooked_when_moves_are_suggested() -> None:
    """Without the first claim of `team/db` the move of `team/c` alone would free a socket."""
    running = (
        running_vm("db", "0,8", uid="first"),
        running_vm("db", "4,12", uid="second"),
        running_vm("c", "1,9"),
    )
    nodes = [asked("n", running=running)]
    found = fitted(nodes, request_with(8, scope=Scope.ONE_SOCKET), running=running)
    moves = [move for node in found.suggestions for one in node.suggestions.found for move in one.moves]
    assert [move.id for move in moves] == ["team/db (second)"]


def test_a_suggested_move_names_the_needed_consent_unless_the_owner_has_agreed() -> None:
    for agreed in (False, True):
        running = (running_vm("db", "0,8", movable=agreed), running_vm("web", "4,12", movable=agreed))
        nodes = [asked("n", running=running)]
        found = fitted(nodes, request_with(8, scope=Scope.ONE_SOCKET), running=running)
        (line,) = [line for line in fitting_lines(found, 3) if "move team/" in line]
        moved = next(name for name in ("team/db", "team/web") if f"move {name}" in line)
        assert line.endswith(f'; for that {moved} needs kvplace.io/movable: "true"') is not agreed
        assert found.suggestions[0].need_movable == (() if agreed else (moved,))


def test_nothing_is_searched_where_the_vm_fits_and_on_nodes_that_no_agent_describes() -> None:
    assert fitted([asked("a"), asked("b", taken="0-15")], request_with(2)).suggestions == ()
    found = fitted([UNKNOWN], request_with(2))
    assert found.suggestions == ()
    assert found.refusals.summary == "1 node: nothing describes it"


@settings(max_examples=examples(60))
@given(
    st.integers(1, 18),
    st.sampled_from(list(Scope)),
    st.lists(st.sampled_from(["", "0", "0-3", "1,4,9", "0-7", "0-15"]), min_size=1, max_size=4),
)
def test_every_node_gets_exactly_one_answer_and_every_suggestion_fits(
    vcpus: int, scope: Scope, taken: list[str]
) -> None:
    nodes = [asked(f"n{number}", taken=cpus) for number, cpus in enumerate(taken)]
    request: Request = request_with(vcpus, scope=scope)
    found = fitted(nodes, request)
    named = [one.node for one in found.candidates] + [
        name for group in found.refusals.groups for name in group.nodes
    ]
    assert sorted(named) == sorted(node.name for node in nodes)
    for one_node in found.suggestions:
        state = next(node.snapshot for node in nodes if node.name == one_node.node)
        assert isinstance(state, NodeSnapshot)
        for suggestion in one_node.suggestions.found:
            assert try_place(state.machine.topology, state.free, suggestion.request) is not None
