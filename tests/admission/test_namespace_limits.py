"""The annotations of a Namespace limit the requests of its VMs and pods, whatever spelling they use."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Iterator, Mapping
from functools import partial

import pytest

from harness.control_plane.cluster import MERGE_PATCH, ControlPlane, Json, RequestRefused
from harness.control_plane.kubevirt_parts import KubeVirt
from tests.admission.registered import registered
from tests.admission.reviewed_objects import plain_pod, vm, vmi
from tests.docs.blocks import block
from tests.manifests.policies import granted, refused

LIMITS = {
    "kvplace.io/allowed-cpu-set": "one-l3,one-numa",
    "kvplace.io/allowed-cpu-policy": "exclusive",
    "kvplace.io/allowed-smt": "prefer",
    "kvplace.io/allowed-emulator-threads": "shared,with-vcpus",
}
PATHS = {
    "VirtualMachine": "/apis/kubevirt.io/v1/namespaces/{}/virtualmachines",
    "VirtualMachineInstance": "/apis/kubevirt.io/v1/namespaces/{}/virtualmachineinstances",
    "Pod": "/api/v1/namespaces/{}/pods",
}


@pytest.fixture(scope="module")
def limited(control_plane: ControlPlane, kubevirt: KubeVirt) -> Iterator[str]:
    """Put the policy in effect in a namespace with limits."""
    assert kubevirt.plane is control_plane
    name = f"limited-{secrets.token_hex(4)}"
    control_plane.create_namespace(name)
    command = block("docs/security.md", "kubectl annotate namespace team-a").replace("team-a", name)
    control_plane.kubectl(*shlex.split(command.replace("\\\n", " "))[1:])
    with registered(control_plane, "namespace-limits/policy.yaml", [name], name=name):
        refused(lambda: _create(control_plane, name, plain_pod({"cpu-set": "any"})))
        yield name
    control_plane.remove_namespace(name)


def _annotate(plane: ControlPlane, namespace: str, annotations: Mapping[str, str | None]) -> None:
    change = {"metadata": {"annotations": annotations}}
    plane.request("PATCH", f"/api/v1/namespaces/{namespace}", change, content_type=MERGE_PATCH)


def _create(plane: ControlPlane, namespace: str, document: Json, *, dry_run: bool = True) -> Json:
    document = {**document, "metadata": {**document["metadata"], "namespace": namespace}}
    document["metadata"].pop("uid", None)
    path = PATHS[document["kind"]].format(namespace) + ("?dryRun=All" if dry_run else "")
    return plane.request("POST", path, document)


def _objects(annotations: Mapping[str, str]) -> tuple[Json, ...]:
    return vm(annotations, devices={}), vmi(annotations, devices={}), plain_pod(annotations)


@pytest.mark.parametrize(
    ("annotations", "said"),
    [
        ({"cpu-set": "any"}, "cpu-set: this namespace allows one-l3,one-numa; the default is one-socket"),
        ({"kvplace.io/cpu-set": "one-socket"}, "cpu-set: this namespace allows one-l3,one-numa"),
        ({"kvplace.io/cpu-policy": "exclusive"}, "cpu-set: this namespace allows one-l3,one-numa"),
        (
            {"cpu-set": "one-l3", "kvplace.io/cpu-policy": "share"},
            "cpu-policy: this namespace allows exclusive",
        ),
        ({"cpu-set": "one-l3", "qos.gocrane.io/cpu-manager": "share"}, "cpu-policy: this namespace allows"),
        ({"cpu-set": "one-l3", "topology.crane.io/cpu-policy": "numa"}, "cpu-policy: this namespace allows"),
        ({"cpu-set": "one-l3", "kvplace.io/smt": "isolate"}, "smt: this namespace allows prefer"),
        (
            {"cpu-set": "one-l3", "kvplace.io/emulator-threads": "isolate"},
            "emulator-threads: this namespace allows shared,with-vcpus",
        ),
    ],
    ids=str,
)
def test_a_value_that_the_namespace_does_not_allow_is_refused(
    control_plane: ControlPlane, limited: str, annotations: Mapping[str, str], said: str
) -> None:
    for document in _objects(annotations):
        with pytest.raises(RequestRefused) as raised:
            _create(control_plane, limited, document)
        assert said in str(raised.value)


@pytest.mark.parametrize(
    "annotations",
    [
        {},
        {"kvplace.io/smt": "isolate"},
        {"cpu-set": "one-l3"},
        {"cpu-set": "one-numa", "kvplace.io/emulator-threads": "with-vcpus", "kvplace.io/smt": "prefer"},
        {"topology.crane.io/topology-awareness": "true"},
        {"topology.crane.io/topology-awareness": "false"},
        {"kvplace.io/cpu-policy": "none"},
    ],
    ids=str,
)
def test_allowed_values_and_objects_without_a_request_pass(
    control_plane: ControlPlane, limited: str, annotations: Mapping[str, str]
) -> None:
    for document in _objects(annotations):
        _create(control_plane, limited, document)


def test_an_edit_is_checked_and_a_later_limit_does_not_stop_other_changes(
    control_plane: ControlPlane, limited: str
) -> None:
    _create(control_plane, limited, vmi({"cpu-set": "one-l3"}, devices={}), dry_run=False)
    path = PATHS["VirtualMachineInstance"].format(limited) + "/db"

    def edit(**annotations: str) -> Json:
        change = {
            "metadata": {"annotations": {key.replace("_", "-"): text for key, text in annotations.items()}}
        }
        return control_plane.request("PATCH", path, change, content_type=MERGE_PATCH)

    with pytest.raises(RequestRefused, match="this namespace allows one-l3"):
        edit(cpu_set="any")
    edit(cpu_set="one-numa")
    _annotate(control_plane, limited, {"kvplace.io/allowed-cpu-set": "one-l3, any"})
    try:
        refused(lambda: _create(control_plane, limited, plain_pod({"cpu-set": "one-numa"})))
        assert edit(note="kept")["metadata"]["annotations"]["cpu-set"] == "one-numa"
    finally:
        control_plane.request("DELETE", path)
        _annotate(control_plane, limited, LIMITS)


def test_a_namespace_without_these_annotations_allows_all(control_plane: ControlPlane, limited: str) -> None:
    _annotate(control_plane, limited, dict.fromkeys(LIMITS))
    try:
        for document in _objects({"cpu-set": "any", "kvplace.io/smt": "isolate"}):
            granted(partial(_create, control_plane, limited, document))
    finally:
        _annotate(control_plane, limited, LIMITS)
