"""The JSON form of an agent's report about devices."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from kvplace.core.node_devices import (
    NO_NUMA,
    DeviceCount,
    DeviceReport,
    NodeDevices,
    PodDevice,
    TopologyPolicy,
    read_device_report,
)
from kvplace.core.scalars import NumaId, PodUid, ResourceName

VF = ResourceName("intel.com/vf")
REPORT = DeviceReport(
    NodeDevices.of(
        [DeviceCount(VF, NumaId(1), 8, 7), DeviceCount(VF, NO_NUMA, 2, 2)],
        TopologyPolicy("best-effort", "pod"),
    ),
    {PodUid("u1"): (PodDevice(VF, NumaId(1), "0000:c1:00.1"), PodDevice(VF, NO_NUMA))},
    {"pci0000:c0": NumaId(1), "0000:c1": NumaId(1)},
)


def test_a_report_is_read_as_it_was_written() -> None:
    assert read_device_report(json.loads(json.dumps(REPORT.document())), "status.devices") == REPORT


def test_a_node_without_a_report_has_unknown_devices() -> None:
    assert read_device_report(None, "status.devices") is None
    assert read_device_report({}, "status.devices") == DeviceReport(NodeDevices())


def test_a_pci_device_is_on_the_numa_node_of_its_bus() -> None:
    assert REPORT.node_of_address("0000:c1:00.1") == 1
    assert REPORT.node_of_address("0000:c2:00.1") == NO_NUMA
    assert REPORT.node_of_address("strange") == NO_NUMA


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ([], "status.devices is []; it must be an object"),
        ({"resources": "x"}, "status.devices.resources is 'x'; it must be a list"),
        ({"resources": [3]}, "status.devices.resources[0] is 3; it must be an object"),
        (
            {"resources": [{"resource": "cpu"}]},
            "status.devices.resources[0].resource is 'cpu'; it must be the resource of a device",
        ),
        (
            {"resources": [{"resource": VF, "numaNode": 0, "total": 1, "free": 2}]},
            "status.devices.resources[0].free is 2; it must be a whole number from 0 to 1",
        ),
        (
            {"resources": [{"resource": VF, "numaNode": -2, "total": 1, "free": 1}]},
            "status.devices.resources[0].numaNode is -2; it must be a whole number from -1 to 99999",
        ),
        ({"pods": [{"uid": 5}]}, "status.devices.pods[0].uid is 5; it must be a string"),
        ({"pci": [{"name": "pci0000:c0"}]}, "status.devices.pci[0].numaNode is missing"),
    ],
)
def test_an_unreadable_field_is_named(document: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        read_device_report(document, "status.devices")
