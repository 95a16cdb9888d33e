"""A simulation decides as a cluster does, counts correctly, and gives equal outcomes for equal scenarios."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.cluster.node_choice import Strategy
from kvplace.core.errors import BadBody
from kvplace.core.free_resources import free_of
from kvplace.core.ledger import Ledger
from kvplace.core.placement import Reason
from kvplace.core.request import Request
from kvplace.core.scalars import NO_BYTES, NO_CPUS, Bytes, NumaId
from kvplace.documents.cluster import SCENARIO_EXAMPLE, MixEntry, ScenarioDocument
from kvplace.documents.model import read_model
from kvplace.documents.reading import read_document
from kvplace.machines.server_types import read_machine
from kvplace.simulate.scenario import (
    Arrival,
    Departure,
    Mix,
    RandomLoad,
    Scenario,
    SimulatedVm,
    scenario_of,
    trace,
)
from kvplace.simulate.simulated_cluster import cluster_state, empty_amounts
from kvplace.simulate.simulation import simulate, simulation_document
from tests.core.invalid_input import answer_or_sentence, disturbed

GIB = Bytes(1 << 30)
NODES = [{"name": "n", "count": 2, "machine": "epyc-7502p"}]
MIXED: dict[str, Any] = {
    "nodes": NODES,
    "mix": [
        {"share": 3, "request": {"vcpus": 4, "memory": "8Gi"}},
        {"request": {"vcpus": 16, "cpuSet": "one-numa", "memory": "64Gi"}},
    ],
    "requests": 60,
    "load": 0.8,
    "strategies": ["pack", "balance"],
    "seeds": [1, 2],
    "moves": 1,
}


def scenario(document: dict[str, Any]) -> Scenario:
    return scenario_of(read_model(ScenarioDocument, document, ""), Path())


def listed(*vms: dict[str, Any], nodes: Any = NODES, **more: Any) -> Scenario:
    return scenario({"nodes": nodes, "vms": list(vms)} | more)


def test_the_example_is_a_valid_scenario_and_states_how_to_change_it() -> None:
    document = read_document(SCENARIO_EXAMPLE, "the example")
    found = scenario_of(read_model(ScenarioDocument, document, ""), Path())
    assert len(found.nodes) == 50
    assert set(found.strategies) == set(Strategy)
    assert "kvplace simulate --scenario" in SCENARIO_EXAMPLE


def test_equal_scenarios_give_equal_reports_but_for_the_seconds() -> None:
    def run() -> dict[str, Any]:
        found = scenario(MIXED)
        document = simulation_document(
            found, [simulate(found, strategy, seed) for strategy in found.strategies for seed in found.seeds]
        )
        for one in document["runs"]:
            assert one.pop("secondsPerDecision")["median"] > 0
        return document

    first = run()
    assert first == run()
    assert first["runs"][0] != first["runs"][1] | {"seed": 1}
    for one in first["runs"]:
        assert one["arrived"] == 60 == one["placed"] + one["refused"]


def test_the_state_at_the_first_refusal_is_kept() -> None:
    found = listed({"id": "vm", "count": 8, "request": {"vcpus": 20, "cpuSet": "one-numa", "memory": "8Gi"}})
    outcome = simulate(found, Strategy.PACK, None)
    assert (outcome.placed, outcome.refused, outcome.placed_before_refusal) == (6, 2, 6)
    assert outcome.first_refusal is not None
    assert outcome.first_refusal.cpus_used == 1.0
    assert (outcome.refused_while_node_free, outcome.refused_while_cluster_free) == (0, 0)
    assert outcome.refused_cpus == 40


def test_a_refusal_while_a_node_or_the_cluster_has_enough_is_counted() -> None:
    nodes = [{"name": "rome", "machine": "2x-epyc-7763-nps4"}]
    small = {"id": "small", "count": 8, "request": {"vcpus": 18, "cpuSet": "one-numa"}}
    large = {"id": "large", "arrives": 1, "request": {"vcpus": 16, "cpuSet": "one-numa"}}
    outcome = simulate(listed(small, large, nodes=nodes), Strategy.PACK, None)
    assert (outcome.refused, outcome.refused_while_node_free, outcome.refused_while_cluster_free) == (1, 1, 1)
    halves = listed({"id": "a", "count": 3, "request": {"vcpus": 40, "cpuSet": "any"}})
    outcome = simulate(halves, Strategy.PACK, None)
    assert (outcome.refused, outcome.refused_while_node_free, outcome.refused_while_cluster_free) == (1, 0, 1)


def test_a_vm_that_ends_releases_its_cpus_and_the_end_of_a_refused_one_changes_nothing() -> None:
    whole = {"vcpus": 60, "cpuSet": "one-numa"}
    one = [{"name": "n", "machine": "epyc-7502p"}]
    found = listed(
        {"id": "first", "request": whole, "lifetime": 2},
        {"id": "second", "request": whole, "arrives": 1, "lifetime": 0.5},
        {"id": "third", "request": whole, "arrives": 2},
        nodes=one,
    )
    outcome = simulate(found, Strategy.PACK, None)
    assert (outcome.placed, outcome.refused) == (2, 1)
    assert outcome.end.cpus_used == 1.0


def test_running_vms_keep_their_cores_also_from_a_vm_of_the_same_name() -> None:
    nodes = [
        {
            "name": "n",
            "machine": "epyc-7502p",
            "running": [{"id": "vm", "request": {"vcpus": 30}}],
        }
    ]
    outcome = simulate(
        listed({"id": "vm", "count": 2, "request": {"vcpus": 20}}, nodes=nodes), Strategy.PACK, None
    )
    assert (outcome.placed, outcome.refused) == (1, 1)
    assert outcome.end.cpus_used == pytest.approx(50 / 60)


GENOA = [{"name": "genoa", "machine": "2x-epyc-9354"}]  # two NUMA nodes of 60 CPUs


def fragmented(begin: float = 0, suffix: str = "") -> list[dict[str, Any]]:
    """VMs that all end within 100; the last one is refused unless a VM of 10 vCPUs and 8 GiB moves."""

    def vm(name: str, vcpus: int, arrives: float, lifetime: float = 50) -> dict[str, Any]:
        request = {"vcpus": vcpus, "cpuSet": "one-numa", "memory": "8Gi"}
        return {"id": name + suffix, "request": request, "arrives": begin + arrives, "lifetime": lifetime}

    return [
        vm("a", 40, 0.1),
        vm("short", 20, 0.2, 1),
        vm("b", 40, 0.3),
        vm("c", 10, 0.4),
        vm("longer", 10, 0.5, 3),
        vm("d", 10, 2),
        vm("large", 20, 4),
    ]


def test_a_move_makes_room_for_a_vm_that_would_be_refused() -> None:
    assert simulate(listed(*fragmented(), nodes=GENOA), Strategy.PACK, None).refused == 1
    moving = simulate(listed(*fragmented(), nodes=GENOA, moves=1), Strategy.PACK, None)
    assert (moving.refused, moving.moves, moving.made_room) == (0, 1, 1)
    assert moving.bytes_moved == 8 * GIB
    assert moving.end.cpus_used == 0


def test_moves_and_their_bytes_are_summed_over_all_vms() -> None:
    twice = [*fragmented(), *fragmented(begin=100, suffix="-2")]
    moving = simulate(listed(*twice, nodes=GENOA, moves=1), Strategy.PACK, None)
    assert (moving.moves, moving.made_room, moving.bytes_moved) == (2, 2, 16 * GIB)


@pytest.mark.parametrize("seed", range(5))
def test_refused_vms_are_not_part_of_the_load(seed: int) -> None:
    mix = [
        {"share": 1, "request": {"vcpus": 600}},  # fits nowhere
        {"share": 3, "request": {"vcpus": 4, "memory": "1Gi"}},
    ]
    found = scenario({"nodes": NODES, "mix": mix, "requests": 300, "load": 0.8})
    outcome = simulate(found, Strategy.PACK, seed)
    assert outcome.refused > 50
    assert outcome.reasons.total() == outcome.refused
    assert outcome.end.cpus_used > 0.6


def test_splits_on_every_node_are_forced() -> None:
    nodes = [{"name": "rome", "machine": "2x-epyc-7763-nps4"}]
    vms = [
        {"id": "small", "count": 8, "request": {"vcpus": 18, "cpuSet": "one-numa"}},
        {"id": "large", "arrives": 1, "request": {"vcpus": 16}},
    ]
    outcome = simulate(listed(*vms, nodes=nodes), Strategy.PACK, None)
    assert (outcome.numa.forced, outcome.numa.avoidable) == (1, 0)


def test_free_cpus_without_memory_and_free_memory_without_cpus_are_stranded() -> None:
    topology = read_machine("epyc-7502p")
    cpus, memory = empty_amounts(topology)
    empty = free_of(topology, Ledger())
    assert cluster_state([(topology, empty)], memory / cpus).cpus_stranded == 0
    no_memory = replace(empty, memory=((NumaId(0), NO_BYTES),))
    state = cluster_state([(topology, no_memory), (topology, empty)], memory / cpus)
    assert (state.cpus_stranded, state.memory_stranded) == (0.5, 0)
    assert (state.cpus_used, state.memory_used) == (0, 0.5)
    no_cpus = replace(empty, cpus=NO_CPUS)
    state = cluster_state([(topology, no_cpus)], memory / cpus)
    assert (state.cpus_stranded, state.memory_stranded) == (0, 1)
    assert cluster_state([(topology, no_memory)], 0).cpus_stranded == 0


def test_a_random_load_stays_below_its_share_and_goes_on_after_refusals() -> None:
    mix = Mix((MixEntry(request=Request(4, memory=GIB)),), requests=200, load=0.5)
    load = RandomLoad(mix, 3, cpus=40, memory=100 * GIB)
    running: set[str] = set()
    arrivals = 0
    for event in load:
        if isinstance(event, Departure):
            running.remove(event.vm.id)
            continue
        assert isinstance(event, Arrival)
        arrivals += 1
        assert len(running) * 4 < 20
        if arrivals % 7 == 0:
            load.refused(event.vm)
        else:
            running.add(event.vm.id)
    assert arrivals == 200


def test_a_trace_is_in_the_order_of_time_with_departures_before_arrivals() -> None:
    first, second = SimulatedVm("a", Request(1), 1.0, 0.0), SimulatedVm("b", Request(1), None, 1.0)
    assert list(trace([second, first])) == [Arrival(first), Departure(first), Arrival(second)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mix": None}, "mix: null is not a value; leave the key out"),
        ({"mix": []}, "mix has no entry with a share above 0"),
        ({"vms": [{"request": {"vcpus": 1}}]}, "must have either mix"),
        ({"mix": [{"share": -1, "request": {"vcpus": 1}}]}, "mix[0].share is -1; it must be at least 0"),
        ({"mix": [{"request": {"vcpu": 1}}]}, "mix[0].request: 'vcpu' is not known; did you mean 'vcpus'?"),
        ({"mix": [{}]}, "mix[0].request is missing"),
        ({"requests": 0}, "requests is 0; it must be at least 1"),
        ({"load": 1.5}, "load is 1.5; it must be at most 1"),
        ({"strategies": ["fill"]}, "strategies[0] is 'fill'; it must be 'pack', 'spread' or 'balance'"),
        ({"seeds": []}, "seeds is []; it must not be empty"),
        ({"moves": 3}, "moves is 3; it must be at most 2"),
        ({"node": []}, "'node' is not known; did you mean 'nodes'?"),
    ],
)
def test_an_invalid_scenario_is_refused_in_one_sentence_with_the_path_of_the_key(
    change: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadBody) as error:
        scenario(MIXED | change)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("vms", "said"),
    [
        ([], "vms is []; it must not be empty"),
        ([{"id": "a", "request": {"vcpus": 1}}] * 2, "vms[1].id: duplicate VM id 'a'"),
        ([{"request": {"vcpus": 1}, "lifetime": 0}], "vms[0].lifetime is 0; it must be at least 1e-09"),
        ([{"request": {"vcpus": 1}, "arives": 0}], "vms[0]: 'arives' is not known; did you mean"),
    ],
)
def test_an_invalid_list_of_vms_is_refused_in_one_sentence_with_the_path_of_the_key(
    vms: list[Any], said: str
) -> None:
    with pytest.raises(BadBody) as error:
        listed(*vms)
    assert said in str(error.value)
    with pytest.raises(BadBody, match="seeds belongs to mix"):
        listed({"request": {"vcpus": 1}}, seeds=[1])


@given(disturbed(MIXED))
def test_any_scenario_is_read_or_refused_in_one_sentence(document: dict[str, Any]) -> None:
    answer_or_sentence(scenario, document, BadBody)


@given(st.sampled_from(["arrives", "lifetime", "count", "id", "request"]), disturbed({"vcpus": 2}))
def test_any_vm_is_read_or_refused_in_one_sentence(key: str, value: Any) -> None:
    answer_or_sentence(listed, {"request": {"vcpus": 1}, key: value}, BadBody)


WITH_VFS = {
    "machine": "epyc-7502p",
    "devices": [{"resource": "intel.com/vf", "numaNode": 0, "count": 2}],
    "topologyPolicy": "best-effort",
}


def with_vf(name: str, **more: Any) -> dict[str, Any]:
    request = {"vcpus": 2, "devices": {"intel.com/vf": 1}, "deviceNuma": "required"}
    return {"id": name, "request": request} | more


def test_a_vm_that_finds_no_free_device_is_refused() -> None:
    nodes = [{"name": "with", **WITH_VFS}, {"name": "without", "machine": "epyc-7502p", "devices": []}]
    found = simulate(listed(*(with_vf(f"vm-{n}") for n in range(3)), nodes=nodes), Strategy.PACK, None)
    assert (found.placed, found.refused) == (2, 1)
    assert found.reasons == {Reason.NOT_ENOUGH_DEVICES: 1}


def test_the_devices_of_a_vm_that_ends_are_free_for_the_next_one() -> None:
    vms = [with_vf(f"vm-{n}", arrives=float(n), lifetime=1.5) for n in range(8)]
    found = simulate(listed(*vms, nodes=[{"name": "with", **WITH_VFS}]), Strategy.PACK, None)
    assert (found.placed, found.refused) == (8, 0)


def test_running_vms_have_devices_from_the_start() -> None:
    def with_running(count: int) -> Scenario:
        running = [{"id": f"old-{n}", "request": with_vf("")["request"]} for n in range(count)]
        return listed(with_vf("new"), nodes=[{"name": "with", **WITH_VFS, "running": running}])

    assert simulate(with_running(2), Strategy.PACK, None).refused == 1
    with pytest.raises(BadBody, match=r"running\[2\].*no 1 free intel.com/vf on the machine, best 0"):
        with_running(3)


def test_a_mix_may_request_devices() -> None:
    document = MIXED | {
        "nodes": [{"name": "with", "count": 2, **WITH_VFS}],
        "mix": [{"request": {"vcpus": 1}}, {"share": 0.1, "request": with_vf("")["request"]}],
    }
    found = simulate(scenario(document), Strategy.PACK, 1)
    assert found.placed
    assert found.reasons == {Reason.NOT_ENOUGH_DEVICES: found.refused}
