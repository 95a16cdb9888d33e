"""Before QEMU starts, the hook compares each device in the domain with the cores, by sysfs alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvplace.core.cpuset import mask_of, parse_cpu_list
from kvplace.core.errors import BadDomainXml, Misconfigured
from kvplace.core.guest_cells import GuestCell
from kvplace.core.request import DeviceNuma, OnFailure
from kvplace.core.scalars import Bytes, CpuId, NumaId
from kvplace.hook.define_domain import define_arrival, define_domain
from kvplace.hook.process import PodEnvironment
from tests.domainxml.documents import pins
from tests.domainxml.host_devices import mediated, pci
from tests.hook.machine import BOUND, VMI, PodFolder, logged, works

HERE, THERE = "0000:41:00.1", "0000:c1:00.1"
UUID = "4b20d080-1b54-4048-85b3-a6a62d165c01"
FIX = (
    "the VM waits for other cores because its kvplace.io/device-numa is {}: release cores beside the device, "
    "delete the pod so that it is placed again, or write preferred"
)


def domain(*devices: str) -> bytes:
    return f"<domain><vcpu>4</vcpu><devices>{''.join(devices)}</devices></domain>".encode()


@pytest.fixture
def sysfs(machine: Path, pod: PodFolder) -> Path:
    """A machine with a device on each NUMA node, a vGPU on the second, and one CPU's socket in doubt."""
    sys = machine / "sys"
    for address, node in ((HERE, 0), (THERE, 1), ("0000:02:00.0", -1), ("0000:03:00.0", 7)):
        folder = sys / f"devices/pci/{address}"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
        link = sys / f"bus/pci/devices/{address}"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder)
    (sys / f"devices/pci/{THERE}/{UUID}").mkdir()
    (sys / "bus/mdev/devices").mkdir(parents=True)
    (sys / f"bus/mdev/devices/{UUID}").symlink_to(sys / f"devices/pci/{THERE}/{UUID}")
    (sys / "devices/pci/0000:02:00.0/junk").mkdir()
    assert pod.path.exists()
    return sys


def sockets(sys: Path, *, of_second_node: int) -> None:
    """State the packages of the two NUMA nodes."""
    for package, cpus in ((0, range(16)), (of_second_node, range(16, 32))):
        for cpu in cpus:
            folder = sys / f"devices/system/cpu/cpu{cpu}/topology"
            folder.mkdir(parents=True)
            (folder / "physical_package_id").write_text(f"{package}\n")


def ask(pod: PodFolder, mode: DeviceNuma, on_failure: OnFailure = OnFailure.WAIT) -> None:
    pod.write("placement", replace(BOUND, device_numa=mode, on_failure=on_failure).to_json())
    pod.ask_for(on_failure)


@pytest.mark.parametrize("mode", DeviceNuma)
@pytest.mark.usefixtures("sysfs")
def test_a_device_beside_the_cores_passes_in_silence(
    env: PodEnvironment, pod: PodFolder, mode: DeviceNuma, capfd: pytest.CaptureFixture[str]
) -> None:
    ask(pod, mode)
    answer = define_domain(domain(pci(HERE)), VMI, env, works)
    assert b"<vcpupin" in answer
    assert [line["level"] for line in logged(capfd)] == ["info"]


@pytest.mark.usefixtures("sysfs")
def test_required_refuses_a_device_on_another_numa_node_with_both_numbers(
    env: PodEnvironment, pod: PodFolder
) -> None:
    ask(pod, DeviceNuma.REQUIRED)
    with pytest.raises(Misconfigured) as refused:
        define_domain(domain(pci(HERE), pci(THERE, "ua-hostdevice-d1"), mediated(UUID)), VMI, env, works)
    assert str(refused.value) == (
        f"device ua-hostdevice-d1 ({THERE}) is on NUMA node 1, device ua-gpu-g1 ({UUID}) is on NUMA node 1, "
        "not beside its cores: the VM's cores are on NUMA node 0; " + FIX.format("required")
    )


@pytest.mark.usefixtures("sysfs")
def test_the_vm_starts_at_the_retry_after_a_revision_with_cores_beside_the_device(
    env: PodEnvironment, pod: PodFolder
) -> None:
    ask(pod, DeviceNuma.REQUIRED)
    with pytest.raises(Misconfigured):
        define_domain(domain(pci(THERE)), VMI, env, works)
    cpus = tuple(map(CpuId, (18, 50, 19, 51)))
    beside = replace(BOUND.placement, vcpus=cpus, cpus=mask_of(cpus), numa_nodes=(NumaId(1),))
    bound = replace(BOUND, placement=beside, device_numa=DeviceNuma.REQUIRED, revision=2)
    pod.write("placement", bound.to_json())
    assert pins(define_domain(domain(pci(THERE)), VMI, env, works))["vcpu 1"] == "50"


@pytest.mark.usefixtures("sysfs")
def test_preferred_starts_the_vm_with_a_warning(
    env: PodEnvironment, pod: PodFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    pod.bind()  # the default: the placement does not name the option
    answer = define_domain(domain(pci(THERE)), VMI, env, works)
    assert b"<vcpupin" in answer
    (warning,) = [line["msg"] for line in logged(capfd) if line["level"] == "warning"]
    assert warning == (
        f"device ua-sriov-fast ({THERE}) is on NUMA node 1, not beside its cores: the VM's cores are on "
        "NUMA node 0"
    )


@pytest.mark.parametrize(("package", "passes"), [(0, True), (1, False)])
def test_socket_accepts_another_numa_node_of_the_same_socket(
    env: PodEnvironment, pod: PodFolder, sysfs: Path, package: int, passes: bool
) -> None:
    ask(pod, DeviceNuma.SOCKET)
    sockets(sysfs, of_second_node=package)
    if passes:
        assert b"<vcpupin" in define_domain(domain(pci(THERE)), VMI, env, works)
        return
    with pytest.raises(Misconfigured, match=r"on NUMA node 1, not on a socket of its cores: .* is socket:"):
        define_domain(domain(pci(THERE)), VMI, env, works)


@pytest.mark.usefixtures("sysfs")
def test_where_sysfs_names_no_sockets_socket_refuses_nothing(env: PodEnvironment, pod: PodFolder) -> None:
    ask(pod, DeviceNuma.SOCKET)
    assert b"<vcpupin" in define_domain(domain(pci(THERE)), VMI, env, works)


@pytest.mark.usefixtures("sysfs")
def test_off_accepts_any_device(
    env: PodEnvironment, pod: PodFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    ask(pod, DeviceNuma.OFF)
    assert b"<vcpupin" in define_domain(domain(pci(THERE), pci("0000:02:00.0")), VMI, env, works)
    assert [line["level"] for line in logged(capfd)] == ["info"]


@pytest.mark.usefixtures("sysfs")
def test_a_vm_that_may_float_starts_pinned_with_a_device_that_is_not_local(
    env: PodEnvironment, pod: PodFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    ask(pod, DeviceNuma.REQUIRED, OnFailure.FLOAT)
    assert b"<vcpupin" in define_domain(domain(pci(THERE)), VMI, env, works)
    (warning,) = [line["msg"] for line in logged(capfd) if line["level"] == "warning"]
    assert warning.startswith("the VM starts because its on-failure is float: device ua-sriov-fast")


UNKNOWN = {
    pci("0000:02:00.0"): "0000:02:00.0) restricts nothing: its firmware states no NUMA node",
    pci("0000:03:00.0"): "0000:03:00.0) restricts nothing: sysfs states NUMA node 7, which this",
    pci("0000:ff:1f.7"): "0000:ff:1f.7) restricts nothing: sysfs does not have it",
    mediated("00000000-0000-4000-8000-000000000000"): "restricts nothing: sysfs does not have it",
    mediated("../../../../etc"): "ua-gpu-g1 (without a readable source address) restricts nothing",
    "<hostdev type='pci'/>": "device without a readable source address restricts nothing: the domain has",
    "<hostdev type='pci'><source><address bus='0x1ff' slot='9'/></source></hostdev>": "without a readable",
    "<hostdev type='pci'><source><address bus='é' slot='9'/></source></hostdev>": "without a readable",
}


@pytest.mark.parametrize("device", UNKNOWN)
@pytest.mark.parametrize(
    ("mode", "level"), [(DeviceNuma.PREFERRED, "info"), (DeviceNuma.REQUIRED, "warning")]
)
@pytest.mark.usefixtures("sysfs")
def test_a_device_of_an_unknown_numa_node_restricts_nothing_and_is_reported(
    env: PodEnvironment,
    pod: PodFolder,
    device: str,
    mode: DeviceNuma,
    level: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    ask(pod, mode)
    assert b"<vcpupin" in define_domain(domain(device), VMI, env, works)
    (said, _) = logged(capfd)
    assert said["level"] == level
    assert UNKNOWN[device] in said["msg"]


def test_a_numa_node_file_with_junk_is_unknown_too(
    env: PodEnvironment, pod: PodFolder, sysfs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ask(pod, DeviceNuma.REQUIRED)
    (sysfs / f"devices/pci/{HERE}/numa_node").write_text("node one\n")
    assert b"<vcpupin" in define_domain(domain(pci(HERE)), VMI, env, works)
    assert "numa_node has 'node one', not a number" in logged(capfd)[0]["msg"]


def test_a_device_on_a_numa_node_without_cpus_restricts_nothing_as_for_the_choice_of_cores(
    env: PodEnvironment, pod: PodFolder, sysfs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ask(pod, DeviceNuma.REQUIRED)
    (sysfs / "devices/system/node/node1/cpulist").write_text("\n")
    assert b"<vcpupin" in define_domain(domain(pci(THERE)), VMI, env, works)
    said = logged(capfd)[0]
    assert said["level"] == "warning"
    assert said["msg"] == f"device ua-sriov-fast ({THERE}) restricts nothing: its NUMA node 1 has no CPUs"


@pytest.mark.usefixtures("sysfs")
def test_usb_and_scsi_devices_have_no_numa_node(
    env: PodEnvironment, pod: PodFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    ask(pod, DeviceNuma.REQUIRED)
    define_domain(domain("<hostdev type='usb'/>", "<hostdev type='scsi'/>"), VMI, env, works)
    assert [line["level"] for line in logged(capfd)] == ["info"]


@pytest.mark.usefixtures("sysfs")
def test_a_bare_cpu_map_is_compared_by_the_nodes_of_its_cpus(
    env: PodEnvironment, pod: PodFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    pod.write("placement", "")
    pod.write("cpu-map", '{"socket0": ["2", "34", "3", "35"]}')
    define_domain(domain(pci(THERE)), VMI, env, works)
    assert "not beside its cores: the VM's cores are on NUMA node 0" in logged(capfd)[0]["msg"]


def test_on_a_machine_with_one_numa_node_nothing_is_reported(
    env: PodEnvironment, pod: PodFolder, sysfs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ask(pod, DeviceNuma.REQUIRED)
    (sysfs / "devices/system/node/node1/cpulist").unlink()
    (sysfs / "devices/system/node/node1").rmdir()
    define_domain(domain(pci("0000:02:00.0")), VMI, env, works)
    assert [line["level"] for line in logged(capfd)] == ["info"]


@pytest.mark.usefixtures("sysfs")
def test_many_devices_give_a_short_sentence(env: PodEnvironment, pod: PodFolder) -> None:
    ask(pod, DeviceNuma.REQUIRED)
    with pytest.raises(Misconfigured, match=r"on NUMA node 1, and 12 more, not beside") as refused:
        define_domain(domain(*[pci(THERE, f"ua-sriov-{n}") for n in range(16)]), VMI, env, works)
    assert len(str(refused.value)) < 600


@pytest.mark.usefixtures("sysfs")
def test_a_vm_that_migrates_here_is_compared_with_the_devices_of_this_machine(
    env: PodEnvironment, pod: PodFolder
) -> None:
    ask(pod, DeviceNuma.REQUIRED)
    with pytest.raises(Misconfigured, match="is on NUMA node 1, not beside its cores"):
        define_arrival(domain(pci(THERE)), env, works)
    assert b"<vcpupin" in define_arrival(domain(pci(HERE)), env, works)


def with_image(image: str) -> bytes:
    return json.dumps(json.loads(VMI) | {"status": {"launcherContainerImageVersion": image}}).encode()


@pytest.mark.parametrize(
    ("image", "sees"),
    [
        ("quay.io/kubevirt/virt-launcher:v1.8.0", True),
        ("registry.test:5000/kubevirt/virt-launcher:v1.10.1@sha256:abc", True),
        ("registry.test:1.7.0/virt-launcher@sha256:abc", True),
        ("", True),
        ("quay.io/kubevirt/virt-launcher:v1.7.3", False),
        ("registry.test:5000/kubevirt/virt-launcher:1.7.3-el9@sha256:abc", False),
    ],
)
@pytest.mark.usefixtures("sysfs")
def test_a_mirroring_guest_sees_the_cell_of_a_device_unless_kubevirt_does_not_keep_its_bus(
    env: PodEnvironment, pod: PodFolder, image: str, sees: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    cell = GuestCell(0, NumaId(0), (0, 1, 2, 3), Bytes(4 << 30), (10,))
    pod.bind(replace(BOUND.placement, guest_cells=(cell,)))
    xml = domain(pci(HERE)).replace(
        b"<devices>", b"<memory unit='GiB'>4</memory><os><type machine='q35'>hvm</type></os><devices>"
    )
    answer = define_domain(xml, with_image(image), env, works)
    assert (b"pcie-expander-bus" in answer) is sees
    said = [line["msg"] for line in logged(capfd) if line["level"] == "warning"]
    why = "the guest does not see the NUMA nodes of its devices: KubeVirt 1.7 does not keep their buses"
    assert said == ([] if sees else [f"{why}; 1.8 does"])
    assert define_domain(answer, with_image(image), env, works) == answer
    assert b"pcie-expander-bus" not in define_arrival(xml, env, works)


addresses = st.text("0123456789abcdefx-", max_size=12)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(st.sampled_from(["domain", "bus", "slot", "function", "uuid"]), addresses), st.booleans()
)
def test_any_source_address_is_a_device_or_unknown(
    sysfs: Path, env: PodEnvironment, pod: PodFolder, attributes: dict[str, str], of_pci: bool
) -> None:
    assert sysfs.exists()
    ask(pod, DeviceNuma.PREFERRED)
    written = " ".join(f"{name}='{value}'" for name, value in attributes.items())
    kind = "pci" if of_pci else "mdev"
    device = f"<hostdev type='{kind}'><source><address {written}/></source></hostdev>"
    assert b"<vcpupin" in define_domain(domain(device), VMI, env, works)


def test_the_placement_of_these_tests_is_on_the_first_numa_node() -> None:
    assert BOUND.placement.numa_nodes == (0,)
    assert not BOUND.placement.cpus & ~parse_cpu_list("0-15,32-47")


def test_an_empty_document_is_refused_as_before(env: PodEnvironment, pod: PodFolder) -> None:
    ask(pod, DeviceNuma.REQUIRED)
    with pytest.raises(BadDomainXml, match="is empty"):
        define_domain(b"", VMI, env, works)
