"""Pods as tests store them in the API server."""

from __future__ import annotations

import secrets

from harness.control_plane.cluster import ControlPlane, RequestRefused
from tests.admission.reviewed_objects import Json, plain_pod

PODS = "/api/v1/namespaces/{}/pods"


def create(plane: ControlPlane, namespace: str, pod: Json, *, dry_run: bool = False) -> Json:
    """Create a pod; raises RequestRefused."""
    query = "?dryRun=All" if dry_run else ""
    return plane.request("POST", PODS.format(namespace) + query, pod)


def named(pod: Json) -> Json:
    """Give a pod a name of its own."""
    pod["metadata"]["name"] = f"pod-{secrets.token_hex(4)}"
    return pod


def forged_pod() -> Json:
    """Make a pod with a placement that a user has written."""
    pod = plain_pod({"kvplace.io/placement": "{}"})
    pod["metadata"]["labels"] = {"kvplace.io/placed": "true"}
    return pod


def message(refusal: RequestRefused) -> str:
    """Return what the API server reports to the user."""
    return str(refusal.answer["message"])
