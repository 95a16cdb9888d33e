"""The log of `serve`: the story of a pod can be put together by its UID, and holds no secret."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.certificates import Certificates
from kvplace.core.errors import Conflict, KvplaceError
from kvplace.kube.api_cluster import ApiCluster
from kvplace.kube.session import Limits, open_session
from kvplace.service.listening import RenewedTls, TlsFiles
from kvplace.service.process import JsonLines
from tests.controller.replicas import asking_pod, replica
from tests.kube.api_stub import api_stub, broken, status
from tests.kube.faults import Operation
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import EIGHT

Line = dict[str, Any]


class Collected(logging.Handler):
    """Every line as it is written to stderr."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(JsonLines())
        self.lines: list[Line] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(self.format(record)))


@pytest.fixture
def log() -> Iterator[Collected]:
    """Collect what kvplace logs."""
    logger, handler = logging.getLogger("kvplace"), Collected()
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


def story_of(log: Collected, uid: str) -> list[tuple[str, int | None]]:
    """Join the lines about a pod: what happened, and in which attempt."""
    return [
        (line["msg"].partition(":")[0].partition(" CPUs")[0], line.get("attempt"))
        for line in log.lines
        if line.get("uid") == uid
    ]


async def test_the_lines_about_a_pod_are_joined_by_its_uid(log: Collected) -> None:
    cluster = FaultyCluster()
    cluster.create_node("n1", topology=EIGHT)
    pod, large = asking_pod(cluster, "vm", 4), asking_pod(cluster, "large", 64)
    async with replica(cluster) as one:
        await one.filter(pod)
        cluster.faults.fail(Operation.WRITE_LEDGER, Conflict("conflict with another writer"))
        assert await one.bind(pod, "n1") == ""
        for _ in range(3):
            await one.filter(large)
        assert await one.bind(large, "n1") != ""
        cluster.delete_pod("default", "vm", force=True)
        await one.until(lambda: not one.claims())
    assert story_of(log, pod.uid) == [
        ("the claim was not stored", None),
        ("bound to", 1),
        ("released", None),
    ]
    assert story_of(log, large.uid) == [("does not fit", 1), ("bind refused", 3)]
    about_pods = [line for line in log.lines if "uid" in line]
    assert {line["pod"] for line in about_pods} == {"default/vm", "default/large"}
    for line in log.lines:
        if "vm" in line["msg"] or "large" in line["msg"]:
            assert "uid" in line, line


async def test_a_refusal_is_logged_once_for_each_reason(log: Collected) -> None:
    cluster = FaultyCluster()
    cluster.create_node("n1", topology=EIGHT)
    pods = [asking_pod(cluster, name, 8) for name in ("first", "second")]
    async with replica(cluster, controller=False) as one:
        for pod in pods:
            await one.filter(pod)
            assert await one.bind(pod, "n1") == "" or pod is pods[1]
        for _ in range(5):
            await one.filter(pods[1])
    story = story_of(log, pods[1].uid)
    assert [msg for msg, _ in story].count("does not fit") == 1


async def test_no_token_and_no_key_is_logged_whatever_fails(
    log: Collected, certificates: Certificates, tmp_path: Path
) -> None:
    token, key = "the-token-of-serve", certificates.serve[1].read_text()
    everything = logging.getLogger()
    everything.addHandler(log)
    try:
        async with api_stub() as stub:
            for failure in (status(401, "expired"), status(403, "no"), status(500, "away"), broken(b"{")):
                stub.script = [failure] * 9
                session = await open_session(stub.kubeconfig(tmp_path, token=token), Limits(attempts=1))
                async with session:
                    with pytest.raises(KvplaceError) as error:
                        await ApiCluster(session).read_pod("a", "b")
                assert token not in str(error.value)
            assert f"Bearer {token}" in {request.headers["Authorization"] for request in stub.asked}
        tls = RenewedTls(TlsFiles(*certificates.serve, check_every_s=0.01))
        certificates.serve[0].write_text("half a file")
        assert not tls.renew()
    finally:
        everything.removeHandler(log)
    written = json.dumps(log.lines)
    assert log.lines
    assert token not in written
    assert not any(part in written for part in key.splitlines() if len(part) > 30)
