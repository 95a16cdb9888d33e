"""A VM with a key that is likely a typo gets a warning, and is created."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from harness.control_plane.cluster import ControlPlane, KubectlFailed
from harness.control_plane.kubevirt_parts import KubeVirt
from kvplace.core.annotations import meant_keys
from kvplace.core.well_known_names import ASKING
from tests.admission.registered import registered
from tests.admission.reviewed_objects import vm
from tests.manifests.policies import NotInForce

NO_READER = "nothing reads the annotation"


@pytest.fixture(scope="module")
def namespace(control_plane: ControlPlane, kubevirt: KubeVirt) -> Iterator[str]:
    """Put the policy in effect in one namespace."""
    assert kubevirt.plane is control_plane
    name = f"misspelt-{secrets.token_hex(4)}"
    control_plane.create_namespace(name)
    with registered(control_plane, "policy/misspelt-annotations.yaml", [name], name=name):
        _wait_until_in_force(control_plane, name)
        yield name
    control_plane.remove_namespace(name)


@retry(
    retry=retry_if_exception_type(NotInForce), wait=wait_fixed(0.1), stop=stop_after_delay(60), reraise=True
)
def _wait_until_in_force(plane: ControlPlane, namespace: str) -> None:
    if not warnings(plane, namespace, annotations={"cpu-sets": "one-numa"}):
        raise NotInForce


def warnings(plane: ControlPlane, namespace: str, **metadata: Any) -> str:
    """Return what `kubectl apply` warns about a VM whose template has this metadata."""
    document = vm(None, devices={})
    document["metadata"]["namespace"] = namespace
    document["spec"]["template"]["metadata"] = metadata
    try:
        plane.kubectl(
            *("apply", "--dry-run=server", "--warnings-as-errors", "-f", "-"), stdin=json.dumps(document)
        )
    except KubectlFailed as failed:
        if "1 warning received" not in str(failed):
            raise
        return str(failed)
    return ""


@pytest.mark.parametrize(
    "key", ["cpu-sets", "cpuset", "CPU_SET", "cpu-policy", "smt", "kvplace/smt", "Kvplace.io/numa-memory"]
)
def test_an_annotation_that_nothing_reads_is_named(
    control_plane: ControlPlane, namespace: str, key: str
) -> None:
    assert meant_keys([key])
    said = warnings(control_plane, namespace, annotations={key: "one-numa", "example.org/x": "1"})
    assert f"{NO_READER} {key}: kvplace reads cpu-set and keys that begin with kvplace.io/" in said


def test_a_label_that_was_meant_as_an_annotation_is_named(
    control_plane: ControlPlane, namespace: str
) -> None:
    said = warnings(control_plane, namespace, labels={"cpu-set": "one-numa", "app": "db"})
    assert "nothing reads the label cpu-set: kvplace reads annotations" in said


def test_a_result_that_was_copied_from_a_pod_is_named(control_plane: ControlPlane, namespace: str) -> None:
    said = warnings(control_plane, namespace, annotations={"cpu-set": "any", "kvplace.io/placement": "{}"})
    assert "annotation kvplace.io/placement is a result that kvplace writes on pods" in said


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"annotations": dict.fromkeys(ASKING, "any")},
        {"annotations": {"explain": "1", "example.org/smt": "on"}, "labels": {"kvplace.io/rollout": "web"}},
    ],
    ids=["nothing", "every-option", "keys-of-others"],
)
def test_other_keys_are_not_a_reason_to_warn(
    control_plane: ControlPlane, namespace: str, metadata: dict[str, Any]
) -> None:
    assert not warnings(control_plane, namespace, **metadata)
