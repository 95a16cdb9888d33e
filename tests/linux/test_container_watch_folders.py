"""Containers are found by their cgroups, in every layout that kubelets and runtimes use."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from harness.pod_cgroups import GUARANTEED, PodCgroups, container_id, pod_uid
from kvplace.linux.container_watch import ContainerCgroup, ContainerWatch, cgroup_folder

UID = pod_uid(1)
UNDERSCORES = UID.replace("-", "_")
ID = container_id(0xABC)


def containers_in(root: Path) -> list[ContainerCgroup]:
    with closing(ContainerWatch(root)) as watch:
        return list(watch.containers.values())


@pytest.mark.parametrize(
    "path",
    [
        f"kubepods/burstable/pod{UID}/{ID}",
        f"kubepods/besteffort/pod{UID}/{ID}",
        f"kubepods/pod{UID}/{ID}",
        f"kubepods/burstable/pod{UID}/crio-{ID}",
        f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UNDERSCORES}.slice/cri-containerd-{ID}.scope",
        f"kubepods.slice/kubepods-pod{UNDERSCORES}.slice/cri-containerd-{ID}.scope",
        f"kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{UNDERSCORES}.slice/crio-{ID}.scope",
        f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UNDERSCORES}.slice/docker-{ID}.scope",
        f"kubelet/kubepods/burstable/pod{UID}/{ID}",
        f"kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{UNDERSCORES}.slice/cri-containerd-{ID}.scope",
    ],
)
def test_every_layout_names_pod_and_container(tmp_path: Path, path: str) -> None:
    (tmp_path / path).mkdir(parents=True)
    assert containers_in(tmp_path) == [ContainerCgroup(ID, UID, tmp_path / path)]


def test_a_static_pod_has_the_hash_of_its_manifest_as_uid(tmp_path: Path) -> None:
    (tmp_path / "kubepods/burstable" / f"pod{'ab' * 16}" / ID).mkdir(parents=True)
    assert [found.pod_uid for found in containers_in(tmp_path)] == ["ab" * 16]


@pytest.mark.parametrize(
    "path",
    [
        f"kubepods/burstable/pod{UID}/crio-conmon-{ID}.scope",
        f"kubepods/burstable/pod{UID}/{ID}/nested",
        f"kubepods/burstable/pod{UID}/init.scope",
        f"kubepods/burstable/podcast/{ID}",
        f"system.slice/docker-{ID}.scope",
        f"machine.slice/pod{UID}/{ID}",
        f"docker/{ID}/kubepods/pod{UID}/{ID}",
        f"other/kubepods/pod{UID}/{ID}",
    ],
)
def test_a_cgroup_that_is_not_a_container_of_a_pod_is_left_out(tmp_path: Path, path: str) -> None:
    (tmp_path / path).mkdir(parents=True)
    assert [found.folder for found in containers_in(tmp_path) if found.folder == tmp_path / path] == []


def test_containers_of_all_qos_classes_are_found_in_real_cgroups(pods: PodCgroups) -> None:
    made = {
        pods.container(pod_uid(number), container_id(number), qos)
        for number, qos in enumerate(["burstable", "besteffort", GUARANTEED])
    }
    assert {found.folder for found in containers_in(pods.base)} == made


def test_a_tree_that_ends_while_it_is_listed_is_not_an_error(tmp_path: Path) -> None:
    assert containers_in(tmp_path / "gone") == []


ROOT = Path("/sys/fs/cgroup/cpuset")


@pytest.mark.parametrize(
    ("named", "folder"),
    [
        ("/kubepods/burstable/pod1/abc", "kubepods/burstable/pod1/abc"),
        ("kubepods/pod1/abc", "kubepods/pod1/abc"),
        (
            "kubepods-burstable-pod1_2.slice:cri-containerd:abc",
            "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1_2.slice/cri-containerd-abc.scope",
        ),
        ("kubepods-pod1.slice:crio:abc", "kubepods.slice/kubepods-pod1.slice/crio-abc.scope"),
        ("system.slice::abc", "system.slice/abc.scope"),
        ("-.slice:cri-containerd:abc", "cri-containerd-abc.scope"),
        (":cri-containerd:abc", "cri-containerd-abc.scope"),
    ],
)
def test_a_path_and_a_systemd_scope_have_a_folder(named: str, folder: str) -> None:
    assert cgroup_folder(ROOT, named) == ROOT / folder


@pytest.mark.parametrize("named", ["", "/", "/../../etc", "/kubepods/../.."])
def test_a_path_that_no_runtime_uses_has_no_folder(named: str) -> None:
    assert cgroup_folder(ROOT, named) is None
