"""The devices that pods and VMIs name reach the normalised request, and no other resources do."""

from __future__ import annotations

from typing import Any

import pytest

from kvplace.admission.stated_request import devices_elsewhere, stated_request
from kvplace.admission.vmi import admit_vmi
from kvplace.core.errors import Misconfigured
from kvplace.core.request import DeviceNuma
from tests.admission.pod_admission import admit, launcher, refusal
from tests.admission.reviewed_objects import (
    ASKS,
    SETTINGS,
    Json,
    container,
    plain_pod,
    vm,
    vmi,
    vmi_of,
    written_request,
)

OTHERS = {
    "devices.kubevirt.io/kvm": "1",
    "devices.kubevirt.io/tun": "1",
    "devices.kubevirt.io/vhost-net": "1",
    "kubernetes.io/x": "1",
    "hugepages-1Gi": "1Gi",
    "ephemeral-storage": "50M",
}
"""Resources of a launcher pod that do not count devices with a NUMA node."""
NUMA = "kvplace.io/device-numa"


def with_devices(**devices: Any) -> Json:
    raw = launcher(annotations=ASKS | {NUMA: "required"})
    resources = container(raw, "compute")["resources"]
    named = {name.replace("__", "/").replace("_", "."): count for name, count in devices.items()}
    for kind in ("requests", "limits"):
        resources[kind] |= OTHERS | named
    return raw


def test_the_devices_of_the_compute_container_are_in_the_request_and_counters_are_not() -> None:
    raw = with_devices(intel_com__vf="2", nvidia_com__GA100=1, devices_kubevirt_io__nvme="1")
    request = written_request(admit(raw, vmi_of(raw))[0]).request
    assert request.devices == {"intel.com/vf": 2, "nvidia.com/GA100": 1, "devices.kubevirt.io/nvme": 1}
    assert request.options.device_numa is DeviceNuma.REQUIRED


def test_the_marker_of_the_first_admission_does_not_count_as_a_device_in_the_second() -> None:
    raw = with_devices(intel_com__vf="1")
    once = admit(raw, vmi_of(raw))[0]
    assert written_request(admit(once, vmi_of(raw))[0]).request.devices == {"intel.com/vf": 1}


def test_a_device_that_another_webhook_adds_after_the_first_admission_counts_in_the_second() -> None:
    """The network resources injector of Multus is called after kvplace."""
    raw = with_devices()
    once = admit(raw, vmi_of(raw))[0]
    assert written_request(once).request.devices == {}
    for kind in ("requests", "limits"):
        container(once, "compute")["resources"][kind]["intel.com/vf"] = "1"
    assert written_request(admit(once, vmi_of(raw))[0]).request.devices == {"intel.com/vf": 1}


def test_devices_of_other_containers_of_a_vm_do_not_count_and_those_of_a_plain_pod_do() -> None:
    raw = with_devices(intel_com__vf="1")
    raw["spec"]["containers"].append(
        {"name": "probe", "image": "x", "resources": {"limits": {"intel.com/vf": "7"}}}
    )
    assert written_request(admit(raw, vmi_of(raw))[0]).request.devices == {"intel.com/vf": 1}
    plain = plain_pod(
        {**ASKS, NUMA: "socket"},
        {"limits": {"cpu": "2", "intel.com/vf": "1"}},
        {"limits": {"cpu": "1", "intel.com/vf": "2"}},
    )
    request = written_request(admit(plain)[0]).request
    assert (request.devices, request.options.device_numa) == ({"intel.com/vf": 3}, DeviceNuma.SOCKET)
    assert stated_request(plain) == written_request(admit(plain)[0])


@pytest.mark.parametrize("count", ["1500m", "-1", 0.5])
def test_a_part_of_a_device_is_refused_with_its_container(count: Any) -> None:
    assert refusal(plain_pod(ASKS, {"limits": {"cpu": "2", "intel.com/vf": count}})) == (
        f"Pod default/solver: container c0: intel.com/vf is {count!r}; write a whole number of devices"
    )


def test_more_resources_than_a_request_holds_are_refused() -> None:
    limits = {"cpu": "2"} | {f"a.com/{number}": "1" for number in range(65)}
    assert refusal(plain_pod(ASKS, {"limits": limits})) == (
        "Pod default/solver: devices has 65 resources, more than 64"
    )


DEVICES = {
    "gpus": [{"name": "g", "deviceName": "nvidia.com/GA100"}, {"name": "h", "claimName": "io"}],
    "hostDevices": [{"name": f"d{number}", "deviceName": "devices.kubevirt.io/nvme"} for number in range(2)],
    "interfaces": [{"name": "fast", "sriov": {}}, {"name": "default", "masquerade": {}}],
}


@pytest.mark.parametrize("make", [vm, vmi])
def test_a_vm_states_the_devices_that_it_names_and_which_ones_others_name(make: Any) -> None:
    document = make(devices=DEVICES)
    stated = stated_request(document)
    assert stated is not None
    assert stated.request.devices == {"nvidia.com/GA100": 1, "devices.kubevirt.io/nvme": 2}
    assert list(devices_elsewhere(document)) == [
        "1 SR-IOV interface not counted as a device: its NetworkAttachmentDefinition names the resource",
        "1 device of a ResourceClaim not counted: the claim decides it at the bind",
    ]
    assert list(devices_elsewhere(make())) == list(devices_elsewhere(plain_pod())) == []


@pytest.mark.parametrize("key", ["gpus", "hostDevices", "interfaces"])
def test_the_option_of_a_vmi_without_any_device_is_warned_about(key: str) -> None:
    def warnings(devices: Any) -> tuple[str, ...]:
        asked = vmi({**ASKS, NUMA: "required"}, devices=devices)
        return admit_vmi(asked, namespace="default", settings=SETTINGS).warnings

    assert warnings({key: DEVICES[key]}) == ()
    (warning,) = warnings({"disks": [], "interfaces": [{"name": "default"}]})
    assert warning == (
        "annotation kvplace.io/device-numa has no effect: VirtualMachineInstance default/db: "
        "spec.domain.devices has no GPU, no host device and no SR-IOV interface"
    )


def test_an_unknown_value_is_refused() -> None:
    with pytest.raises(Misconfigured, match=r"device-numa: 'legacy': must be one of preferred, required"):
        admit_vmi(vmi({**ASKS, NUMA: "legacy"}), namespace="default", settings=SETTINGS)
