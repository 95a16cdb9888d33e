"""Admission of pods as the tests ask for it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from fractions import Fraction
from math import ceil
from typing import Any

import pytest

from kvplace.admission.pod import NewPod, admit_pod
from kvplace.core.errors import KvplaceError, Misconfigured
from kvplace.core.quantity import parse_quantity
from tests.admission.reviewed_objects import (
    ASKS,
    SETTINGS,
    Json,
    captured_pod,
    container,
    containers,
    unchanged_but_for,
)
from tests.kubevirt_documents import PODS


def admit(pod: Json, vmi: Mapping[str, Any] | None = None, author: str = "") -> tuple[Json, tuple[str, ...]]:
    before = copy.deepcopy(pod)
    admitted = admit_pod(pod, namespace="default", settings=SETTINGS, vmi=vmi, author=author)
    return unchanged_but_for(pod, admitted, before), admitted.warnings


def needed_vmi(pod: Json, author: str = "") -> str | None:
    return NewPod.read(pod, settings=SETTINGS, author=author).needed_vmi


def patch_for(pod: Json, vmi: Mapping[str, Any] | None = None) -> list[Json]:
    return list(admit_pod(pod, namespace="default", settings=SETTINGS, vmi=vmi).patch)


def refusal(pod: Json, vmi: Mapping[str, Any] | None = None, kind: type[KvplaceError] = Misconfigured) -> str:
    with pytest.raises(kind) as refused:
        admit(pod, vmi)
    return str(refused.value)


def launcher(name: str = "virt-launcher-plain-hook-nonroot", annotations: Mapping[str, str] = ASKS) -> Json:
    return captured_pod(PODS / f"{name}.pod.json", annotations)


def cpu(pod: Json, name: str) -> Any:
    return container(pod, name)["resources"]["requests"]["cpu"]


def is_guaranteed(pod: Json) -> bool:
    """Return whether the kubelet would give this pod the QoS class Guaranteed."""
    return all(
        parse_quantity(amounts["limits"].get(kind, -1)) == parse_quantity(amounts["requests"].get(kind, -2))
        for entry in containers(pod)
        for amounts in [{"limits": {}, "requests": {}} | entry.get("resources", {})]
        for kind in ("cpu", "memory")
    )


def effective_cpu(pod: Json) -> Fraction:
    """Add up the CPUs that kube-scheduler and the kubelet count for a pod (k8s.io/component-helpers)."""

    def millicores(quantities: Any) -> int:
        return ceil(parse_quantity((quantities or {}).get("cpu", 0)) * 1000)

    def requested(entry: Json) -> int:
        resources = {"limits": {}, "requests": {}} | entry.get("resources", {})
        return millicores({**resources["limits"], **resources["requests"]})

    sidecars = highest = 0
    for entry in pod["spec"].get("initContainers", []):
        if entry.get("restartPolicy") == "Always":
            sidecars += requested(entry)
            highest = max(highest, sidecars)
        else:
            highest = max(highest, sidecars + requested(entry))
    running = sidecars + sum(map(requested, pod["spec"]["containers"]))
    return Fraction(max(running, highest) + millicores(pod["spec"].get("overhead")), 1000)
