"""`kvplace place` on a machine with devices in its description."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvplace.core.node_topology import node_topology
from kvplace.machines.server_types import read_machine
from tests.cli.calls import Caller

MACHINE = read_machine("2x-epyc-9354")


@pytest.fixture
def describe(tmp_path: Path) -> Any:
    """Write the description of a machine of two NUMA nodes, and return its path."""

    def written(*devices: dict[str, Any], **status: Any) -> str:
        document = node_topology("node", MACHINE)
        if devices:
            document["spec"]["devices"] = list(devices)
        document["spec"] |= {key: value for key, value in status.items() if key == "topologyPolicy"}
        if "report" in status:
            document["status"] = {"devices": status["report"]}
        path = tmp_path / "node.json"
        path.write_text(json.dumps(document))
        return str(path)

    return written


def asked(
    kvplace: Caller, machine: str, *requests: dict[str, Any], keep: bool = False
) -> list[dict[str, Any]]:
    lines = "".join(json.dumps({"cpuSet": "one-numa", **one}) + "\n" for one in requests)
    called = kvplace("place", "--topology", machine, "-o", "json", *(["--keep"] if keep else []), stdin=lines)
    return [json.loads(line) for line in called.out.splitlines()]


REQUIRED = {"vcpus": 8, "devices": {"intel.com/vf": 1}, "deviceNuma": "required"}


def test_the_cores_are_beside_the_devices_of_the_description(kvplace: Caller, describe: Any) -> None:
    machine = describe({"resource": "intel.com/vf", "numaNode": 1, "count": 2})
    for mode in ("required", "preferred", "socket"):
        (answer,) = asked(kvplace, machine, {**REQUIRED, "deviceNuma": mode})
        assert answer["placement"]["numaNodes"] == [1]
    (answer,) = asked(kvplace, machine, {**REQUIRED, "deviceNuma": "off"})
    assert answer["placement"]["numaNodes"] == [0]


def test_a_device_of_an_unknown_numa_node_restricts_nothing(kvplace: Caller, describe: Any) -> None:
    (answer,) = asked(kvplace, describe({"resource": "intel.com/vf", "numaNode": -1, "count": 2}), REQUIRED)
    assert answer["placement"]["numaNodes"] == [0]


def test_a_refusal_names_the_numa_node_of_the_devices_and_the_shortfall(
    kvplace: Caller, describe: Any
) -> None:
    machine = describe({"resource": "intel.com/vf", "numaNode": 1, "count": 2})
    (answer,) = asked(kvplace, machine, {**REQUIRED, "free": "0-31"})
    assert answer["refusal"]["reason"] == "NoLocalDevices"
    assert answer["refusal"]["message"] == (
        "no 8 free CPUs on NUMA node 1, the only one with a free intel.com/vf; best 0"
    )
    assert answer["refusal"]["shortfall"]["missing"] == 8


def test_kept_vms_take_their_devices_along(kvplace: Caller, describe: Any) -> None:
    entries = [{"resource": "intel.com/vf", "numaNode": node, "count": 1} for node in (0, 1)]
    machine = describe(*entries, topologyPolicy="best-effort")
    answers = asked(kvplace, machine, REQUIRED, REQUIRED, keep=True)
    assert [answer["placement"]["numaNodes"] for answer in answers] == [[0], [1]]


def test_the_report_of_an_agent_counts_where_the_spec_names_no_devices(
    kvplace: Caller, describe: Any
) -> None:
    report = {
        "topologyPolicy": "best-effort",
        "resources": [
            {"resource": "intel.com/vf", "numaNode": 0, "total": 2, "free": 0},
            {"resource": "intel.com/vf", "numaNode": 1, "total": 2, "free": 1},
        ],
    }
    (answer,) = asked(kvplace, describe(report=report), REQUIRED)
    assert answer["placement"]["numaNodes"] == [1]


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ({"resource": "cpu", "numaNode": 0}, "spec.devices[0].resource"),
        ({"resource": "intel.com/vf", "numaNode": -2}, "numaNode"),
        (
            {"resource": "intel.com/vf", "numaNode": 7},
            "spec.devices[0].numaNode is 7; it must be -1 or a NUMA node of the machine: 0-1",
        ),
        ({"resource": "intel.com/vf", "numaNode": 0, "count": -1}, "count"),
        ({"resource": "intel.com/vf", "numaNode": 0, "number": 1}, "number"),
        ({"numaNode": 0}, "resource"),
    ],
)
def test_an_invalid_device_is_refused_with_its_field(
    kvplace: Caller, describe: Any, entry: dict[str, Any], named: str
) -> None:
    called = kvplace("place", "--topology", describe(entry), stdin='{"vcpus": 1}\n')
    assert called.code != 0
    assert named in called.err
    assert "Traceback" not in called.err
