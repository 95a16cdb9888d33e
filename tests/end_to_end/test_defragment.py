"""`kvplace defragment` with a real `serve`; only the agent of the node is played."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.control_plane.cluster import STRATEGIC_MERGE_PATCH, ControlPlane
from harness.control_plane.watching import wait_for
from harness.kvplace_cluster.installation import Installation
from harness.waiting import PATIENCE_S
from kvplace.core.cpuset import format_cpu_list
from kvplace.core.well_known_names import MOVABLE, PINNED, PLACE_AGAIN
from tests.cli.calls import COMMAND
from tests.end_to_end.pods_that_ask import (
    LEDGERS,
    MACHINE,
    agent_reports,
    bound,
    create,
    create_priority_classes,
    moving,
    nodes,
    revision_of,
)

NODE = "scattered"


@pytest.fixture(scope="module")
def plane(kubernetes_programs: Path) -> Iterator[ControlPlane]:
    with ControlPlane() as running:
        create_priority_classes(running)
        yield running


@pytest.fixture
def installed(plane: ControlPlane) -> Iterator[Installation]:
    with Installation(plane, replicas=1) as installation:
        installation.add_scheduler(installation.replicas[0])
        yield installation


def test_an_interrupted_command_completes_its_move_and_a_second_call_leaves_the_vm_in_peace(
    plane: ControlPlane, installed: Installation
) -> None:
    pods = f"/api/v1/namespaces/{plane.create_namespace('gathered')}/pods"
    with nodes(plane, installed, {NODE: MACHINE}):
        where = {}
        for number in range(4):
            create(plane, pods, f"vm-{number}", 4, "low", annotations={MOVABLE: "true"})
            where[f"vm-{number}"] = bound(plane, pods, f"vm-{number}")
        left = {placement.packages: name for name, placement in where.items()}
        for name in where.keys() - set(left.values()):
            plane.request("DELETE", f"{pods}/{name}")
        uids = {name: plane.request("GET", f"{pods}/{name}")["metadata"]["uid"] for name in left.values()}
        wait_for(plane, LEDGERS, NODE, lambda ledger: set(ledger["spec"]["claims"]) == set(uids.values()))
        agent_reports(plane, NODE, dict.fromkeys(uids.values(), 1))
        pinned = {"type": PINNED, "status": "True", "reason": "AsPlaced", "message": "revision 1"}
        for name in uids:
            wait_for(plane, pods, name, lambda pod: pod["status"].get("phase") == "Running")
            status = {"status": {"conditions": [pinned]}}
            plane.request("PATCH", f"{pods}/{name}/status", status, content_type=STRATEGIC_MERGE_PATCH)

        words = [*COMMAND, "defragment", "--kubeconfig", str(plane.kubeconfig)]
        program = subprocess.Popen(
            [*words, "--yes", "-o", "json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        ledger = wait_for(plane, LEDGERS, NODE, lambda ledger: moving(ledger) != [])
        (uid,) = moving(ledger)
        name = next(name for name in uids if uids[name] == uid)
        moved = wait_for(plane, pods, name, lambda pod: revision_of(pod) == 2)
        assert moved["metadata"]["annotations"][PLACE_AGAIN] == f"{uid}/1"
        program.send_signal(signal.SIGINT)
        agent_reports(plane, NODE, {**dict.fromkeys(uids.values(), 1), uid: 2})
        out, err = program.communicate(timeout=PATIENCE_S)
        assert program.returncode == 0, err
        assert "the present move is completed" in err
        assert "1 of 1 moves made" in err
        document = json.loads(out)
        (move,) = document["moves"]
        assert move["made"] is True
        assert (document["before"]["fittingVms"]["8"], document["after"]["fittingVms"]["8"]) == (0, 1)
        assert format_cpu_list(bound(plane, pods, name).owned) == move["to"]
        claims = plane.request("GET", f"{LEDGERS}/{NODE}")["spec"]["claims"]
        assert claims[uid]["owned"] == move["to"]
        assert PLACE_AGAIN not in plane.request("GET", f"{pods}/{name}")["metadata"]["annotations"]

        again = subprocess.run([*words, "--dry-run"], capture_output=True, text=True, check=True)
        assert "no move gains anything" in again.stdout
        assert "they got other cores lately: 1 VM" in again.stderr
