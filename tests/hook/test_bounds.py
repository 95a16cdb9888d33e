"""Pins outside what the container may use are refused before libvirt gets them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvplace.core.cpuset import mask_of
from kvplace.core.errors import Misconfigured
from kvplace.core.request import OnFailure
from kvplace.core.scalars import CpuId
from kvplace.hook.bounds import (
    allowed_cpus,
    allowed_memory_nodes,
    check_placed_cpus,
    check_protected,
    node_of_cpus,
    unprotected,
)
from kvplace.hook.process import PodEnvironment
from tests.hook.machine import BOUND, PLACEMENT, pod_environment, two_socket_machine


def test_a_placement_inside_the_cpuset_is_fine(env: PodEnvironment) -> None:
    check_placed_cpus(BOUND, env)


@pytest.mark.parametrize(
    ("changed", "outside"),
    [
        ({"vcpus": (2, 34, 3, 90), "cpus": mask_of((2, 34, 3, 90))}, "90"),
        ({"cpus": PLACEMENT.cpus | 1 << 70 | 1 << 71}, "70-71"),
        ({"emulator_cpus": 1 << 99}, "99"),
        ({"io_thread_cpus": (1, 1 << 64)}, "64"),
    ],
)
def test_any_thread_sent_to_a_cpu_that_is_not_online_is_refused(
    env: PodEnvironment, changed: dict[str, int], outside: str
) -> None:
    with pytest.raises(
        Misconfigured, match=rf"CPU {outside} of the placement is not online on worker-1 \(online: 0-63\)"
    ):
        check_placed_cpus(replace(BOUND, placement=replace(PLACEMENT, **changed)), env)  # type: ignore[arg-type]


def test_an_offline_cpu_is_named_as_offline_though_the_cpuset_lacks_it_too(tmp_path: Path) -> None:
    two_socket_machine(tmp_path, online="0-34,36-63", cpuset="0-34,36-63")
    with pytest.raises(Misconfigured, match="CPU 35 of the placement is not online"):
        check_placed_cpus(BOUND, pod_environment(tmp_path))


def test_cpus_outside_the_cpuset_are_refused_even_when_only_some_are(tmp_path: Path) -> None:
    two_socket_machine(tmp_path, cpuset="0-3,32-34")
    with pytest.raises(
        Misconfigured, match=r"CPU 35 of the placement is outside this pod's cpuset 0-3,32-34"
    ):
        check_placed_cpus(BOUND, pod_environment(tmp_path))


def test_without_a_readable_cgroup_the_process_status_counts(env: PodEnvironment, machine: Path) -> None:
    (machine / "sys/fs/cgroup/cpuset.cpus.effective").write_text("")
    (machine / "proc/self/status").write_text("Cpus_allowed_list:\t1,3\n")
    assert allowed_cpus(env) == mask_of((1, 3))
    assert allowed_memory_nodes(env) is None


def test_files_that_cannot_be_read_limit_nothing(tmp_path: Path) -> None:
    bare = pod_environment(tmp_path)
    assert allowed_cpus(bare) is None
    assert node_of_cpus(bare) == {}
    check_placed_cpus(BOUND, bare)


ENFORCED = replace(BOUND, enforced=True, placement=replace(PLACEMENT, owned=PLACEMENT.cpus))
"""CPUs 2, 3, 34 and 35, for a VM on a node whose agent keeps others off them."""


def test_cpus_that_an_agent_protects_are_those_that_our_own_cpuset_lacks(tmp_path: Path) -> None:
    two_socket_machine(tmp_path, cpuset="0-1,4-33,36-63")
    check_placed_cpus(ENFORCED, pod_environment(tmp_path))
    check_protected(ENFORCED, pod_environment(tmp_path))


@pytest.mark.parametrize(
    ("cpuset", "named"), [("0-63", "2-3,34-35"), ("0-2,36-63", "2"), ("2-3,34-35", "2-3,34-35")]
)
def test_a_vm_waits_while_others_may_use_a_cpu_that_it_owns(tmp_path: Path, cpuset: str, named: str) -> None:
    two_socket_machine(tmp_path, cpuset=cpuset)
    for check in (check_placed_cpus, check_protected):
        with pytest.raises(
            Misconfigured,
            match=rf"other containers may still use CPU {named}, which this VM owns: the agent on worker-1 "
            rf".* which has the cpuset {cpuset}; check the pod of kvplace-agent on worker-1",
        ):
            check(ENFORCED, pod_environment(tmp_path))


def test_a_vm_that_owns_nothing_waits_for_no_agent_and_is_not_bound_to_our_cpuset(tmp_path: Path) -> None:
    two_socket_machine(tmp_path, cpuset="40-63")
    check_placed_cpus(replace(BOUND, enforced=True), pod_environment(tmp_path))


def test_a_vm_that_may_float_does_not_wait_for_the_agent_but_its_risk_is_named(env: PodEnvironment) -> None:
    floats = replace(ENFORCED, on_failure=OnFailure.FLOAT)
    check_placed_cpus(floats, env)
    check_protected(floats, env)
    assert "other containers may still use CPU 2-3,34-35" in (unprotected(floats, env) or "")


def test_an_offline_cpu_is_refused_whoever_sets_cpusets(tmp_path: Path) -> None:
    two_socket_machine(tmp_path, online="0-34,36-63", cpuset="0-1")
    with pytest.raises(Misconfigured, match="CPU 35 of the placement is not online"):
        check_placed_cpus(ENFORCED, pod_environment(tmp_path))


def test_an_idle_sibling_that_is_offline_is_not_protected(tmp_path: Path) -> None:
    two_socket_machine(tmp_path, online="0-59,61-63", cpuset="0-1")
    owns_more = replace(
        ENFORCED, placement=replace(ENFORCED.placement, owned=ENFORCED.placement.owned | 1 << 60)
    )
    with pytest.raises(Misconfigured, match="CPU 60, which this VM owns, is not online on worker-1"):
        check_protected(owns_more, pod_environment(tmp_path))


def test_a_cpuset_that_cannot_be_read_proves_no_protection(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="the hook sidecar's cpuset cannot be read"):
        check_protected(ENFORCED, pod_environment(tmp_path))


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "3:cpuset:/\n", "sys/fs/cgroup/cpuset/cpuset.effective_cpus": "0-1\n"},
        {"proc/self/cgroup": "3:cpuset:/kubepods/x\n", "sys/fs/cgroup/cpuset/cpuset.effective_cpus": "0-1\n"},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpuset.cpus.effective": "0-1\n"},
        {"proc/self/cgroup": "0::/\n", "proc/self/status": "Cpus_allowed_list:\t0-1\n"},
    ],
    ids=["version 1", "version 1 without a namespace", "version 2", "no cgroup to read"],
)
def test_the_proof_is_found_in_every_version_of_cgroups(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert unprotected(ENFORCED, pod_environment(tmp_path)) is None


def test_memory_nodes_and_the_node_of_each_cpu_are_read(env: PodEnvironment) -> None:
    assert allowed_memory_nodes(env) == 0b11
    node_of_cpu = node_of_cpus(env)
    assert [node_of_cpu[CpuId(cpu)] for cpu in (0, 15, 16, 32, 63)] == [0, 0, 1, 0, 1]
    assert len(node_of_cpu) == 64


def test_this_process_is_allowed_at_least_the_cpus_of_its_affinity(tmp_path: Path) -> None:
    here = replace(pod_environment(tmp_path), proc="/proc", sys="/sys")
    allowed = allowed_cpus(here)
    assert allowed is not None
    assert mask_of(os.sched_getaffinity(0)) & ~allowed == 0
