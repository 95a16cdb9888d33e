"""A pod on a machine for the hook: the downward API folder, /proc and /sys, under a temporary folder."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvplace.core.cpuset import mask_of
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import NumaMemory, OnFailure, Policy
from kvplace.core.scalars import NodeName, PodUid
from kvplace.hook.process import PodEnvironment
from tests.domainxml.placements import FOUR_VCPUS

UID = "6d3d3a1b-4c1c-4c58-9f0a-3a2f5a1d2c11"
NODE = "worker-1"
PLACEMENT = FOUR_VCPUS
BOUND = PodPlacement(PodUid(UID), NodeName(NODE), "", OnFailure.WAIT, PLACEMENT)
VMI = json.dumps({"metadata": {"name": "vm", "namespace": "ns", "uid": "v-1"}, "status": {}}).encode()
DOMAIN = b"<domain>\n\t<vcpu>4</vcpu>\n</domain>"
HERE = mask_of(os.sched_getaffinity(0))
ON_THIS_MACHINE = replace(
    PLACEMENT,
    policy=Policy.NUMA,
    vcpus=(),
    cpus=HERE,
    emulator_cpus=HERE,
    numa_nodes=(),
    numa_memory=NumaMemory.OFF,
)


class PodFolder:
    """The files that the kubelet writes into the downward API volume."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        folder.mkdir()
        for name in ("placement", "cpu-map"):
            (folder / name).write_text("")
        self.write("request", '{"version":1,"vcpus":4}')
        self.write("uid", UID)
        self.write("name", "virt-launcher-vm-x")
        self.write("namespace", "ns")

    def write(self, name: str, text: str) -> None:
        (self.path / name).write_text(text)

    def bind(
        self,
        placement: Placement = PLACEMENT,
        *,
        uid: str = UID,
        node: str = NODE,
        enforced: bool = False,
        on_failure: OnFailure = OnFailure.WAIT,
    ) -> None:
        bound = PodPlacement(PodUid(uid), NodeName(node), "", on_failure, placement, enforced)
        self.write("placement", bound.to_json())

    def ask_for(self, on_failure: OnFailure, numa_memory: NumaMemory = NumaMemory.PREFERRED) -> None:
        request = {"version": 1, "vcpus": 4, "onFailure": on_failure.value, "numaMemory": numa_memory.value}
        self.write("request", json.dumps(request))


def two_socket_machine(root: Path, *, online: str = "0-63", cpuset: str = "0-63", nodes: str = "0-1") -> None:
    """Two sockets of 16 cores with two threads each; CPU 32 is the sibling of CPU 0."""
    cpus = root / "sys/devices/system/cpu"
    cpus.mkdir(parents=True)
    (cpus / "online").write_text(f"{online}\n")
    for number, listed in enumerate(("0-15,32-47", "16-31,48-63")):
        folder = root / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{listed}\n")
    cgroup = root / "sys/fs/cgroup"
    cgroup.mkdir(parents=True)
    (cgroup / "cpuset.cpus.effective").write_text(f"{cpuset}\n")
    process = root / "proc/self"
    process.mkdir(parents=True)
    (process / "cgroup").write_text("0::/\n")
    (process / "status").write_text(
        f"Name:\tpython\nCpus_allowed_list:\t{cpuset}\nMems_allowed_list:\t{nodes}\n"
    )


def pod_environment(root: Path) -> PodEnvironment:
    return PodEnvironment(
        pod_folder=str(root / "pod"),
        hook_folder=str(root / "hooks"),
        container="hook-sidecar-0",
        node=NodeName(NODE),
        proc=str(root / "proc"),
        sys=str(root / "sys"),
    )


def works(_: NumaMemory, __: Sequence[int]) -> None:
    return None


def broken(_: NumaMemory, __: Sequence[int]) -> str:
    raise ZeroDivisionError


def forbidden(_: NumaMemory, __: Sequence[int]) -> str:
    return "the pod's seccomp profile forbids mbind"


def logged(capfd: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    return [json.loads(line) for line in capfd.readouterr().err.splitlines()]
