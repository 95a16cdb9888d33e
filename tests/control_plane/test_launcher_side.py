"""KubeVirt's launcher side itself: what tests of the hook take for granted about it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lxml import etree

from harness.control_plane.launcher_side import LauncherSide, LauncherSideFailed
from tests.kubevirt_documents import domains

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


@pytest.fixture
def vmi(launcher_side: LauncherSide) -> dict[str, Any]:
    return launcher_side.default_vmi(SMALL_VMI)


@pytest.fixture
def no_sidecars(tmp_path: Path) -> Path:
    """Lay a folder where virt-launcher finds no hook."""
    return tmp_path


@pytest.mark.parametrize("name", domains.NAMES)
def test_the_documents_that_tests_read_are_those_that_kubevirt_makes(
    launcher_side: LauncherSide, name: str
) -> None:
    """After a change of KubeVirt's version: `python -m tests.kubevirt_documents`."""
    assert domains.made(name, launcher_side) == domains.kept(name)


def test_a_vmi_with_dedicated_cpus_needs_a_cpuset_and_a_topology(launcher_side: LauncherSide) -> None:
    with pytest.raises(LauncherSideFailed, match="needs -cpuset and -topology"):
        launcher_side.domain_xml_of(json.loads(domains.kept("05-amd64-dedicated").vmi))


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
    # Without a hook to change it, every domain comes back as it went.
    assert [call.sent for call in report.calls] == [call.returned for call in report.calls]
    assert report.defined == report.calls[2].returned


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
