"""The demo takes VMs the whole way through the production code, and tells the truth about it."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lxml import etree

from kvplace.cli.place_session import AnswerKind, PlaceSession
from kvplace.core.cpuset import cpus_of, format_cpu_list, mask_of
from kvplace.simulate.demo import run_demo
from kvplace.simulate.orders import orders
from kvplace.simulate.report import (
    DemoReport,
    DemoSettings,
    Latency,
    domain_diff,
    refusal_groups,
    report_document,
)
from kvplace.simulate.vm_templates import read_templates


def _run(settings: DemoSettings) -> DemoReport:
    return asyncio.run(run_demo(settings))


@pytest.fixture(scope="module")
def report() -> DemoReport:
    return _run(DemoSettings(vms=120, nodes=10))


def test_nearly_all_vms_are_placed_and_those_that_are_not_are_told_why(report: DemoReport) -> None:
    assert len(report.placed) + len(report.refused) == 120
    assert [(vm.name.rpartition("-")[0], vm.by) for vm in report.refused] == [
        ("network-function", "filter"),
        ("trading-engine", "filter"),
        ("web-server", "admission"),
    ]
    pages, wide, misspelt = (vm.reason for vm in report.refused)
    assert "no NUMA node with 256 free huge pages of 1Gi, best 176 on worker-08 numa 0" in pages
    assert wide.startswith("0/10 nodes are available: 10 no NUMA node with 251 whole free cores, best ")
    assert "did you mean 'one-socket'?" in misspelt


def test_no_cpu_has_two_owners_and_none_is_the_hosts(report: DemoReport) -> None:
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


def test_every_pinned_vm_has_its_vcpus_in_its_domain_as_its_placement_says(report: DemoReport) -> None:
    assert report.pinned
    for vm in report.pinned:
        domain = etree.fromstring(vm.domain_after)
        pins = {pin.get("vcpu"): pin.get("cpuset") for pin in domain.findall("cputune/vcpupin")}
        assert pins == {str(vcpu): str(cpu) for vcpu, cpu in enumerate(vm.placement.vcpus)}
        assert len(pins) == int(domain.findtext("vcpu") or 0)
        emulator = domain.find("cputune/emulatorpin")
        assert emulator is not None
        assert emulator.get("cpuset") == format_cpu_list(vm.placement.emulator_cpus)


def test_the_vms_are_where_their_annotations_want_them(report: DemoReport) -> None:
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
    first, second = (report_document(_run(DemoSettings(vms=40, nodes=4, seed=7))) for _ in range(2))
    first.pop("seconds")
    second.pop("seconds")
    assert first == second


def test_the_report_is_json_that_adds_up(report: DemoReport) -> None:
    document = json.loads(json.dumps(report_document(report)))
    assert (document["apiVersion"], document["kind"]) == ("kvplace.io/v1alpha1", "DemoReport")
    assert document["placed"] + sum(group["count"] for group in document["refused"]) == 120
    assert sum(document["vmsByNumaNodes"].values()) == document["pinned"]
    assert document["cpus"]["ownedTwice"] == 0
    assert 0 < document["cpus"]["owned"] <= document["cpus"]["allocatable"]
    assert document["seconds"]["perVm"]["p50"] >= document["seconds"]["filterToBind"]["p50"] > 0
    assert len(document["map"]["legend"]) > 1
    assert "<cputune>" in document["domain"]["after"]
    assert len(document["vms"]) == document["placed"]


def test_the_example_shows_only_what_the_hook_changed(report: DemoReport) -> None:
    example = report.example(report.core_map().name)
    assert example is not None
    lines = domain_diff(example)
    assert [line for line in lines[2:] if line.startswith("-")] == []
    assert any("vcpupin" in line for line in lines if line.startswith("+"))


def test_a_cluster_that_is_too_small_refuses_and_groups_what_differs_in_numbers_only() -> None:
    small = _run(DemoSettings(vms=90, nodes=1))
    groups = refusal_groups(small)
    assert sum(len(group.vms) for group in groups) == len(small.refused) > 20
    assert len(groups) < len(small.refused) / 3
    assert len(groups[0].vms) >= len(groups[-1].vms)


def test_vms_that_would_rather_float_are_bound_unpinned_and_counted_as_such() -> None:
    full = _run(DemoSettings(vms=90, nodes=1))
    floating = [vm for vm in full.placed if vm.placement.floats]
    assert floating
    assert {vm.name.rpartition("-")[0] for vm in floating} == {"ci-runner"}
    assert all(vm.domain_after == vm.domain_before for vm in floating)
    assert len(full.pinned) == len(full.placed) - len(floating)


@given(st.integers(0, 60), st.integers())
def test_orders_are_as_many_as_asked_for_with_names_of_their_own(count: int, seed: int) -> None:
    templates = read_templates()
    vms = orders(templates, count, seed)
    assert vms == orders(templates, count, seed)
    assert len({vm["metadata"]["name"] for vm in vms}) == count
    assert templates == read_templates()


@settings(max_examples=20)
@given(st.lists(st.floats(0, 10), max_size=50))
def test_latencies_are_ordered(seconds: list[float]) -> None:
    latency = Latency.of(seconds)
    assert latency.p50 <= latency.p95 <= latency.most == max(seconds, default=0.0)


def test_what_the_demo_gives_is_what_the_offline_command_gives() -> None:
    report = _run(DemoSettings(vms=1, nodes=1, seed=4))
    (vm,) = report.placed
    assert vm.name == "web-server-001"
    session = PlaceSession(vm.node, report.machines[vm.node])
    wish = {"vcpus": len(vm.placement.vcpus), "memory": sum(vm.placement.memory.values())}
    answer = session.answer(json.dumps(wish))
    assert answer.kind is AnswerKind.PLACED
    assert answer.document["placement"]["vcpus"] == list(vm.placement.vcpus)
