"""The demo takes VMs through all of the production code, and its report is true."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lxml import etree

from kvplace.cli.place_session import AnswerKind, PlaceSession
from kvplace.core.cpuset import cpus_of, format_cpu_list, mask_of
from kvplace.core.scalars import NodeName
from kvplace.machines.machine import Machine
from kvplace.simulate.demo import (
    DemoReport,
    DemoSettings,
    demo_document,
    domain_diff,
    run_demo,
    similar_refusals,
)
from kvplace.simulate.demo_vms import demo_vms, read_templates
from tests.virtual_time import JumpingLoop


def _run(settings: DemoSettings) -> DemoReport:
    return asyncio.run(run_demo(settings))


@pytest.fixture(scope="module")
def report() -> DemoReport:
    return _run(DemoSettings(vms=120, nodes=10))


def test_all_vms_are_placed_but_the_three_mistakes_which_get_their_reasons(report: DemoReport) -> None:
    assert len(report.placed) + len(report.refused) == 120
    assert [(vm.name.rpartition("-")[0], vm.by) for vm in report.refused] == [
        ("network-function", "filter"),
        ("trading-engine", "filter"),
        ("web-server", "admission"),
    ]
    pages, wide, misspelt = (vm.reason for vm in report.refused)
    assert "no NUMA node with 256 free huge pages of 1Gi, best 192 on worker-08 numa 0" in pages
    assert wide.startswith("0/10 nodes are available: 10 no NUMA node with 251 whole free cores, best ")
    assert "did you mean 'one-socket'?" in misspelt


def test_vms_do_not_wait_for_each_others_claims_to_be_stored() -> None:
    """Claims that follow each other gather for a write; the next VM is decided meanwhile."""
    loop = JumpingLoop()
    try:
        report = loop.run(run_demo(DemoSettings(vms=100, nodes=4)))
        seconds = loop.time()
    finally:
        loop.finish()
    assert len(report.placed) > 50
    assert seconds < 5


def test_no_cpu_has_two_owners_and_no_reserved_cpu_has_one(report: DemoReport) -> None:
    assert report.cpus_owned_twice == 0
    for node, machine in report.machines.items():
        owned = mask_of(report.ledgers[node].owners)
        assert not owned & machine.reserved
        given = 0
        for vm in report.placed:
            given |= vm.placement.owned if vm.node == node else 0
        assert given == owned


def test_the_count_of_cpus_owned_twice_finds_one(report: DemoReport) -> None:
    vm = report.placed[0]
    twice = DemoReport(report.settings, report.machines, placed=[vm, vm], ledgers=report.ledgers)
    assert twice.cpus_owned_twice == vm.placement.owned.bit_count() > 0


def test_every_pinned_vm_has_its_vcpus_in_its_domain_as_its_placement_states(report: DemoReport) -> None:
    assert report.pinned
    for vm in report.pinned:
        domain = etree.fromstring(vm.domain_after)
        pins = {pin.get("vcpu"): pin.get("cpuset") for pin in domain.findall("cputune/vcpupin")}
        assert pins == {str(vcpu): str(cpu) for vcpu, cpu in enumerate(vm.placement.vcpus)}
        assert len(pins) == int(domain.findtext("vcpu") or 0)
        emulator = domain.find("cputune/emulatorpin")
        assert emulator is not None
        assert emulator.get("cpuset") == format_cpu_list(vm.placement.emulator_cpus)


def test_vms_lie_within_the_scope_of_their_annotations(report: DemoReport) -> None:
    for vm in report.pinned:
        machine, cpus = report.machines[vm.node], vm.placement.cpus
        kind = vm.name.rpartition("-")[0]
        if kind in ("network-function", "trading-engine", "ci-runner", "batch-worker"):
            assert len(machine.nodes_of(cpus)) == 1
        if kind == "game-server":
            assert len(machine.l3_in(cpus)) == 1
        if kind in ("web-server", "database"):
            assert len(machine.packages_of(cpus)) == 1
        if kind == "trading-engine":
            cores = [machine.core_of[cpu] for cpu in vm.placement.vcpus]
            assert len(set(cores)) == len(cores)
            assert mask_of(c for core in cores for c in cpus_of(core)) & ~vm.placement.owned == 0


def test_equal_settings_give_an_equal_report_but_for_the_seconds() -> None:
    first, second = (demo_document(_run(DemoSettings(vms=40, nodes=4, seed=7))) for _ in range(2))
    first.pop("seconds")
    second.pop("seconds")
    assert first == second


def test_the_report_is_json_that_adds_up(report: DemoReport) -> None:
    document = json.loads(json.dumps(demo_document(report)))
    assert (document["apiVersion"], document["kind"]) == ("kvplace.io/v1alpha1", "DemoReport")
    assert document["placed"] + sum(group["count"] for group in document["refused"]) == 120
    assert sum(document["vmsByNumaNodes"].values()) == document["pinned"]
    assert document["cpus"]["ownedTwice"] == 0
    assert 0 < document["cpus"]["owned"] <= document["cpus"]["allocatable"]
    assert document["seconds"]["perVm"]["p50"] >= document["seconds"]["deciding"]["p50"] > 0
    assert len(document["map"]["legend"]) > 1
    assert "<cputune>" in document["domain"]["after"]
    assert len(document["vms"]) == document["placed"]


def test_the_example_shows_only_the_changes_of_the_hook(report: DemoReport) -> None:
    example = report.example(NodeName(report.core_map().name))
    assert example is not None
    lines = domain_diff(example)
    assert [line for line in lines[2:] if line.startswith("-")] == []
    assert any("vcpupin" in line for line in lines if line.startswith("+"))


def test_refusals_that_differ_in_numbers_only_are_grouped() -> None:
    small = _run(DemoSettings(vms=90, nodes=1))
    groups = similar_refusals(small)
    assert sum(map(len, groups)) == len(small.refused) > 20
    assert len(groups) < len(small.refused) / 3
    assert len(groups[0]) >= len(groups[-1])


def test_vms_with_on_failure_float_are_bound_unpinned_and_counted_so() -> None:
    full = _run(DemoSettings(vms=90, nodes=1))
    floating = [vm for vm in full.placed if vm.placement.floats]
    assert floating
    assert {vm.name.rpartition("-")[0] for vm in floating} == {"ci-runner"}
    assert all(vm.domain_after == vm.domain_before for vm in floating)
    assert len(full.pinned) == len(full.placed) - len(floating)


@given(st.integers(0, 60), st.integers())
def test_as_many_vms_are_made_as_asked_for_with_unique_names(count: int, seed: int) -> None:
    templates = read_templates()
    vms = demo_vms(templates, count, seed)
    assert vms == demo_vms(templates, count, seed)
    assert len({vm["metadata"]["name"] for vm in vms}) == count
    assert templates == read_templates()


def test_the_demo_and_place_give_a_vm_the_same_cpus() -> None:
    report = _run(DemoSettings(vms=1, nodes=1, seed=4))
    (vm,) = report.placed
    assert vm.name == "web-server-001"
    session = PlaceSession(Machine(vm.node, report.machines[vm.node]))
    request = {"vcpus": len(vm.placement.vcpus), "memory": sum(vm.placement.memory.values())}
    answer = session.answer(json.dumps(request))
    assert answer.kind is AnswerKind.PLACED
    assert answer.document["placement"]["vcpus"] == list(vm.placement.vcpus)
