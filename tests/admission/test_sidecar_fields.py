"""The fields of the hook sidecar's container that admission completes, beside fields of others."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from kvplace.admission.edits import Operation, edited
from kvplace.admission.objects import Pod, typed
from kvplace.admission.sidecar import COMMAND, FOLDER, VOLUME, add_sidecar_fields
from kvplace.core.errors import Misconfigured
from tests.admission.pod_admission import admit, launcher, refusal
from tests.admission.reviewed_objects import ASKS, SETTINGS, apply_patch, container, vmi_of

Json = dict[str, Any]
SIDECAR = {"name": "hook-sidecar-0", "command": COMMAND}
HOOKS_OF_LIBVIRT = {"name": "kvplace-libvirt-hooks", "mountPath": "/var/run/kvplace-libvirt-hooks"}
SHOWN_TO_LIBVIRT = {
    "name": "kvplace-libvirt-hooks",
    "mountPath": "/etc/libvirt/hooks/qemu.d",
    "readOnly": True,
}


def completed(**container: Any) -> Json:
    """The sidecar's container after admission, made of these fields."""
    own = {"name": "hook-sidecar-0", "image": "hook", "command": COMMAND, **container}
    (found,) = completed_pod(own)["initContainers"]
    return dict(found)


def completed_pod(sidecar: Json, volumes: list[Json] | None = None, **compute: Any) -> Json:
    """The spec of a pod after admission, with a container `compute` of these fields."""
    containers = [{"name": "compute", **compute}, sidecar]
    pod: Json = {
        "metadata": {"name": "launcher"},
        "spec": {"containers": containers, "volumes": volumes or []},
    }
    before, patch = copy.deepcopy(pod), list[Operation]()
    after = edited(pod, patch)
    add_sidecar_fields(typed(pod, Pod), after.object("spec"), "pod launcher", SETTINGS.sidecar_image)
    assert pod == before
    assert apply_patch(pod, patch) == after.values
    spec: Json = after.get("spec")
    return spec


def test_a_sidecar_without_resources_gets_requests_and_limits() -> None:
    assert completed()["resources"] == {
        "requests": {"cpu": "10m", "memory": "32Mi"},
        "limits": {"cpu": "200m", "memory": "64Mi"},
    }


@pytest.mark.parametrize("kind", ["requests", "limits"])
def test_resources_that_are_set_stay_as_they_are(kind: str) -> None:
    given = {kind: {"cpu": "1"}}
    assert completed(resources=given)["resources"] == given


def test_security_fields_that_are_set_stay_and_others_are_added() -> None:
    security = completed(securityContext={"readOnlyRootFilesystem": False})["securityContext"]
    assert security == {"readOnlyRootFilesystem": False, "allowPrivilegeEscalation": False}


def test_a_mount_at_our_folder_with_other_content_is_replaced() -> None:
    other = {"name": "elsewhere", "mountPath": FOLDER}
    assert completed(volumeMounts=[other])["volumeMounts"] == [
        {"name": VOLUME, "mountPath": FOLDER, "readOnly": True},
        HOOKS_OF_LIBVIRT,
    ]


def test_a_mount_of_ours_with_defaults_of_the_api_server_stays() -> None:
    ours = {"name": VOLUME, "mountPath": FOLDER, "readOnly": True, "recursiveReadOnly": "Disabled"}
    assert completed(volumeMounts=[ours])["volumeMounts"] == [ours, HOOKS_OF_LIBVIRT]


def test_a_variable_of_ours_that_reads_another_field_is_replaced() -> None:
    foreign = {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    assert completed(env=[foreign])["env"] == [
        {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "KVPLACE_STAYS_AFTER_SHUTDOWN", "value": "true"},
    ]


def test_lists_that_are_null_count_as_missing() -> None:
    assert completed(env=None, volumeMounts=None)["env"][0]["name"] == "NODE_NAME"


def test_a_folder_of_the_sidecar_is_where_libvirt_searches_for_programs() -> None:
    spec = completed_pod(SIDECAR)
    assert spec["volumes"][1] == {"name": "kvplace-libvirt-hooks", "emptyDir": {}}
    assert spec["containers"][0]["volumeMounts"] == [SHOWN_TO_LIBVIRT]
    assert HOOKS_OF_LIBVIRT in spec["initContainers"][0]["volumeMounts"]


def test_programs_of_others_for_libvirt_stay() -> None:
    theirs = {"name": "their-hooks", "mountPath": "/etc/libvirt/hooks/qemu.d"}
    assert completed_pod(SIDECAR, volumeMounts=[theirs])["containers"][0]["volumeMounts"] == [theirs]


def test_a_volume_of_others_that_has_the_name_of_ours_is_refused() -> None:
    theirs = {"name": "kvplace-libvirt-hooks", "configMap": {"name": "x"}}
    with pytest.raises(Misconfigured, match="the volume name kvplace-libvirt-hooks is kvplace's; rename"):
        completed_pod(SIDECAR, [theirs])


def test_a_hook_sidecar_keeps_its_place_when_others_have_added_init_containers_since() -> None:
    raw = launcher()
    once, _ = admit(raw, vmi_of(raw))
    mesh = {"name": "mesh", "image": "x", "restartPolicy": "Always", "resources": {}}
    once["spec"]["initContainers"].append(mesh)
    again, _ = admit(once, vmi_of(raw))
    assert again["spec"]["initContainers"] == once["spec"]["initContainers"]


def test_an_init_container_with_the_hooks_command_is_completed_at_its_place() -> None:
    raw = launcher()
    hook = raw["spec"]["containers"].pop(1)
    assert hook["name"] == "hook-sidecar-0"
    raw["spec"]["initContainers"].insert(0, hook)
    after, _ = admit(raw, vmi_of(raw))
    first = after["spec"]["initContainers"][0]
    assert (first["name"], first["restartPolicy"]) == ("hook-sidecar-0", "Always")
    assert first["startupProbe"]["exec"] == {"command": ["kvplace-hook", "ready"]}


@pytest.mark.parametrize(
    ("annotations", "raw_spec"),
    [
        ({}, {}),
        ({**ASKS, "kvplace.io/cpu-policy": "none"}, {}),
        ({**ASKS, "kvplace.io/on-failure": "float"}, {"nodeName": "here"}),
    ],
    ids=["without options any more", "none", "float"],
)
def test_the_hook_of_a_pod_that_is_not_placed_gets_all_the_same_fields(
    annotations: dict[str, str], raw_spec: Json
) -> None:
    raw = launcher(annotations=annotations)
    raw["spec"] |= raw_spec
    after, _ = admit(raw, vmi_of(raw))
    placed, _ = admit(launcher(), vmi_of(launcher()))
    assert container(after, "hook-sidecar-0") == container(placed, "hook-sidecar-0")
    assert after["spec"]["initContainers"] == placed["spec"]["initContainers"]
    assert after["spec"]["volumes"] == placed["spec"]["volumes"]
    assert admit(after, vmi_of(raw))[0] == after


def test_two_hooks_are_refused_also_in_a_pod_without_options() -> None:
    raw = launcher(annotations={})
    raw["spec"]["containers"].append({**container(raw, "hook-sidecar-0"), "name": "hook-sidecar-1"})
    assert refusal(raw).endswith("has 2 containers with the command kvplace-hook; keep one")


def test_a_launcher_pod_with_nothing_but_the_hook_is_refused() -> None:
    raw = launcher()
    del raw["spec"]["containers"][0]
    assert refusal(raw, vmi_of(raw)) == (
        "Pod default/virt-launcher-plain-hook-nonroot-… has no container beside the hook sidecar; let "
        "KubeVirt create the pod"
    )
