"""kvplace on real nodes as an operator installs it: pods of its manifests and images.

`manifests/default` is applied with a folder like an operator's, and with one
component of these nodes' own. Two things are due to them: Services have fixed addresses, which the
scheduler's pods know without DNS, and kvplace's own pods request no CPU, because a node that is this machine
has none to spare beside a VM.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from ipaddress import IPv4Network
from pathlib import Path
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
COMPONENT = "for-these-nodes"
"""The folder of the component."""

_DEPLOYMENTS = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments"
_DAEMON_SETS = f"/apis/apps/v1/namespaces/{AGENT}/daemonsets"
_NO_CPU = {"op": "replace", "path": "/spec/template/spec/containers/0/resources/requests/cpu", "value": "0"}
# Far from the addresses that the API server gives out itself.
_FIXED_ADDRESSES = {"kvplace": 101, "kvplace-extender": 102}


def install_kvplace(
    plane: ControlPlane, services: IPv4Network, *, replicas: int = 2, components: Sequence[str] = ()
) -> None:
    """Apply everything and wait until all of it is ready.

    The nodes must have the images. `components` are folders of `manifests/`.
    """
    folder = plane.folder / "manifests"
    shutil.copytree(MANIFESTS, folder)
    write_component(plane.folder, services, replicas=replicas)
    scheduler, _, tag = kube_scheduler().reference.rpartition(":")
    overlay = folder / "on-real-nodes"
    overlay.mkdir()
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["../default"],
        "images": [{"name": scheduler, "newTag": tag}],
        "components": [*(f"../{name}" for name in components), f"../../{COMPONENT}"],
    }
    (overlay / "kustomization.yaml").write_text(json.dumps(content))
    rendered = plane.kubectl("kustomize", str(overlay))
    plane.kubectl("apply", "--server-side", "-f", "-", stdin=rendered)
    wait_for(plane, _DAEMON_SETS, AGENT, _is_on_every_node)
    wait_for(plane, f"/apis/apps/v1/namespaces/{_CERTIFICATES}/deployments", _CERTIFICATES, _is_available)
    for deployment in (_SERVE, _SCHEDULER):
        wait_for(plane, _DEPLOYMENTS, deployment, _is_available)


def write_component(beside: Path, services: IPv4Network, *, replicas: int) -> None:
    """Write the further objects of an installation on these nodes, as a kustomize component."""
    addresses = {name: str(services[number]) for name, number in _FIXED_ADDRESSES.items()}
    hosts = [{"ip": address, "hostnames": [f"{name}.{NAMESPACE}.svc"]} for name, address in addresses.items()]
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1alpha1",
        "kind": "Component",
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
    folder = beside / COMPONENT
    folder.mkdir()
    (folder / "kustomization.yaml").write_text(json.dumps(content, indent=1))


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
