"""Two replicas and two unmodified kube-schedulers: the room that a killed replica has made is kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.control_plane.cluster import ControlPlane
from harness.control_plane.watching import wait_for
from harness.kvplace_cluster.installation import Installation, Replica
from kvplace.core.cpuset import parse_cpu_list
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
    told,
)


@pytest.fixture
def plane(kubernetes_programs: Path) -> Iterator[ControlPlane]:
    with ControlPlane() as running:
        create_priority_classes(running)
        yield running


@pytest.fixture
def installed(plane: ControlPlane) -> Iterator[Installation]:
    """A replica that makes room and one that does not, which admits pods; each has a kube-scheduler."""
    certificate = plane.issue_certificate("kvplace-serve")

    def start(plane: ControlPlane, number: int) -> Replica:
        return Replica(plane, number, certificate, flags=["--make-room=automatic"] if number == 0 else [])

    with Installation(
        plane, replicas=2, start=start, admission=lambda replicas: replicas[1].admission_url
    ) as installation:
        for replica in installation.replicas:
            installation.add_scheduler(replica)
        yield installation
        assert [line for replica in installation.replicas for line in replica.denials()] == []


def test_the_other_replica_binds_the_vm_there_and_no_other_client(
    plane: ControlPlane, installed: Installation
) -> None:
    pods = f"/api/v1/namespaces/{plane.create_namespace('reserved')}/pods"
    with nodes(plane, installed, {"scattered": MACHINE}):
        where = {}
        for number in range(4):
            name = f"vm-{number}"
            create(plane, pods, name, 4, "low", annotations={"kvplace.io/movable": "true"})
            where[name] = bound(plane, pods, name)
        uids = {name: plane.request("GET", f"{pods}/{name}")["metadata"]["uid"] for name in where}
        stays = {placement.packages: name for name, placement in where.items()}
        for name in where.keys() - set(stays.values()):
            plane.request("DELETE", f"{pods}/{name}")
        revisions = {uids[name]: 1 for name in stays.values()}
        # Before an agent reports: serve would wait for its report about the deleted pods.
        wait_for(plane, LEDGERS, "scattered", lambda ledger: set(ledger["spec"]["claims"]) == set(revisions))
        agent_reports(plane, "scattered", revisions)

        create(plane, pods, "waits", 8, "low")
        waiting = plane.request("GET", f"{pods}/waits")["metadata"]["uid"]
        ledger = wait_for(plane, LEDGERS, "scattered", lambda ledger: moving(ledger) != [])
        (mover,) = moving(ledger)
        name = next(name for name, uid in uids.items() if uid == mover)
        kept = ledger["spec"]["claims"][waiting]
        reserved = parse_cpu_list(kept["reserved"]["owned"])
        assert parse_cpu_list(kept["owned"]) == reserved & ~where[name].owned
        wait_for(plane, pods, name, lambda pod: revision_of(pod) == 2)
        installed.replicas[0].process.kill()

        create(plane, pods, "other", 4, "low")
        told(plane, pods, "other", "no socket with 4 free CPUs")
        agent_reports(plane, "scattered", {**revisions, mover: 2})
        assert bound(plane, pods, "waits").owned == reserved
        claim = plane.request("GET", f"{LEDGERS}/scattered")["spec"]["claims"][waiting]
        assert "reserved" not in claim
        assert not plane.request("GET", f"{pods}/other")["spec"].get("nodeName")
