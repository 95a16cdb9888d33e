"""kvplace on real nodes as an operator installs it: pods of its manifests and images.

`manifests/own-certificates` is applied with an overlay that says what an operator's overlay says: image tags
and replicas. It also gives Services fixed addresses, which the scheduler's pods know without DNS.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from ipaddress import IPv4Network
from typing import Any

from harness.control_plane.cluster import ControlPlane
from harness.control_plane.watching import wait_for
from harness.kvplace_cluster.installation import MANIFESTS, NAMESPACE
from harness.node_programs.small_images import kube_scheduler

Json = dict[str, Any]

_SCHEDULER = "kvplace-scheduler"
_SERVE = "kvplace-serve"
_DEPLOYMENTS = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments"
# Far from those that the API server gives out itself.
_FIXED_ADDRESSES = {"kvplace": 101, "kvplace-extender": 102}


def install_kvplace(plane: ControlPlane, services: IPv4Network, *, replicas: int = 2) -> None:
    """Apply everything and wait until its Deployments are available.

    The nodes must have the images.
    """
    folder = plane.folder / "manifests"
    shutil.copytree(MANIFESTS, folder)
    subprocess.run([folder / "own-certificates" / "make-certificates"], check=True, capture_output=True)
    overlay = folder / "on-real-nodes"
    overlay.mkdir()
    (overlay / "kustomization.yaml").write_text(json.dumps(_overlay(services, replicas)))
    rendered = plane.kubectl("kustomize", str(overlay))
    plane.kubectl("apply", "--server-side", "-f", "-", stdin=rendered)
    for deployment in (_SERVE, _SCHEDULER):
        wait_for(plane, _DEPLOYMENTS, deployment, _is_available)


def _overlay(services: IPv4Network, replicas: int) -> Json:
    addresses = {name: str(services[number]) for name, number in _FIXED_ADDRESSES.items()}
    hosts = [{"ip": address, "hostnames": [f"{name}.{NAMESPACE}.svc"]} for name, address in addresses.items()]
    scheduler, _, tag = kube_scheduler().reference.rpartition(":")
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["../own-certificates"],
        "images": [{"name": scheduler, "newTag": tag}],
        "replicas": [{"name": name, "count": replicas} for name in (_SERVE, _SCHEDULER)],
        "patches": [
            *(
                _patch("Service", name, [{"op": "add", "path": "/spec/clusterIP", "value": address}])
                for name, address in addresses.items()
            ),
            _patch(
                "Deployment",
                _SCHEDULER,
                [{"op": "add", "path": "/spec/template/spec/hostAliases", "value": hosts}],
            ),
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
