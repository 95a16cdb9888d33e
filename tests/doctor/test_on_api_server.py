"""A healthy installation is well; each fault that is put into it is named with its fix."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from harness.certificates import Authority
from harness.waiting import PATIENCE_S, wait_until
from kvplace import __version__
from kvplace.core.errors import ExitCode
from kvplace.doctor.examination import Examination, examine
from kvplace.doctor.installation import Finding, Severity
from kvplace.doctor.reading import read_installation
from kvplace.kube.api_cluster import ApiCluster
from kvplace.kube.credentials import CredentialOptions
from kvplace.kube.object_client import ObjectClient
from kvplace.kube.session import open_session
from tests.cli.calls import call_process
from tests.docs.blocks import block
from tests.doctor.conftest import Installed

ADMISSION = "/apis/admissionregistration.k8s.io/v1"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
SYSTEM = "/api/v1/namespaces/kvplace-system"
DEPLOYMENTS = "/apis/apps/v1/namespaces/kvplace-system/deployments"
LEDGERS = "/apis/kvplace.io/v1alpha1/nodeledgers"
KUBEVIRT = "/apis/kubevirt.io/v1/namespaces/kubevirt/kubevirts/kubevirt"


def examined(kubeconfig: Path, **options: Any) -> Examination:
    async def read() -> Examination:
        async with await open_session(CredentialOptions(str(kubeconfig), **options)) as session:
            found = await read_installation(
                ObjectClient(session),
                ApiCluster(session),
                namespace="default",
                client_version=__version__,
                now=lambda: datetime.now(UTC),
            )
        return examine(found)

    return asyncio.run(read())


def examined_when(installed: Installed, is_wanted: Callable[[Examination], bool]) -> Examination:
    """Check until it is as wanted: the API server takes up webhooks and rights a moment after they change."""
    ends = time.monotonic() + PATIENCE_S
    while True:
        found = examined(installed.plane.kubeconfig)
        if is_wanted(found) or time.monotonic() >= ends:
            return found


def findings_of(found: Examination) -> list[Finding]:
    return [finding for one in found.results for finding in one.findings]


def test_all_is_well(installed: Installed) -> None:
    assert findings_of(examined_when(installed, lambda found: found.level is None)) == []
    called = call_process("doctor", "--kubeconfig", str(installed.plane.kubeconfig))
    assert (called.out.splitlines()[-1], called.err) == ("all is well", "")
    assert called.code == ExitCode.DONE


def test_the_document_names_every_check(installed: Installed) -> None:
    examined_when(installed, lambda found: found.level is None)
    called = call_process("doctor", "--kubeconfig", str(installed.plane.kubeconfig), "-o", "json")
    document = json.loads(called.out)
    assert document["ok"] is True
    assert {one["result"] for one in document["checks"]} == {"ok"}


@contextlib.contextmanager
def without(installed: Installed, path: str) -> Iterator[None]:
    """Delete an object while the block runs."""
    kept = installed.read(path)
    installed.delete(path)
    yield
    installed.apply(kept)


@contextlib.contextmanager
def changed(installed: Installed, path: str, change: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Change an object while the block runs."""
    kept, edited = installed.read(path), installed.read(path)
    change(edited)
    for content in (edited, kept):
        current = installed.plane.request("GET", path)
        content["metadata"]["resourceVersion"] = current["metadata"]["resourceVersion"]
        installed.plane.request("PUT", path, content)
        if content is edited:
            yield


@contextlib.contextmanager
def with_object(
    installed: Installed, collection: str, content: dict[str, Any], **status: Any
) -> Iterator[None]:
    """Create an object while the block runs."""
    path = f"{collection}/{content['metadata']['name']}"
    installed.plane.request("POST", collection, content)
    if status:
        installed.patch(f"{path}/status", {"status": status})
    yield
    installed.delete(f"{path}?gracePeriodSeconds=0")


def _no_policy(installed: Installed) -> Any:
    return without(installed, f"{ADMISSION}/validatingadmissionpolicies/other-pods.kvplace.io")


def _no_binding(installed: Installed) -> Any:
    return without(installed, f"{ADMISSION}/validatingadmissionpolicybindings/kvplace-pod-results")


def _no_webhook(installed: Installed) -> Any:
    return without(installed, f"{ADMISSION}/mutatingwebhookconfigurations/vms.kvplace.io")


def _other_ca(installed: Installed) -> Any:
    folder = installed.plane.folder / "another"
    folder.mkdir(exist_ok=True)
    other = Authority(folder, "another").file.read_bytes()

    def change(configuration: dict[str, Any]) -> None:
        for webhook in configuration["webhooks"]:
            webhook["clientConfig"]["caBundle"] = base64.b64encode(other).decode()

    return changed(installed, f"{ADMISSION}/mutatingwebhookconfigurations/vms.kvplace.io", change)


def _no_right(installed: Installed) -> Any:
    return without(installed, f"{RBAC}/clusterrolebindings/kvplace-serve")


def _no_secret(installed: Installed) -> Any:
    return without(installed, f"{SYSTEM}/secrets/kvplace-serve-tls")


@contextlib.contextmanager
def _no_serve(installed: Installed) -> Iterator[None]:
    with without(installed, f"{DEPLOYMENTS}/kvplace-serve"):
        yield
    installed.ready()


def _no_extender(installed: Installed) -> Any:
    (one,) = installed.plane.request(
        "GET", f"{SYSTEM}/configmaps?labelSelector=app.kubernetes.io/component=scheduler"
    )["items"]

    def change(configuration: dict[str, Any]) -> None:
        text = configuration["data"]["configuration.yaml"]
        configuration["data"]["configuration.yaml"] = text.replace("kvplace.io/vm", "example.com/vm")

    return changed(installed, f"{SYSTEM}/configmaps/{one['metadata']['name']}", change)


@contextlib.contextmanager
def _not_ready(installed: Installed) -> Iterator[None]:
    installed.workload("deployments", "kvplace-system", "kvplace-serve", replicas=2, readyReplicas=0)
    yield
    installed.ready()


@contextlib.contextmanager
def _agent_away(installed: Installed) -> Iterator[None]:
    status = {"desiredNumberScheduled": 2, "currentNumberScheduled": 2, "numberMisscheduled": 0}
    installed.workload("daemonsets", "kvplace-agent", "kvplace-agent", **status, numberReady=1)
    yield
    installed.ready()


def _second(installed: Installed) -> Any:
    other = installed.read(f"{DEPLOYMENTS}/kvplace-serve")
    other["metadata"] |= {"namespace": "default", "name": "kvplace-too"}
    other.pop("status")
    return with_object(
        installed, "/apis/apps/v1/namespaces/default/deployments", other, replicas=2, readyReplicas=2
    )


def _no_gate(installed: Installed) -> Any:
    def change(kubevirt: dict[str, Any]) -> None:
        kubevirt["spec"]["configuration"]["developerConfiguration"]["featureGates"] = []

    return changed(installed, KUBEVIRT, change)


@contextlib.contextmanager
def _not_described(installed: Installed) -> Iterator[None]:
    installed.add_node("worker-2")
    yield
    installed.delete("/api/v1/nodes/worker-2")


@contextlib.contextmanager
def _static_kubelet(installed: Installed) -> Iterator[None]:
    installed.describe("worker-1", kubeletCpus="4-5")
    yield
    installed.describe("worker-1", kubeletCpus="")


def _ledger(node: str, owners: dict[str, str], **claims: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "kvplace.io/v1alpha1",
        "kind": "NodeLedger",
        "metadata": {"name": node},
        "spec": {"owners": owners, "claims": claims},
    }


OLD = {"namespace": "default", "pod": "lost", "policy": "exclusive", "since": "2020-01-01T00:00:00Z"}


def _gone_node(installed: Installed) -> Any:
    return with_object(installed, LEDGERS, _ledger("worker-9", {}))


def _unlike_owners(installed: Installed) -> Any:
    claim = OLD | {"cpus": "2-3", "owned": "2-3", "since": "2090-01-01T00:00:00Z"}
    return with_object(installed, LEDGERS, _ledger("worker-3", {"4": "a"}, a=claim))


@contextlib.contextmanager
def _odd_ledger(installed: Installed) -> Iterator[None]:
    installed.add_node("worker-3")
    installed.describe("worker-3")
    with _unlike_owners(installed):
        yield
        # The policy protects a ledger that has owners.
        installed.patch(f"{LEDGERS}/worker-3", {"spec": {"owners": {"4": None}, "claims": {"a": None}}})
    installed.delete("/apis/kvplace.io/v1alpha1/nodetopologies/worker-3")
    installed.delete("/api/v1/nodes/worker-3")


def _no_pull(installed: Installed) -> Any:
    labels = {"app.kubernetes.io/name": "kvplace", "app.kubernetes.io/component": "serve"}
    pod = {
        "metadata": {"name": "serve-1", "labels": labels},
        "spec": {"containers": [{"name": "serve", "image": "registry.example/kvplace/serve:9"}]},
    }
    waiting = {"reason": "ImagePullBackOff", "message": "not found"}
    status = {
        "name": "serve",
        "image": "registry.example/kvplace/serve:9",
        "imageID": "",
        "ready": False,
        "restartCount": 0,
        "state": {"waiting": waiting},
    }
    return with_object(installed, "/api/v1/namespaces/default/pods", pod, containerStatuses=[status])


FAULTS: dict[str, tuple[Callable[[Installed], Any], str, str]] = {
    "no policy": (_no_policy, "ValidatingAdmissionPolicy other-pods.kvplace.io", "it is missing"),
    "no binding": (_no_binding, "ValidatingAdmissionPolicy kvplace-pod-results", "no binding"),
    "no webhook": (_no_webhook, "webhook pod.kvplace.io", "accepted a trial pod"),
    "webhook gone": (_no_webhook, "webhook vmi.kvplace.io", "not registered"),
    "another CA": (_other_ca, "webhook pod.kvplace.io", "cannot call it"),
    "no right": (_no_right, "system:serviceaccount:kvplace-system:kvplace-serve", "lacks the rights to"),
    "no certificates": (_no_secret, "Secret kvplace-system/kvplace-serve-tls", "it is missing, and pods of"),
    "half of it": (
        _no_serve,
        "kvplace",
        "only a part is installed (kinds, policies, webhooks); missing:",
    ),
    "no extender": (_no_extender, "ConfigMap kvplace-system/", "does not call kvplace"),
    "serve not ready": (_not_ready, "Deployment kvplace-system/kvplace-serve", "none of its 2 replicas"),
    "agent away": (_agent_away, "DaemonSet kvplace-agent/kvplace-agent", "1 of 2 agents ready"),
    "two installations": (_second, "Deployments of serve", "there are 2 installations"),
    "no gate": (_no_gate, "KubeVirt kubevirt/kubevirt", "feature gate Sidecar is off"),
    "not described": (_not_described, "1 node", "nothing describes worker-2, so"),
    "static kubelet": (_static_kubelet, "node worker-1", "holds worker-1: CPUs 4-5;"),
    "gone node": (_gone_node, "NodeLedger worker-9", "its node does not exist any more"),
    "odd ledger": (_odd_ledger, "NodeLedger worker-3", "owns CPUs 4, which its claim does not name"),
    "no image": (_no_pull, "Pod default/serve-1, container serve", "cannot be pulled (ImagePullBackOff"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_fix(installed: Installed, name: str) -> None:
    inject, about, problem = FAULTS[name]

    def is_named(found: Examination) -> bool:
        return any(one.about.startswith(about) and problem in one.problem for one in findings_of(found))

    with inject(installed):
        found = examined_when(installed, is_named)
    assert is_named(found), [(one.about, one.problem) for one in findings_of(found)]
    assert all(one.fix for one in findings_of(found))


def test_the_page_shows_the_report_about_a_missing_agent_and_a_feature_gate(installed: Installed) -> None:
    shown = block("docs/inspect.md", "agents ")
    with _agent_away(installed), _no_gate(installed):
        examined_when(installed, lambda found: len(findings_of(found)) > 1)
        called = call_process("doctor", "--kubeconfig", str(installed.plane.kubeconfig))
    assert called.out == shown
    assert called.code == ExitCode.FAILED


def test_after_all_that_it_is_well_again(installed: Installed) -> None:
    assert findings_of(examined_when(installed, lambda found: found.level is None)) == []


def test_objects_that_the_caller_may_not_read_are_reported_and_not_taken_for_missing(
    installed: Installed,
) -> None:
    found = examined(installed.plane.kubeconfig, user="eve")
    assert found.level is Severity.UNCHECKED
    assert {finding.level for one in found.results for finding in one.findings} == {Severity.UNCHECKED}
    called = call_process("doctor", "--kubeconfig", str(installed.plane.kubeconfig), "--as", "eve")
    assert called.code == ExitCode.PARTLY_DONE
    assert "you may not list deployments" in called.out


def test_version_names_the_releases_of_client_and_server(installed: Installed) -> None:
    chosen = ("--kubeconfig", str(installed.plane.kubeconfig))
    releases = json.loads(call_process("version", *chosen, "-o", "json").out)
    assert {releases[name] for name in ("client", "serve", "agent")} == {__version__}
    assert releases["Kubernetes"].startswith("v1.")
    called = call_process("version", "--client")
    assert called.out.split() == ["client", __version__]
    nowhere = call_process("version", "--kubeconfig", "/nowhere")
    assert nowhere.code == ExitCode.USAGE
    assert __version__ in nowhere.err


def test_version_prints_the_known_versions_and_names_the_missing_rights(installed: Installed) -> None:
    called = call_process("version", "--kubeconfig", str(installed.plane.kubeconfig), "--as", "eve")
    assert called.code == ExitCode.DONE
    assert [line.split()[0] for line in called.out.splitlines()] == ["client", "Kubernetes"]
    ours, kubevirt = called.err.splitlines()
    assert ours.startswith("kvplace: no release of serve and agent is known: you may not list pods (")
    assert "the ClusterRole kvplace-viewer grants this right" in ours
    assert kubevirt.startswith("kvplace: no release of KubeVirt is known: you may not list kubevirts (")


def test_version_needs_no_more_than_the_rights_of_a_viewer_to_name_programs_that_run(
    installed: Installed,
) -> None:
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "vera-views"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "kvplace-viewer"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "vera"}],
    }
    labels = {"app.kubernetes.io/name": "kvplace", "app.kubernetes.io/component": "serve"}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "serve-of-vera", "namespace": "default", "labels": labels},
        "spec": {"containers": [{"name": "serve", "image": "registry.example/kvplace/serve:7.8.9"}]},
    }
    installed.apply(binding, pod)
    try:
        chosen = ("--kubeconfig", str(installed.plane.kubeconfig), "--as", "vera")

        def serve() -> str:
            """The release of `serve`; empty until the API server has seen the binding."""
            return str(json.loads(call_process("version", *chosen, "-o", "json").out).get("serve", ""))

        wait_until(lambda: serve() == "7.8.9", lambda: f"serve has release {serve()!r}")
    finally:
        installed.delete(f"{RBAC}/clusterrolebindings/vera-views")
        installed.delete("/api/v1/namespaces/default/pods/serve-of-vera?gracePeriodSeconds=0")
