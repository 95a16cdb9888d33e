"""KubeVirt's own hook client and converter, linked from its modules, against the real process."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from lxml import etree

from harness.control_plane.launcher_side import HookReport, LauncherSide
from kvplace.core.cpuset import mask_of
from kvplace.core.guest_cells import GuestCell
from kvplace.core.request import OnFailure, Policy
from kvplace.core.scalars import Bytes, CpuId, NumaId
from kvplace.domainxml import rewrite
from kvplace.domainxml.host_devices import pci_address_of
from tests.domainxml.host_devices import pci
from tests.hook.conftest import HookProcess
from tests.hook.machine import ON_THIS_MACHINE, two_socket_machine
from tests.kubevirt_documents import DOMAINS

pytestmark = pytest.mark.control_plane


def vmi(name: str) -> str:
    return (DOMAINS / f"{name}.vmi.json").read_text()


@pytest.fixture
def sockets(hook: HookProcess) -> Path:
    """virt-launcher's view: one folder per sidecar."""
    folder = hook.root / "launcher"
    (folder / "hook-sidecar-0").mkdir(parents=True)
    hook.environ["KVPLACE_HOOK_FOLDER"] = str(folder / "hook-sidecar-0")
    return folder


def pins(xml: str) -> dict[str, list[str]]:
    root = etree.fromstring(xml)
    return {
        name: [pin.get("cpuset", "") for pin in root.iterfind(f"cputune/{name}")]
        for name in ("vcpupin", "emulatorpin", "iothreadpin")
    }


@pytest.mark.parametrize(
    ("name", "vcpus", "io_threads"),
    [
        ("01-amd64-plain-4vcpu", 16, 0),
        ("09-amd64-iothreads-shared", 4, 2),
        ("11-amd64-iothreads-supplementalpool", 4, 4),
    ],
)
@pytest.mark.parametrize("calls", [1, 2, 3])
def test_every_call_of_a_boot_comes_back_pinned_and_shutdown_ends_the_sidecar(
    hook: HookProcess,
    sockets: Path,
    launcher_side: LauncherSide,
    name: str,
    vcpus: int,
    io_threads: int,
    calls: int,
) -> None:
    hook.pod.bind(ON_THIS_MACHINE)
    hook.start()
    report = launcher_side.call_hook(vmi(name), sockets, calls=calls)
    assert report.errors == ()
    assert len(report.calls) == calls
    for call in report.calls:
        found = pins(call.returned)
        assert (len(found["vcpupin"]), len(found["emulatorpin"]), len(found["iothreadpin"])) == (
            vcpus,
            1,
            io_threads,
        )
    assert hook.wait() == 0


def test_answers_fed_back_whole_stay_as_they_are(
    hook: HookProcess, sockets: Path, launcher_side: LauncherSide
) -> None:
    hook.pod.bind(ON_THIS_MACHINE)
    hook.start()
    report = launcher_side.call_hook(vmi("09-amd64-iothreads-shared"), sockets, calls=5, chained=True)
    assert report.errors == ()
    first, *later = (call.returned for call in report.calls)
    assert len(set(later)) == 1  # KubeVirt's own reading drops an unused namespace after the first
    assert first.replace(' xmlns:qemu="http://libvirt.org/schemas/domain/qemu/1.0"', "") == later[0]
    assert report.calls[0].sent != first


def test_cells_of_a_mirroring_guest_survive_kubevirts_reading_between_the_calls(
    hook: HookProcess, sockets: Path, launcher_side: LauncherSide
) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    apart = [(10, 21, 31), (21, 10, 31), (31, 31, 10)]
    vcpus = ((0,), (1,), ())
    placement = replace(
        ON_THIS_MACHINE,
        policy=Policy.SHARE,
        vcpus=(CpuId(first), CpuId(second)),
        cpus=mask_of((first, second)),
        numa_nodes=(NumaId(0), NumaId(1), NumaId(2)),
        guest_cells=tuple(GuestCell(n, NumaId(n), vcpus[n], Bytes(1 << 30), apart[n]) for n in range(3)),
    )
    hook.pod.bind(placement)
    hook.start()
    asked = json.loads(vmi("01-amd64-plain-4vcpu"))
    asked["spec"]["domain"]["cpu"] |= {"sockets": 1, "maxSockets": 3}
    asked["spec"]["domain"]["memory"] = {"guest": "3Gi"}
    report = launcher_side.call_hook(json.dumps(asked), sockets, calls=3, chained=True)
    assert report.errors == ()
    assert [len(etree.fromstring(call.sent).findall("cpu/numa/cell")) for call in report.calls] == [0, 3, 3]
    for call in report.calls:
        root = etree.fromstring(call.returned)
        assert [cell.get("cpus") for cell in root.findall("cpu/numa/cell")] == ["0,2,4", "1,3,5", None]
        assert [cell.get("memory") for cell in root.findall("cpu/numa/cell")] == [str(1 << 30)] * 3
        distances = [sibling.get("value") for sibling in root.findall("cpu/numa/cell/distances/sibling")]
        assert distances == [str(value) for row in apart for value in row]
        (topology,) = root.findall("cpu/topology")
        assert dict(topology.items()) == {"sockets": "6", "cores": "1", "threads": "1"}


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_devices_of_a_mirroring_guest_stay_in_their_cells_through_kubevirts_schema(
    hook: HookProcess, sockets: Path, launcher_side: LauncherSide, calls: int
) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    two_socket_machine(hook.root, cpuset=f"{first},{second}")
    hook.environ |= {
        "KVPLACE_SYS_FOLDER": str(hook.root / "sys"),
        "KVPLACE_PROC_FOLDER": str(hook.root / "proc"),
    }
    addresses = {f"0000:{0x41 + node:02x}:00.{number}": node for node in (0, 1) for number in (1, 2, 3)}
    for address, node in addresses.items():
        folder = hook.root / f"sys/bus/pci/devices/{address}"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    cells = tuple(
        GuestCell(n, NumaId(n), (n,), Bytes(1 << 30), (10, 21) if n == 0 else (21, 10)) for n in range(2)
    )
    placement = replace(
        ON_THIS_MACHINE,
        policy=Policy.SHARE,
        vcpus=(CpuId(first), CpuId(second)),
        cpus=mask_of((first, second)),
        emulator_cpus=mask_of((first, second)),
        numa_nodes=(NumaId(0), NumaId(1)),
        guest_cells=cells,
    )
    hook.pod.bind(placement)
    hook.start()
    asked = json.loads(vmi("01-amd64-plain-4vcpu"))
    asked["spec"]["domain"]["cpu"] |= {"sockets": 1, "cores": 2, "maxSockets": 1}
    asked["spec"]["domain"]["memory"] = {"guest": "2Gi"}
    written = "".join(pci(address, f"ua-hostdevice-d{n}") for n, address in enumerate(addresses))
    converted = hook.root / "domain.xml"
    converted.write_text(
        launcher_side.domain_xml_of(json.dumps(asked)).replace("</devices>", f"{written}</devices>")
    )
    report = launcher_side.call_hook(json.dumps(asked), sockets, domain=converted, calls=calls)
    assert report.errors == ()
    for call in report.calls:
        root = etree.fromstring(call.returned)
        by_index = {each.get("index", ""): each for each in root.iterfind("devices/controller[@type='pci']")}
        seen = {}
        for device in root.iterfind("devices/hostdev"):
            port = by_index[str(int(device.find("address").get("bus", ""), 16))]  # type: ignore[union-attr]
            bus = by_index[str(int(port.find("address").get("bus", ""), 16))]  # type: ignore[union-attr]
            source = pci_address_of(device.find("source/address"))  # type: ignore[arg-type]
            seen[source] = int(bus.findtext("target/node", ""))
        assert seen == addresses
        buses = root.findall("devices/controller[@model='pcie-expander-bus']")
        assert [bus.find("target").get("busNr") for bus in buses] == ["252", "248"]  # type: ignore[union-attr]
    last = etree.fromstring(report.calls[-1].sent)
    assert last.find("devices/hostdev/alias").get("name") == "ua-hostdevice-d0"  # type: ignore[union-attr]


def asked_without_placement(
    hook: HookProcess, sockets: Path, launcher_side: LauncherSide, *, shutdown: bool = True
) -> HookReport:
    hook.pod.bind(ON_THIS_MACHINE, uid="inherited")
    hook.start()
    return launcher_side.call_hook(vmi("03-amd64-requests-only"), sockets, calls=1, shutdown=shutdown)


def test_with_wait_kubevirt_gets_the_reason_and_its_next_start_is_pinned(
    hook: HookProcess, sockets: Path, launcher_side: LauncherSide
) -> None:
    report = asked_without_placement(hook, sockets, launcher_side, shutdown=False)
    (error,) = report.errors
    assert "FailedPrecondition" in error
    assert "it was made for the pod with UID 'inherited'" in error

    hook.pod.bind(ON_THIS_MACHINE)
    report = launcher_side.call_hook(vmi("03-amd64-requests-only"), sockets, calls=1)
    assert report.errors == ()
    assert report.defined == rewrite(report.calls[0].sent.encode(), ON_THIS_MACHINE).decode()


def test_with_float_the_vm_is_defined_unchanged(
    hook: HookProcess, sockets: Path, launcher_side: LauncherSide
) -> None:
    hook.pod.ask_for(OnFailure.FLOAT)
    report = asked_without_placement(hook, sockets, launcher_side)
    assert report.errors == ()
    assert report.defined == report.calls[0].sent


def test_kubevirt_does_not_call_us_for_cloud_init(
    hook: HookProcess, sockets: Path, launcher_side: LauncherSide
) -> None:
    hook.pod.bind(ON_THIS_MACHINE)
    hook.start()
    report = launcher_side.call_hook(vmi("03-amd64-requests-only"), sockets, calls=1, cloud_init=True)
    assert report.errors == ()


def test_two_sidecars_of_ours_are_both_found(
    hook: HookProcess, sockets: Path, launcher_side: LauncherSide
) -> None:
    hook.pod.bind(ON_THIS_MACHINE)
    hook.start()
    (sockets / "hook-sidecar-1").mkdir()
    environ = hook.environ | {
        "CONTAINER_NAME": "hook-sidecar-1",
        "KVPLACE_HOOK_FOLDER": str(sockets / "hook-sidecar-1"),
    }
    second = HookProcess(hook.root, hook.pod, environ)
    second.start()
    report = launcher_side.call_hook(vmi("03-amd64-requests-only"), sockets, sidecars=2, calls=3)
    assert report.errors == ()
    assert (hook.wait(), second.wait()) == (0, 0)
    assert second.process is not None
    assert second.process.stderr is not None
    second.process.stderr.close()
