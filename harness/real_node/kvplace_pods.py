"""kvplace on real nodes as an operator installs it: pods of its manifests and images.

`manifests/default` is applied with an overlay that says what an operator's overlay
says: image tags and replicas. Two things are due to these nodes: Services have fixed addresses, which the
scheduler's pods know without DNS, and kvplace's own pods request no CPU, because a node that is this machine
has none to spare beside a VM.
"""

from __future__ import annotations

import json
import shutil
from ipaddress import IPv4Network
from typing import Any

from harness.control_plane.cluster import ControlPlane
from harness.control_plane.watching import wait_for
from harness.kvplace_cluster.installation import MANIFESTS, NAMESPACE
from harness.node_programs.small_images import kube_scheduler

Json = dict[str, Any]

_SCHEDULER = "kvplace-scheduler"
_SERVE = "kvplace-serve"
_CERTIFICATES = "kvplace-certificates"
AGENT = "kvplace-agent"
"""The DaemonSet, and its namespace."""

_DEPLOYMENTS = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments"
_DAEMON_SETS = f"/apis/apps/v1/namespaces/{AGENT}/daemonsets"
_NO_CPU = {"op": "replace", "path": "/spec/template/spec/containers/0/resources/requests/cpu", "value": "0"}
# Far from those that the API server gives out itself.
_FIXED_ADDRESSES = {"kvplace": 101, "kvplace-extender": 102}


def install_kvplace(plane: ControlPlane, services: IPv4Network, *, replicas: int = 2) -> None:
    """Apply everything and wait until all of it is ready.

    The nodes must have the images.
    """
    folder = plane.folder / "manifests"
    shutil.copytree(MANIFESTS, folder)
    overlay = folder / "on-real-nodes"
    overlay.mkdir()
    (overlay / "kustomization.yaml").write_text(json.dumps(_overlay(services, replicas)))
    rendered = plane.kubectl("kustomize", str(overlay))
    plane.kubectl("apply", "--server-side", "-f", "-", stdin=rendered)
    wait_for(plane, _DAEMON_SETS, AGENT, _is_on_every_node)
    for deployment in (_CERTIFICATES, _SERVE, _SCHEDULER):
        wait_for(plane, _DEPLOYMENTS, deployment, _is_available)


def _overlay(services: IPv4Network, replicas: int) -> Json:
    addresses = {name: str(services[number]) for name, number in _FIXED_ADDRESSES.items()}
    hosts = [{"ip": address, "hostnames": [f"{name}.{NAMESPACE}.svc"]} for name, address in addresses.items()]
    scheduler, _, tag = kube_scheduler().reference.rpartition(":")
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["../default"],
        "images": [{"name": scheduler, "newTag": tag}],
        "replicas": [{"name": name, "count": replicas} for name in (_SERVE, _SCHEDULER)],
        "patches": [
            *(
                _patch("Service", name, [{"op": "add", "path": "/spec/clusterIP", "value": address}])
                for name, address in addresses.items()
            ),
            _patch("Deployment", _SERVE, [_NO_CPU]),
            _patch(
                "Deployment",
                _SCHEDULER,
                [_NO_CPU, {"op": "add", "path": "/spec/template/spec/hostAliases", "value": hosts}],
            ),
            _patch("Deployment", _CERTIFICATES, [_NO_CPU]),
            _patch("DaemonSet", AGENT, [_NO_CPU]),
        ],
    }


def _patch(kind: str, name: str, operations: list[Json]) -> Json:
    return {"target": {"kind": kind, "name": name}, "patch": json.dumps(operations)}


def _is_available(deployment: Json) -> bool:
    status = deployment.get("status", {})
    return bool(
        status.get("observedGeneration", 0) >= deployment["metadata"]["generation"]
        and status.get("availableReplicas", 0) >= deployment["spec"]["replicas"]
    )


def _is_on_every_node(daemon_set: Json) -> bool:
    status = daemon_set.get("status", {})
    return bool(
        status.get("observedGeneration", 0) >= daemon_set["metadata"]["generation"]
        and status.get("numberReady", 0) >= status.get("desiredNumberScheduled", 0) > 0
    )
