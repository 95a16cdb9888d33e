"""The folder of a cgroup that an OCI spec names."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvplace.linux.container_watch import cgroup_folder

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
def test_what_no_runtime_uses_has_none(named: str) -> None:
    assert cgroup_folder(ROOT, named) is None
