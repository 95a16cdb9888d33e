"""Objects of the manifests, found by kind and name."""

from __future__ import annotations

from typing import Any

CERT_MANAGER = "cert-manager.io/v1"
NAMESPACE = "kvplace-system"

Json = dict[str, Any]


def of_kind(objects: list[Json], kind: str) -> dict[str, Json]:
    return {entry["metadata"]["name"]: entry for entry in objects if entry["kind"] == kind}


def templates(objects: list[Json]) -> dict[str, Json]:
    workloads = of_kind(objects, "Deployment") | of_kind(objects, "DaemonSet")
    return {name: found["spec"]["template"] for name, found in workloads.items()}


def settings_of(objects: list[Json]) -> dict[str, str]:
    (found,) = (entry for name, entry in of_kind(objects, "ConfigMap").items() if "kvplace-settings" in name)
    data: dict[str, str] = found["data"]
    return data
