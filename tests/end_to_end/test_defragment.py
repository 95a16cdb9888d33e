"""`kvplace defragment` with a real `serve`; only the agent of the node is played."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.control_plane.cluster import STRATEGIC_MERGE_PATCH, ControlPlane
from harness.control_plane.watching import wait_for
from harness.kvplace_cluster.installation import Installation
from harness.waiting import PATIENCE_S, wait_until
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

NODES = ("scattered-a", "scattered-b")


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


def has_claims(uids: set[str], ledger: dict[str, Any]) -> bool:
    return set(ledger["spec"]["claims"]) == uids


def moving_vm(plane: ControlPlane) -> tuple[str, str]:
    """Wait for the first VM that gets other cores; return its node and its UID."""
    found: list[tuple[str, str]] = []

    def moves() -> bool:
        ledgers = plane.request("GET", LEDGERS)["items"]
        found.extend((one["metadata"]["name"], uid) for one in ledgers for uid in moving(one))
        return bool(found)

    wait_until(moves, lambda: "no VM has begun to move")
    return found[0]


def test_an_interrupted_command_completes_its_move_and_a_second_call_continues_and_leaves_that_vm_in_peace(
    plane: ControlPlane, installed: Installation
) -> None:
    pods = f"/api/v1/namespaces/{plane.create_namespace('gathered')}/pods"
    with nodes(plane, installed, dict.fromkeys(NODES, MACHINE)):
        where: dict[tuple[str, tuple[int, ...]], list[str]] = {}
        for number in range(8):
            create(plane, pods, f"vm-{number}", 4, "low", annotations={MOVABLE: "true"})
            packages = bound(plane, pods, f"vm-{number}").packages
            node = plane.request("GET", f"{pods}/vm-{number}")["spec"]["nodeName"]
            where.setdefault((node, packages), []).append(f"vm-{number}")
        uids: dict[str, dict[str, str]] = {node: {} for node in NODES}
        for (node, _), (stays, ends) in where.items():
            plane.request("DELETE", f"{pods}/{ends}")
            uids[node][plane.request("GET", f"{pods}/{stays}")["metadata"]["uid"]] = stays
        pinned = {"type": PINNED, "status": "True", "reason": "AsPlaced", "message": "revision 1"}
        for node, vms in uids.items():
            wait_for(plane, LEDGERS, node, partial(has_claims, set(vms)))
            agent_reports(plane, node, dict.fromkeys(vms, 1))
            for name in vms.values():
                wait_for(plane, pods, name, lambda pod: pod["status"].get("phase") == "Running")
                status = {"status": {"conditions": [pinned]}}
                plane.request("PATCH", f"{pods}/{name}/status", status, content_type=STRATEGIC_MERGE_PATCH)

        words = [*COMMAND, "defragment", "--kubeconfig", str(plane.kubeconfig)]
        program = subprocess.Popen(
            [*words, "--yes", "-o", "json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        node, uid = moving_vm(plane)
        name = uids[node][uid]
        moved = wait_for(plane, pods, name, lambda pod: revision_of(pod) == 2)
        assert moved["metadata"]["annotations"][PLACE_AGAIN] == f"{uid}/1"
        program.send_signal(signal.SIGINT)
        agent_reports(plane, node, {**dict.fromkeys(uids[node], 1), uid: 2})
        out, err = program.communicate(timeout=PATIENCE_S)
        assert program.returncode == 130, err
        assert "the present move is completed" in err
        document = json.loads(out)
        move, other = document["moves"]
        assert f"1 of 2 moves made; not begun: {other['vm']}; call defragment again" in err
        assert document["interrupted"].startswith("the command was interrupted")
        assert move["made"] is True
        assert "made" not in other
        assert (document["before"]["fittingVms"]["8"], document["after"]["fittingVms"]["8"]) == (0, 2)
        assert format_cpu_list(bound(plane, pods, name).owned) == move["to"]
        claims = plane.request("GET", f"{LEDGERS}/{node}")["spec"]["claims"]
        assert claims[uid]["owned"] == move["to"]
        assert PLACE_AGAIN not in plane.request("GET", f"{pods}/{name}")["metadata"]["annotations"]

        again = subprocess.run(
            [*words, "--dry-run", "-o", "json"], capture_output=True, text=True, check=True
        )
        document = json.loads(again.stdout)
        assert [one["vm"] for one in document["moves"]] == [other["vm"]]
        assert "interrupted" not in document
        assert "they got other cores lately: 1 VM" in again.stderr
