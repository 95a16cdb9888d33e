"""An installation on a real API server that is well; tests break it and repair it again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml

from harness.control_plane.cluster import MERGE_PATCH, ControlPlane, Json
from harness.kvplace_cluster.installation import MANIFESTS, Installation
from harness.kvplace_cluster.machines import node_topology, two_socket_machine
from kvplace.core.cpuset import mask_of

_KUBEVIRT = ("kubevirts", "virtualmachineinstances")
_TOPOLOGIES = "/apis/kvplace.io/v1alpha1/nodetopologies"
_MACHINE = replace(two_socket_machine(), reserved=mask_of({0, 16, 8, 24}))
"""With one core of each socket reserved."""


class Installed:
    """The installation, and the ways to break it."""

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane

    def apply(self, *objects: Json, manager: str = "kubectl") -> None:
        text = "\n---\n".join(json.dumps(one) for one in objects)
        flags = ("--server-side", "--force-conflicts", f"--field-manager={manager}")
        self.plane.kubectl("apply", *flags, "-f", "-", stdin=text)

    def read(self, path: str) -> Json:
        """Read an object as it can be applied again."""
        found = self.plane.request("GET", path)
        for key in ("uid", "resourceVersion", "managedFields", "creationTimestamp", "generation"):
            found["metadata"].pop(key, None)
        return found

    def patch(self, path: str, change: Json) -> None:
        self.plane.request("PATCH", path, change, content_type=MERGE_PATCH)

    def workload(self, kind: str, namespace: str, name: str, **status: int) -> None:
        """Play the controller of a Deployment or DaemonSet."""
        path = f"/apis/apps/v1/namespaces/{namespace}/{kind}/{name}/status"
        self.patch(path, {"status": status})

    def ready(self) -> None:
        for name in ("kvplace-serve", "kvplace-scheduler"):
            self.workload("deployments", "kvplace-system", name, replicas=2, readyReplicas=2)
        self.workload(
            "daemonsets",
            "kvplace-agent",
            "kvplace-agent",
            desiredNumberScheduled=1,
            currentNumberScheduled=1,
            numberMisscheduled=0,
            numberReady=1,
        )

    def add_node(self, name: str, **spec: object) -> None:
        labels = {"kubevirt.io/schedulable": "true"}
        self.plane.request(
            "POST", "/api/v1/nodes", {"metadata": {"name": name, "labels": labels}, "spec": spec}
        )
        conditions = [{"type": "Ready", "status": "True"}]
        self.patch(f"/api/v1/nodes/{name}/status", {"status": {"conditions": conditions}})

    def describe(self, name: str, **status: object) -> None:
        """Describe a node as its agent does."""
        self.apply(node_topology(name, _MACHINE), manager="kvplace-agent")
        self.patch(f"{_TOPOLOGIES}/{name}/status", {"status": {"enforcement": "nri", **status}})

    def delete(self, path: str) -> None:
        self.plane.request("DELETE", path)


@pytest.fixture(scope="package")
def installed(kubernetes_programs: Path, kubevirt_crds: dict[str, Json]) -> Iterator[Installed]:
    """Install kvplace; `serve` runs as a process, and the statuses of what would run as pods are played."""
    assert kubernetes_programs.is_dir()
    with ControlPlane() as plane:
        for kind in _KUBEVIRT:
            crd = kubevirt_crds[f"{kind}.kubevirt.io"]
            plane.request("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
        plane.wait_for_crds(*(f"{kind}.kubevirt.io" for kind in _KUBEVIRT))
        made = Installed(plane)
        with Installation(plane):
            for folder in ("base", "scheduler", "agent"):
                text = plane.kubectl("kustomize", str(MANIFESTS / folder))
                documents = [one for one in yaml.load_all(text, yaml.CSafeLoader) if one]
                made.apply(*(one for one in documents if "WebhookConfiguration" not in one["kind"]))
            for name in ("kvplace-serve-tls", "kvplace-scheduler-client"):
                secret = {"metadata": {"name": name}, "stringData": {"tls.key": "unseen"}}
                plane.request("POST", "/api/v1/namespaces/kvplace-system/secrets", secret)
            made.ready()
            made.add_node("worker-1")
            made.describe("worker-1")
            plane.create_namespace("kubevirt")
            kubevirts = "/apis/kubevirt.io/v1/namespaces/kubevirt/kubevirts"
            gates = {"developerConfiguration": {"featureGates": ["Sidecar"]}}
            plane.request(
                "POST",
                kubevirts,
                {
                    "apiVersion": "kubevirt.io/v1",
                    "kind": "KubeVirt",
                    "metadata": {"name": "kubevirt"},
                    "spec": {"configuration": gates},
                },
            )
            soon = (datetime.now(UTC) + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%S.000000Z")
            plane.request(
                "POST",
                "/apis/coordination.k8s.io/v1/namespaces/kvplace-system/leases",
                {"metadata": {"name": "kvplace-scheduler"}, "spec": {"renewTime": soon}},
            )
            yield made
