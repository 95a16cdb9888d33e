"""An unmodified kube-scheduler works with the shipped configuration, rights and certificates."""

from __future__ import annotations

import secrets
import socket
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from harness.control_plane.cluster import ControlPlane, Scheduler
from harness.control_plane.watching import watch_one_object
from harness.waiting import PATIENCE_S
from tests.manifests.asked_extender import AskedExtender
from tests.manifests.conftest import MANIFESTS

Json = dict[str, Any]
MARKER = {"kvplace.io/vm": "0"}


@dataclass(frozen=True, slots=True)
class Running:
    """A scheduler, and the extender that it asks."""

    scheduler: Scheduler
    extender: AskedExtender


@pytest.fixture(scope="module")
def certificates(manifests: Path) -> Path:
    return manifests / "own-certificates" / "certificates"


@pytest.fixture(scope="module")
def running(cluster: ControlPlane, certificates: Path) -> Iterator[Running]:
    """Start kube-scheduler with the shipped configuration; only paths and addresses differ."""
    configuration = yaml.safe_load((MANIFESTS / "scheduler" / "configuration.yaml").read_text())
    (extender,) = configuration["extenders"]
    with AskedExtender(cluster, certificates) as asked:
        address = urlsplit(extender["urlPrefix"])
        extender["urlPrefix"] = f"https://127.0.0.1:{asked.port}{address.path}"
        extender["tlsConfig"] = {
            "serverName": address.hostname,
            "caFile": str(certificates / "ca.crt"),
            "certFile": str(certificates / "client" / "tls.crt"),
            "keyFile": str(certificates / "client" / "tls.key"),
        }
        account = cluster.service_account_kubeconfig("kvplace-system", "kvplace-scheduler")
        # Its own TLS, listener and back-off are the test cluster's affair; leader election stays as shipped.
        scheduler = cluster.add_scheduler(configuration, kubeconfig=account)
        yield Running(scheduler, asked)
        scheduler.stop()


@pytest.fixture(scope="module")
def node(cluster: ControlPlane) -> Iterator[str]:
    name = f"worker-{secrets.token_hex(4)}"
    room = {"cpu": "8", "memory": "16Gi", "pods": "110"}
    cluster.request(
        "POST",
        "/api/v1/nodes",
        {"metadata": {"name": name}, "status": {"capacity": room, "allocatable": room}},
    )
    yield name
    cluster.request("DELETE", f"/api/v1/nodes/{name}")


@pytest.fixture
def pods(cluster: ControlPlane) -> Iterator[str]:
    """Give the path of the pods of a namespace of the test's own."""
    namespace = cluster.create_namespace(f"test-{secrets.token_hex(4)}")
    yield f"/api/v1/namespaces/{namespace}/pods"
    cluster.remove_namespace(namespace)


def pod(name: str, *, cpu: str = "1", marker: bool, **spec: Any) -> Json:
    limits = {"cpu": cpu, **(MARKER if marker else {})}
    container = {"name": "main", "image": "example.test/main", "resources": {"limits": limits}}
    return {
        "metadata": {"name": name},
        "spec": {"schedulerName": "kvplace-scheduler", "containers": [container], **spec},
    }


def wait_for_condition(cluster: ControlPlane, pods: str, name: str) -> Json:
    """Wait until the scheduler has reported something of a pod, and return its PodScheduled condition."""
    with watch_one_object(cluster, pods, name, "0") as events:
        return next(
            condition
            for event in events
            for condition in event["object"].get("status", {}).get("conditions", [])
            if condition["type"] == "PodScheduled"
        )


def test_it_leads_with_the_lease_that_its_role_allows(cluster: ControlPlane, running: Running) -> None:
    leases = "/apis/coordination.k8s.io/v1/namespaces/kvplace-system/leases"
    with watch_one_object(cluster, leases, "kvplace-scheduler", "0") as events:
        assert any(event["object"]["spec"].get("holderIdentity") for event in events)
    assert running.scheduler.process.is_running


def test_a_pod_with_a_request_is_filtered_and_bound_by_the_extender_over_mutual_tls(
    cluster: ControlPlane, running: Running, node: str, pods: str
) -> None:
    cluster.request("POST", pods, pod("plain", marker=False))
    cluster.request("POST", pods, pod("vm", marker=True))
    for name in ("plain", "vm"):
        assert wait_for_condition(cluster, pods, name)["status"] == "True"

    bound = cluster.request("GET", f"{pods}/vm")
    assert bound["spec"]["nodeName"] == node
    assert bound["metadata"]["uid"] in bound["metadata"]["annotations"]["kvplace.io/placement"]

    first, second = (
        running.extender.calls.get(timeout=PATIENCE_S),
        running.extender.calls.get(timeout=PATIENCE_S),
    )
    assert (first.verb, second.verb) == ("/v1/filter", "/v1/bind")
    assert first.body["Pod"]["metadata"]["name"] == "vm"
    assert (first.body["Nodes"], first.body["NodeNames"]) == (None, [node])
    assert second.body["Node"] == node
    assert {first.client, second.client} == {"kvplace-scheduler"}
    assert running.extender.calls.empty(), "a pod that asks for nothing went to the extender"


def test_no_pod_is_evicted_for_a_vm_unless_the_extender_reports_it(
    cluster: ControlPlane, running: Running, node: str, pods: str
) -> None:
    for name, value in (("unimportant", 1), ("important", 1000)):
        cluster.request(
            "POST",
            "/apis/scheduling.k8s.io/v1/priorityclasses",
            {"metadata": {"name": f"{name}-in-tests"}, "value": value},
        )
    cluster.request(
        "POST", pods, pod("victim", cpu="5", marker=False, priorityClassName="unimportant-in-tests")
    )
    assert wait_for_condition(cluster, pods, "victim")["status"] == "True"
    cluster.request("POST", pods, pod("vm", cpu="6", marker=True, priorityClassName="important-in-tests"))

    refused = wait_for_condition(cluster, pods, "vm")

    assert (refused["status"], refused["reason"]) == ("False", "Unschedulable")
    assert "Insufficient cpu" in refused["message"]
    asked = running.extender.calls.get(timeout=PATIENCE_S)
    victim = cluster.request("GET", f"{pods}/victim")["metadata"]["uid"]
    assert asked.verb == "/v1/preempt"
    assert asked.body["NodeNameToMetaVictims"] == {node: {"Pods": [{"UID": victim}], "NumPDBViolations": 0}}
    assert "no candidate node for preemption" in refused["message"]
    assert "deletionTimestamp" not in cluster.request("GET", f"{pods}/victim")["metadata"]
    assert cluster.request("GET", f"{pods}/victim")["spec"]["nodeName"] == node


def test_no_request_of_it_was_forbidden(running: Running) -> None:
    log = running.scheduler.process.log.read_text()
    assert "Successfully acquired lease" in log
    # How RBAC words a refusal.
    assert "system:serviceaccount:kvplace-system:kvplace-scheduler" not in log


def test_a_client_without_a_certificate_of_our_ca_is_refused(running: Running, certificates: Path) -> None:
    context = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
    with (
        socket.create_connection(("127.0.0.1", running.extender.port), timeout=PATIENCE_S) as plain,
        context.wrap_socket(plain, server_hostname="kvplace-extender.kvplace-system.svc") as connection,
        pytest.raises(ssl.SSLError, match="certificate required"),
    ):
        connection.recv(1)


def test_certificates_are_renewed_under_the_ca_that_is_there(manifests: Path, certificates: Path) -> None:
    before = {path: path.read_bytes() for path in certificates.rglob("*.crt")}
    subprocess.run([manifests / "own-certificates" / "make-certificates"], check=True, capture_output=True)
    changed = {path.relative_to(certificates) for path in before if path.read_bytes() != before[path]}
    assert changed == {Path("serve/tls.crt"), Path("client/tls.crt")}
    assert {path.stat().st_mode & 0o077 for path in certificates.rglob("*.key")} == {0}
