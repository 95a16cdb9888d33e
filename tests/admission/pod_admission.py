"""Admission of pods as the tests ask for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from kvplace.admission.pod import admit_pod
from kvplace.core.errors import KvplaceError, Misconfigured
from kvplace.core.quantity import parse_quantity
from tests.admission.makers import ASKS, SETTINGS, Json, captured_pod, container
from tests.captured import captured_folder


def admit(pod: Json, vmi: Mapping[str, Any] | None = None) -> tuple[Json, tuple[str, ...]]:
    admitted = admit_pod(pod, namespace="default", settings=SETTINGS, vmi=vmi)
    return dict(admitted.object), admitted.warnings


def refusal(pod: Json, vmi: Mapping[str, Any] | None = None, kind: type[KvplaceError] = Misconfigured) -> str:
    with pytest.raises(kind) as refused:
        admit(pod, vmi)
    return str(refused.value)


def launcher(name: str = "virt-launcher-plain-hook-nonroot", annotations: Mapping[str, str] = ASKS) -> Json:
    return captured_pod(captured_folder("kubevirt/pods") / f"{name}.pod.json", annotations)


def cpu(pod: Json, name: str) -> Any:
    return container(pod, name)["resources"]["requests"]["cpu"]


def is_guaranteed(pod: Json) -> bool:
    """Say whether the kubelet would give this pod the QoS class Guaranteed."""
    return all(
        parse_quantity(amounts["limits"].get(kind, -1)) == parse_quantity(amounts["requests"].get(kind, -2))
        for entry in pod["spec"]["containers"]
        for amounts in [{"limits": {}, "requests": {}} | entry.get("resources", {})]
        for kind in ("cpu", "memory")
    )
