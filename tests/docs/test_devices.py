"""docs/devices.md: its request is read as the page states it, and its claim is the one of the template."""

from __future__ import annotations

from typing import Any

import yaml

from kvplace.core.annotations import read_options
from kvplace.core.request import DeviceNuma, GuestNuma, Scope
from kvplace.simulate.demo_vms import read_templates
from tests.docs.blocks import block
from tests.docs.reading import PROJECT, page


def test_the_request_of_the_page_keeps_cores_and_devices_on_one_numa_node() -> None:
    document: dict[str, Any] = yaml.safe_load(block("docs/devices.md", "annotations:"))
    options = read_options(document["annotations"])
    assert options is not None
    assert (options.scope, options.device_numa) == (Scope.ONE_NUMA, DeviceNuma.REQUIRED)
    assert options.guest_numa is GuestNuma.MIRROR


def test_the_claim_of_the_template_has_every_device_that_the_vm_names() -> None:
    path = "vm-templates/claims/gpu-and-disk.yaml"
    assert path in page("devices.md")
    claim = yaml.safe_load((PROJECT / path).read_text())
    spec = claim["spec"]["spec"]["devices"]
    names = [request["name"] for request in spec["requests"]]
    (constraint,) = spec["constraints"]
    assert (constraint["requests"], constraint["matchAttribute"]) == (
        names,
        "resource.kubernetes.io/numaNode",
    )
    vmi = read_templates()["gpu-training"]["spec"]["template"]["spec"]
    (used,) = vmi["resourceClaims"]
    assert used["resourceClaimTemplateName"] == claim["metadata"]["name"]
    devices = vmi["domain"]["devices"]
    assert {
        (each["claimName"], each["requestName"]) for each in (*devices["gpus"], *devices["hostDevices"])
    } == {(used["name"], name) for name in names}
