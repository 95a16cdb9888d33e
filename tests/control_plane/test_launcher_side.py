"""KubeVirt's launcher side itself: what tests of the hook take for granted about it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from lxml import etree

from harness.control_plane.launcher_side import HostCell, LauncherSide, LauncherSideFailed, host_topology
from tests.captured import captured_files, captured_folder

SAMPLES = [path.name.removesuffix(".vmi.json") for path in captured_files("kubevirt/domains", "*.vmi.json")]
# Recorded from a KubeVirt after the one that is linked here, and with the firmware of another machine.
NEWER = {"07-amd64-dedicated-numa-hugepages", "15-arm64-dedicated"}

SMALL_VMI = """
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstance
metadata: {name: small, namespace: tenant}
spec:
  domain:
    cpu: {sockets: 1, cores: 2, threads: 1}
    memory: {guest: 1Gi}
    devices:
      interfaces: [{name: default, masquerade: {}}]
  networks: [{name: default, pod: {}}]
"""


class Sample:
    """One VMI recorded in every stage, and the host that its domain was made for."""

    def __init__(self, name: str) -> None:
        folder = captured_folder("kubevirt/domains")
        self.manifest = yaml.safe_load((folder / f"{name}.vmi-input.yaml").read_text())
        self.vmi: dict[str, Any] = json.loads((folder / f"{name}.vmi.json").read_text())
        self.domain = (folder / f"{name}.domain.xml").read_text().removesuffix("\n")
        self.made_with = json.loads(self.manifest["metadata"]["annotations"]["x-gen"])

    @property
    def host(self) -> dict[str, Any]:
        """Two NUMA nodes of 16 cores each; the sibling of CPU n is n + 32, where there are siblings."""
        if "cpuSet" not in self.made_with:
            return {}
        cells = [
            HostCell(
                id=node,
                cores=[
                    (core, core + 32) if self.made_with["smt"] else (core,)
                    for core in range(16 * node, 16 * node + 16)
                ],
                huge_pages={4: 1 << 20, 1 << 20: 64},
            )
            for node in (0, 1)
        ]
        return {"cpuset": ",".join(map(str, self.made_with["cpuSet"])), "topology": host_topology(cells)}

    @property
    def configuration(self) -> dict[str, Any]:
        rollout = self.made_with.get("rollout")
        return {"vmRolloutStrategy": rollout} if rollout else {}


@pytest.fixture
def vmi(launcher_side: LauncherSide) -> dict[str, Any]:
    return launcher_side.default_vmi(SMALL_VMI)


@pytest.fixture
def no_sidecars(tmp_path: Path) -> Path:
    """Lay a folder where virt-launcher finds nobody."""
    return tmp_path


@pytest.mark.parametrize("name", [name for name in SAMPLES if name not in NEWER])
def test_a_domain_is_byte_for_byte_what_was_recorded(launcher_side: LauncherSide, name: str) -> None:
    sample = Sample(name)
    assert launcher_side.domain_xml_of(sample.vmi, **sample.host) == sample.domain


def test_a_domain_with_numa_passthrough_differs_from_a_newer_kubevirt_only_in_distances(
    launcher_side: LauncherSide,
) -> None:
    sample = Sample("07-amd64-dedicated-numa-hugepages")
    recorded = re.sub(r">\s*<distances>.*?</distances>\s*<", "><", sample.domain, flags=re.DOTALL)
    assert launcher_side.domain_xml_of(sample.vmi, **sample.host) == recorded


@pytest.mark.parametrize("name", SAMPLES)
def test_defaults_are_those_that_were_recorded(launcher_side: LauncherSide, name: str) -> None:
    sample = Sample(name)
    defaulted = launcher_side.default_vmi(sample.manifest, sample.configuration)

    # A random UUID each time.
    assert defaulted["spec"]["domain"].pop("firmware")["uuid"]
    firmware = sample.vmi["spec"]["domain"].pop("firmware")
    assert defaulted["spec"] == sample.vmi["spec"], firmware
    assert defaulted["status"]["runtimeUser"] == 107
    assert defaulted["status"].items() <= sample.vmi["status"].items()


def test_a_vmi_with_dedicated_cpus_needs_a_cpuset_and_a_topology(launcher_side: LauncherSide) -> None:
    with pytest.raises(LauncherSideFailed, match="needs -cpuset and -topology"):
        launcher_side.domain_xml_of(Sample("05-amd64-dedicated").vmi)


def test_what_is_no_vmi_is_refused_with_the_reason(launcher_side: LauncherSide) -> None:
    with pytest.raises(LauncherSideFailed, match='unknown field "speck"'):
        launcher_side.default_vmi({"metadata": {"name": "x"}, "speck": {}})


def test_a_node_without_kvm_gets_a_domain_for_emulation(
    launcher_side: LauncherSide, vmi: dict[str, Any]
) -> None:
    assert launcher_side.domain_xml_of(vmi).startswith('<domain type="kvm"')
    emulated = launcher_side.domain_xml_of(vmi, emulation=True, kvm=False)
    assert emulated.startswith('<domain type="qemu"')


def test_three_calls_differ_as_virt_launchers_do(
    launcher_side: LauncherSide, vmi: dict[str, Any], no_sidecars: Path
) -> None:
    report = launcher_side.call_hook(vmi, no_sidecars, sidecars=0, placeholders=3, root_ports=2)

    assert report.errors == ()
    domains = [etree.fromstring(call.sent) for call in report.calls]
    assert [len(domain.findall("devices/interface")) for domain in domains] == [4, 1, 1]
    assert [len(domain.findall("devices/controller[@type='pci']")) for domain in domains] == [0, 0, 2]
    # With nobody to change it, every domain comes back as it went.
    assert [call.sent for call in report.calls] == [call.returned for call in report.calls]
    assert report.defined == report.calls[2].returned


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_fewer_calls_can_be_asked_for(
    launcher_side: LauncherSide, vmi: dict[str, Any], no_sidecars: Path, calls: int
) -> None:
    report = launcher_side.call_hook(vmi, no_sidecars, sidecars=0, calls=calls, shutdown=False)
    assert len(report.calls) == calls
    assert report.shutdown is None


def test_a_domain_from_a_file_is_what_the_first_call_carries(
    launcher_side: LauncherSide, vmi: dict[str, Any], no_sidecars: Path, tmp_path: Path
) -> None:
    domain = tmp_path / "domain.xml"
    domain.write_text(launcher_side.domain_xml_of(vmi))
    report = launcher_side.call_hook(vmi, no_sidecars, sidecars=0, domain=domain, calls=1)
    assert report.defined == domain.read_text()


def test_a_sidecar_that_never_comes_is_reported_and_nothing_is_called(
    launcher_side: LauncherSide, vmi: dict[str, Any], no_sidecars: Path
) -> None:
    report = launcher_side.call_hook(vmi, no_sidecars, sidecars=1, collect_timeout_s=0.1)
    assert report.errors == ("Failed to collect all expected sidecar hook sockets within given timeout",)
    assert report.calls == ()
    with pytest.raises(LookupError):
        report.defined  # noqa: B018


@pytest.fixture
def untouched_host() -> Iterator[None]:
    """See to it that the test mounts nothing where others would see it."""
    before = Path("/proc/self/mountinfo").read_text()
    yield
    assert Path("/proc/self/mountinfo").read_text() == before
    assert not Path("/var/run/kubevirt-hooks").exists()


@pytest.mark.usefixtures("untouched_host")
async def test_many_run_side_by_side_and_leave_no_trace_on_the_host(
    launcher_side: LauncherSide, vmi: dict[str, Any], no_sidecars: Path
) -> None:
    reports = await asyncio.gather(
        *(launcher_side.call_hook_async(vmi, no_sidecars, sidecars=0, calls=1) for _ in range(12))
    )
    assert [report.errors for report in reports] == [()] * 12


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """Lay a folder that every user can read, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_an_ordinary_user_can_call_hooks_too(
    launcher_side: LauncherSide, kubevirt_programs: Path, vmi: dict[str, Any], public_folder: Path
) -> None:
    program = shutil.copy(kubevirt_programs / "launcher-side", public_folder)
    done = subprocess.run(
        [program, "call-hook", "-sockets", public_folder, "-sidecars", "0", "-calls", "1"],
        input=json.dumps(vmi),
        capture_output=True,
        text=True,
        check=False,
        user=65534,
        group=65534,
        extra_groups=(),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["calls"][0]["returned"] == launcher_side.domain_xml_of(vmi)
