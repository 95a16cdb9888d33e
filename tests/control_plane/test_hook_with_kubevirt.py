"""The hook process, called by KubeVirt's own client with domains from KubeVirt's own converter."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import canonicalize

import pytest
from lxml import etree

from harness.control_plane.launcher_side import LauncherSide
from harness.waiting import PATIENCE_S
from kvplace.core.cpuset import mask_of
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import NumaMemory, OnFailure, Policy
from kvplace.core.scalars import CpuId, NodeName, NumaId, PodUid

NODE = "worker-1"
CPUS = tuple(sorted(os.sched_getaffinity(0))[:2])
"""The hook refuses CPUs that its own cpuset does not have."""

VMI: dict[str, Any] = {
    "metadata": {"name": "small", "namespace": "tenant"},
    "spec": {
        "domain": {
            "cpu": {"sockets": 1, "cores": len(CPUS), "threads": 1},
            "memory": {"guest": "1Gi"},
            "devices": {"interfaces": [{"name": "default", "masquerade": {}}]},
        },
        "networks": [{"name": "default", "pod": {}}],
        "volumes": [{"name": "init", "cloudInitNoCloud": {"userData": "#cloud-config\n"}}],
    },
}


@dataclass(frozen=True, slots=True)
class Sidecar:
    """One hook process and the downward API volume that its pod gives it."""

    process: subprocess.Popen[str]
    pod: Path

    def bind(self) -> None:
        """Let the placement arrive as it does with the Binding."""
        placement = PodPlacement(
            pod_uid=PodUid("uid-of-the-pod"),
            node=NodeName(NODE),
            topology="",
            on_failure=OnFailure.WAIT,
            placement=Placement(
                policy=Policy.EXCLUSIVE,
                vcpus=tuple(map(CpuId, CPUS)),
                cpus=mask_of(CPUS),
                emulator_cpus=mask_of(CPUS[:1]),
                io_thread_cpus=(),
                numa_nodes=(NumaId(0),),
                numa_memory=NumaMemory.OFF,
                memory={},
            ),
        )
        (self.pod / "placement").write_text(placement.to_json())


@pytest.fixture
def vmi(launcher_side: LauncherSide) -> dict[str, Any]:
    return launcher_side.default_vmi(VMI, {"vmRolloutStrategy": "Stage"})


@pytest.fixture
def sockets() -> Iterator[Path]:
    """Lay the folder that virt-launcher shares with its sidecars; its name is short, for the sockets'
    sake.
    """
    with tempfile.TemporaryDirectory(prefix="hooks-") as name:
        yield Path(name)


@pytest.fixture
def start_sidecar(sockets: Path, tmp_path: Path) -> Iterator[Callable[[], Sidecar]]:
    """Start hook processes as KubeVirt's pod template does; they are gone at the end of the test."""
    started: list[Sidecar] = []

    def start() -> Sidecar:
        container = f"hook-sidecar-{len(started)}"
        pod = tmp_path / container
        pod.mkdir()
        (pod / "uid").write_text("uid-of-the-pod")
        (sockets / container).mkdir()
        process = subprocess.Popen(
            [sys.executable, "-m", "kvplace.hook"],
            env={
                **os.environ,
                "KVPLACE_POD_FOLDER": str(pod),
                "KVPLACE_HOOK_FOLDER": str(sockets / container),
                "CONTAINER_NAME": container,
                "NODE_NAME": NODE,
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(Sidecar(process, pod))
        return started[-1]

    yield start
    for sidecar in started:
        sidecar.process.kill()
        sidecar.process.communicate()


@pytest.fixture
def sidecar(start_sidecar: Callable[[], Sidecar]) -> Sidecar:
    """Start one hook process that has its placement."""
    running = start_sidecar()
    running.bind()
    return running


def pins(domain: str) -> list[tuple[str, str]]:
    return [
        (pin.get("vcpu", "emulator"), pin.get("cpuset", ""))
        for pin in etree.fromstring(domain).findall("cputune/*")
        if pin.tag in {"vcpupin", "emulatorpin"}
    ]


WANTED = [(str(vcpu), str(cpu)) for vcpu, cpu in enumerate(CPUS)] + [("emulator", str(CPUS[0]))]


def test_a_start_of_three_calls_is_pinned_each_time_and_shutdown_ends_the_hook(
    launcher_side: LauncherSide, vmi: dict[str, Any], sockets: Path, sidecar: Sidecar
) -> None:
    report = launcher_side.call_hook(vmi, sockets, collect_timeout_s=60)

    assert report.errors == ()
    assert [pins(call.returned) for call in report.calls] == [WANTED] * 3
    assert sidecar.process.wait(timeout=PATIENCE_S) == 0
    assert not list(sockets.glob("*/*.sock"))


def test_only_the_pins_are_new_in_the_domain_for_libvirt(
    launcher_side: LauncherSide, vmi: dict[str, Any], sockets: Path, sidecar: Sidecar
) -> None:
    report = launcher_side.call_hook(vmi, sockets, collect_timeout_s=60, calls=1)

    (call,) = report.calls
    domain = etree.fromstring(call.returned)
    (cputune,) = domain.findall("cputune")
    domain.remove(cputune)
    unpinned = etree.tostring(domain, encoding="unicode")
    assert canonicalize(unpinned, strip_text=True) == canonicalize(call.sent, strip_text=True)
    assert sidecar.process.wait(timeout=PATIENCE_S) == 0


def test_its_own_answers_fed_back_change_nothing_more(
    launcher_side: LauncherSide, vmi: dict[str, Any], sockets: Path, sidecar: Sidecar
) -> None:
    assert sidecar.process.poll() is None
    report = launcher_side.call_hook(vmi, sockets, collect_timeout_s=60, calls=5, chained=True)

    assert report.errors == ()
    assert [pins(call.sent) for call in report.calls] == [[], *[WANTED] * 4]
    assert len({call.returned for call in report.calls[1:]}) == 1


def test_without_a_placement_the_start_fails_with_the_reason_and_succeeds_once_it_is_there(
    launcher_side: LauncherSide, vmi: dict[str, Any], sockets: Path, start_sidecar: Callable[[], Sidecar]
) -> None:
    waiting = start_sidecar()
    report = launcher_side.call_hook(vmi, sockets, collect_timeout_s=60, shutdown=False)
    assert report.collect.error == ""
    (refused,) = report.calls
    assert "kvplace.io/placement" in refused.error
    assert "FailedPrecondition" in refused.error

    waiting.bind()
    report = launcher_side.call_hook(vmi, sockets, collect_timeout_s=60)
    assert report.errors == ()
    assert pins(report.defined) == WANTED


def test_cloud_init_data_stays_as_it_is(
    launcher_side: LauncherSide, vmi: dict[str, Any], sockets: Path, sidecar: Sidecar
) -> None:
    assert sidecar.process.poll() is None
    report = launcher_side.call_hook(vmi, sockets, collect_timeout_s=60, cloud_init=True)

    assert report.errors == ()
    assert report.cloud_init is not None
    assert report.cloud_init.data is not None
    assert report.cloud_init.data["UserData"] == "#cloud-config\n"


def test_two_sidecars_in_one_pod_are_both_found(
    launcher_side: LauncherSide, vmi: dict[str, Any], sockets: Path, start_sidecar: Callable[[], Sidecar]
) -> None:
    both = [start_sidecar(), start_sidecar()]
    for one in both:
        one.bind()
    report = launcher_side.call_hook(vmi, sockets, sidecars=2, collect_timeout_s=60)

    assert report.errors == ()
    assert pins(report.defined) == WANTED
    assert [one.process.wait(timeout=PATIENCE_S) for one in both] == [0, 0]
