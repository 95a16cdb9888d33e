"""The machine that an agent runs on, from the files of its host."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from kvplace.agent import this_machine
from kvplace.agent.this_machine import AgentSettings, ReservedBy, read_this_machine
from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.node_devices import TopologyPolicy
from kvplace.core.scalars import NO_CPUS, CpuMask
from kvplace.linux.cpu_manager_state import MAX_BYTES
from kvplace.linux.kernel_files import Gone, NotPermitted
from kvplace.service.connections import Address
from tests.agent.hosts import CONFIG, NODE, STATE, STATIC_STATE, Host


def test_the_machine_is_the_one_in_sysfs(host: Host) -> None:
    host.huge_pages(1, 4)
    found = read_this_machine(host.settings())
    assert [package.cpus for package in found.topology.packages] == [
        parse_cpu_list("0-1,4-5"),
        parse_cpu_list("2-3,6-7"),
    ]
    assert found.topology.cores == tuple(parse_cpu_list(f"{cpu},{cpu + 4}") for cpu in range(4))
    assert found.topology.numa_nodes[1].huge_pages == {1 << 30: 4}
    assert found.topology.numa_nodes[0].distances == {0: 10, 1: 21}


@pytest.mark.parametrize(
    ("ours", "kubelets", "expected", "by"),
    [
        ("1,5", "0,4", "1,5", ReservedBy.AGENT),
        ("", "0,4", "0,4", ReservedBy.KUBELET),
        ("", "", "0,4", ReservedBy.DEFAULT),
        ("60-61", "3", "3", ReservedBy.KUBELET),
        ("1,60", "3", "1", ReservedBy.AGENT),
        ("60", "61", "0,4", ReservedBy.DEFAULT),
    ],
)
def test_reserved_cpus_are_the_agents_else_the_kubelets_else_the_lowest_core(
    host: Host, ours: str, kubelets: str, expected: str, by: ReservedBy
) -> None:
    host.write(CONFIG, f"kind: KubeletConfiguration\nreservedSystemCPUs: '{kubelets}'")
    found = read_this_machine(host.settings(parse_cpu_list(ours) or None))
    assert (found.topology.reserved, found.reserved_by) == (parse_cpu_list(expected), by)
    assert any("not online" in note for note in found.notes) == ("60" in ours or "60" in kubelets)


def test_a_number_alone_is_a_cpu_too(host: Host) -> None:
    host.write(CONFIG, "reservedSystemCPUs: 3")
    assert read_this_machine(host.settings()).topology.reserved == parse_cpu_list("3")


def test_without_the_kubelets_files_its_defaults_count(host: Host) -> None:
    found = read_this_machine(host.settings())
    assert found.kubelet.topology == TopologyPolicy("none", "container")
    assert not found.kubelet_cpus.observes_only
    assert found.notes == ()


def test_the_lowest_core_moves_when_cpu_0_is_offline(host: Host) -> None:
    host.online({1, 2, 3, 5, 6, 7})
    assert read_this_machine(host.settings()).topology.reserved == parse_cpu_list("1,5")


@pytest.mark.parametrize("text", ["reservedSystemCPUs: 5-2", "a: [", "- 1", "reservedSystemCPUs: {a: 1}"])
def test_a_kubelet_configuration_that_cannot_be_read_is_noted_and_blocks_nothing(
    host: Host, text: str
) -> None:
    host.write(CONFIG, text)
    found = read_this_machine(host.settings())
    assert found.reserved_by is ReservedBy.DEFAULT
    (note,) = found.notes
    assert CONFIG in note


def test_under_the_static_policy_the_agent_only_observes_and_knows_the_kubelets_cpus(host: Host) -> None:
    host.write(STATE, json.dumps(STATIC_STATE))
    found = read_this_machine(host.settings()).kubelet_cpus
    assert (found.observes_only, found.held, found.problem) == (True, parse_cpu_list("2-3,6-7"), "")


def test_kubelet_cpus_that_are_not_online_are_noted_and_left_out(host: Host) -> None:
    host.write(STATE, json.dumps(STATIC_STATE))
    host.online({0, 1, 2, 4, 5, 6})
    found = read_this_machine(host.settings())
    assert found.kubelet_cpus.held == parse_cpu_list("2,6")
    assert any("names CPU 3,7" in note for note in found.notes)


@pytest.mark.parametrize(
    ("state", "observes_only"),
    [
        (json.dumps({**STATIC_STATE, "checksum": 17}), True),
        (json.dumps(STATIC_STATE)[:-20], True),
        ("", False),
        ('{"policyName":"none","defaultCpu', False),
    ],
)
def test_with_a_state_that_cannot_be_read_no_cpu_is_given_out(
    host: Host, state: str, observes_only: bool
) -> None:
    host.write(STATE, state)
    found = read_this_machine(host.settings())
    assert found.kubelet_cpus.observes_only is observes_only
    assert found.kubelet_cpus.held == found.topology.allocatable
    assert STATE in found.kubelet_cpus.problem


def test_a_state_that_may_not_be_read_is_not_taken_for_a_missing_one(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: Path) -> str:
        if path.name == "cpu_manager_state":
            raise NotPermitted(f"{path} may not be read: Permission denied")
        raise Gone(f"{path} does not exist")

    monkeypatch.setattr(this_machine, "read_text", denied)
    found = read_this_machine(host.settings())
    assert found.kubelet_cpus.observes_only
    assert found.kubelet_cpus.held == found.topology.allocatable
    assert "may not be read" in found.kubelet_cpus.problem


def test_a_state_that_is_longer_than_any_blocks_nothing(host: Host) -> None:
    host.write(STATE, " " * (MAX_BYTES + 1))
    assert "longer than" in read_this_machine(host.settings()).kubelet_cpus.problem


def test_discovery_agrees_with_lscpu_about_the_machine_that_runs_this() -> None:
    lscpu = shutil.which("lscpu")
    if lscpu is None:
        pytest.skip("lscpu is not installed")
    columns = subprocess.run(
        [lscpu, "--parse=CPU,CORE,SOCKET,NODE"], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split(",") for line in columns.splitlines() if not line.startswith("#")]
    topology = read_this_machine(AgentSettings(NODE, Address("127.0.0.1", 0))).topology
    for column, sets in (
        (1, set(topology.cores)),
        (2, {package.cpus for package in topology.packages}),
        (3, {node.cpus for node in topology.numa_nodes if node.cpus}),
    ):
        groups: dict[str, CpuMask] = {}
        for row in rows:
            groups[row[column]] = groups.get(row[column], NO_CPUS) | 1 << int(row[0])
        assert set(groups.values()) == sets
