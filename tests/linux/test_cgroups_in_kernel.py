"""Cpusets of real cgroups are read and set; what goes wrong is distinguished."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.pod_cgroups import PodCgroups, allowed, container_id, pod_uid
from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.errors import Misconfigured
from kvplace.core.scalars import NO_CPUS, CpuMask
from kvplace.linux.cgroups import CgroupVersion, CpusetFile, CpusetHierarchy, find_cpuset_hierarchy
from kvplace.linux.kernel_files import Gone, KernelError, NotPermitted, read_cpu_list

ONE, BOTH = parse_cpu_list("1"), parse_cpu_list("0-1")
ZERO = parse_cpu_list("0")


@pytest.fixture
def container(pods: PodCgroups) -> Path:
    return pods.container(pod_uid(1), container_id(1))


def test_processes_of_a_container_move_at_once(pods: PodCgroups, container: Path) -> None:
    child = pods.process(container)
    assert allowed(child.pid) == "0-1"
    pods.hierarchy.set(container, ONE)
    assert allowed(child.pid) == "1"
    assert pods.hierarchy.configured(container) == pods.hierarchy.effective(container) == ONE
    pods.hierarchy.set(container, BOTH)
    assert allowed(child.pid) == "0-1"


def test_a_set_that_is_there_already_needs_no_write(pods: PodCgroups, container: Path) -> None:
    assert pods.hierarchy.is_set(container, BOTH)
    assert not pods.hierarchy.is_set(container, ONE)
    pods.hierarchy.set(container, ONE)
    assert pods.hierarchy.is_set(container, ONE)


def test_parents_that_lack_a_cpu_grow_first_as_after_an_offline_cpu_has_returned(
    pods: PodCgroups, container: Path
) -> None:
    for folder in (container, container.parent, container.parent.parent):
        pods.hierarchy.set(folder, ZERO)
    pods.hierarchy.set(container, BOTH)
    # With version 2 a set of a parent is a user's will: it stays, and limits what is below it.
    grows = pods.hierarchy.version is CgroupVersion.V1
    assert pods.hierarchy.effective(container) == (BOTH if grows else ZERO)


def test_a_cgroup_above_with_other_cpus_is_reported(tmp_path: Path) -> None:
    """As version 2 shows it: a cgroup that may use none of its own CPUs uses its parent's."""
    hierarchy = CpusetHierarchy(tmp_path, CgroupVersion.V2)
    (tmp_path / "cpuset.cpus.effective").write_text("0\n")
    assert hierarchy.limit(tmp_path, ZERO) == ""
    assert hierarchy.limit(tmp_path, ONE) == (
        f"{tmp_path} is set to CPU 1 and may use CPU 0: a cgroup above it has other CPUs"
    )


def test_groups_inside_a_container_follow_it_and_keep_their_own_choice(
    pods: PodCgroups, container: Path
) -> None:
    same, chosen = pods.make(container / "same"), pods.make(container / "chosen")
    pods.hierarchy.set(chosen, ONE)
    inside = pods.process(same)
    pods.hierarchy.set(container, ZERO)
    assert allowed(inside.pid) == "0"
    assert pods.hierarchy.effective(chosen) == ZERO
    pods.hierarchy.set(container, BOTH)
    assert allowed(inside.pid) == "0-1"


def test_a_container_may_go_to_other_cpus_altogether_with_groups_in_it(
    pods: PodCgroups, container: Path
) -> None:
    inside = pods.process(pods.make(container / "inner"))
    pods.hierarchy.set(container, ZERO)
    pods.hierarchy.set(container, ONE)
    assert allowed(inside.pid) == "1"


def test_memory_nodes_are_set_the_same_way(pods: PodCgroups, container: Path) -> None:
    pods.hierarchy.set(container, ZERO, CpusetFile.MEMORY_NODES)
    assert pods.hierarchy.configured(container, CpusetFile.MEMORY_NODES) == ZERO


def test_an_empty_set_is_never_written(pods: PodCgroups, container: Path) -> None:
    with pytest.raises(ValueError, match="must not get an empty"):
        pods.hierarchy.set(container, NO_CPUS)
    assert pods.hierarchy.effective(container) == BOTH


def test_a_cpu_that_does_not_exist_is_refused_and_nothing_changes(pods: PodCgroups, container: Path) -> None:
    pods.hierarchy.set(container, ONE)
    with pytest.raises(KernelError, match=r"cpuset\.cpus cannot be set to"):
        pods.hierarchy.set(container, parse_cpu_list("1,1000"))
    assert pods.hierarchy.effective(container) == ONE


def test_a_container_that_has_ended_is_gone(pods: PodCgroups, container: Path) -> None:
    container.rmdir()
    for attempt in (pods.hierarchy.configured, pods.hierarchy.effective):
        with pytest.raises(Gone):
            attempt(container)
    with pytest.raises(Gone):
        pods.hierarchy.set(container, ONE)


def test_a_group_inside_that_ends_meanwhile_is_not_an_error(
    pods: PodCgroups, container: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = pods.make(container / "inner")

    def ends_before_it_is_read(path: Path) -> CpuMask:
        if path.parent == inner:
            inner.rmdir()
        return read_cpu_list(path)

    monkeypatch.setattr("kvplace.linux.cgroups.read_cpu_list", ends_before_it_is_read)
    pods.hierarchy.set(container, ONE)
    assert pods.hierarchy.effective(container) == ONE
    assert inner.exists() is (pods.hierarchy.version is CgroupVersion.V2)


def test_not_permitted_is_distinguished_from_gone(pods: PodCgroups, container: Path) -> None:
    child = os.fork()
    if child == 0:
        os.setresuid(65534, 65534, 65534)
        try:
            pods.hierarchy.set(container, ONE)
        except NotPermitted:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pods.hierarchy.effective(container) == BOTH


def test_the_hierarchy_of_this_machine_is_found() -> None:
    found = find_cpuset_hierarchy(Path("/sys/fs/cgroup"))
    assert found.effective(found.root) & ONE | ZERO


def test_where_cpusets_are_mounted(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="no cgroup hierarchy with the cpuset controller"):
        find_cpuset_hierarchy(tmp_path)
    (tmp_path / "cpu,cpuset").mkdir()
    (tmp_path / "cpu,cpuset/cpuset.cpus").write_text("0-1\n")
    assert find_cpuset_hierarchy(tmp_path) == CpusetHierarchy(tmp_path / "cpu,cpuset", CgroupVersion.V1)
    (tmp_path / "unified").mkdir()
    (tmp_path / "unified/cgroup.controllers").write_text("memory\n")
    assert find_cpuset_hierarchy(tmp_path).version is CgroupVersion.V1
    (tmp_path / "unified/cgroup.controllers").write_text("cpuset memory\n")
    assert find_cpuset_hierarchy(tmp_path) == CpusetHierarchy(tmp_path / "unified", CgroupVersion.V2)
    (tmp_path / "cgroup.controllers").write_text("cpuset memory\n")
    assert find_cpuset_hierarchy(tmp_path) == CpusetHierarchy(tmp_path, CgroupVersion.V2)


def test_a_cgroup_without_the_controller_is_not_taken_for_one_that_has_ended(tmp_path: Path) -> None:
    (tmp_path / "cgroup.procs").write_text("")
    hierarchy = CpusetHierarchy(tmp_path, CgroupVersion.V2)
    for attempt in (
        lambda: hierarchy.configured(tmp_path),
        lambda: hierarchy.effective(tmp_path),
        lambda: hierarchy.set(tmp_path, ONE),
    ):
        with pytest.raises(Misconfigured, match=r"enable cpuset in cgroup\.subtree_control"):
            attempt()
