"""Pins outside what the container may use are refused before libvirt gets them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvplace.core.cpuset import mask_of
from kvplace.core.errors import Misconfigured
from kvplace.core.scalars import CpuId
from kvplace.hook.bounds import allowed_cpus, allowed_memory_nodes, check_cpus, node_of_cpus
from kvplace.hook.pod_environment import PodEnvironment
from tests.hook.machine import PLACEMENT, pod_environment, two_socket_machine


def test_a_placement_inside_the_cpuset_is_fine(env: PodEnvironment) -> None:
    check_cpus(PLACEMENT, env)


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
        check_cpus(replace(PLACEMENT, **changed), env)  # type: ignore[arg-type]


def test_an_offline_cpu_is_named_as_offline_though_the_cpuset_lacks_it_too(tmp_path: Path) -> None:
    two_socket_machine(tmp_path, online="0-34,36-63", cpuset="0-34,36-63")
    with pytest.raises(Misconfigured, match="CPU 35 of the placement is not online"):
        check_cpus(PLACEMENT, pod_environment(tmp_path))


def test_cpus_outside_the_cpuset_are_refused_even_when_only_some_are(tmp_path: Path) -> None:
    two_socket_machine(tmp_path, cpuset="0-3,32-34")
    with pytest.raises(
        Misconfigured, match=r"CPU 35 of the placement is outside this pod's cpuset 0-3,32-34"
    ):
        check_cpus(PLACEMENT, pod_environment(tmp_path))


def test_without_a_readable_cgroup_the_process_status_counts(env: PodEnvironment, machine: Path) -> None:
    (machine / "sys/fs/cgroup/cpuset.cpus.effective").write_text("")
    (machine / "proc/self/status").write_text("Cpus_allowed_list:\t1,3\n")
    assert allowed_cpus(env) == mask_of((1, 3))
    assert allowed_memory_nodes(env) is None


def test_files_that_cannot_be_read_limit_nothing(tmp_path: Path) -> None:
    bare = pod_environment(tmp_path)
    assert allowed_cpus(bare) is None
    assert node_of_cpus(bare) == {}
    check_cpus(PLACEMENT, bare)


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
