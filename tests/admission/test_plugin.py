"""A hook that a Plugin of KubeVirt calls: the label of the VMI, and the container in its pods."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvplace.admission.pod import admit_pod
from kvplace.admission.vmi import admit_vmi
from kvplace.core.errors import Misconfigured
from kvplace.core.well_known_names import OPTED_IN_LABEL, FrontEnd
from tests.admission.pod_admission import launcher
from tests.admission.reviewed_objects import (
    ASKS,
    OUR_ENTRY,
    SETTINGS,
    as_defaulted,
    container,
    unchanged_but_for,
    vmi,
    vmi_of,
    written_request,
)

Json = dict[str, Any]
PLUGIN = replace(SETTINGS, front_end=FrontEnd.PLUGIN)
LABEL = "kvplace.io/front-end"
HOOK_SIDECARS = "hooks.kubevirt.io/hookSidecars"
SOCKETS = {"name": "kubevirt-plugin-sockets", "emptyDir": {}}
MANIFEST = Path(__file__).resolve().parents[2] / "manifests/plugin/plugin.yaml"


def admitted_vmi(given: Json, settings: Any = PLUGIN) -> Json:
    before = copy.deepcopy(given)
    return unchanged_but_for(given, admit_vmi(given, namespace="default", settings=settings), before)


def plugin_pod(annotations: Mapping[str, str] = ASKS, *, gate: bool = True) -> Json:
    """Make the pod of a VMI with the label, as virt-controller does with the gate Plugins on or off."""
    pod = launcher(annotations=annotations)
    pod["metadata"]["labels"][LABEL] = "plugin"
    for kind in ("containers", "initContainers"):
        kept = [each for each in pod["spec"].get(kind, []) if not each["name"].startswith("hook-sidecar")]
        pod["spec"][kind] = kept
    if gate:
        pod["spec"]["volumes"].append(SOCKETS)
    return pod


def admitted_pod(given: Json, settings: Any = PLUGIN) -> Json:
    before = copy.deepcopy(given)
    made = admit_pod(given, namespace="default", settings=settings, vmi=vmi_of(given))
    return unchanged_but_for(given, made, before)


def test_a_new_vmi_gets_the_label_and_no_hook_sidecar() -> None:
    made = admitted_vmi(vmi())["metadata"]
    assert made["labels"][LABEL] == "plugin"
    assert HOOK_SIDECARS not in made["annotations"]


def test_a_vmi_that_has_the_hook_sidecar_already_keeps_it_and_gets_no_label() -> None:
    first = admitted_vmi(vmi(), SETTINGS)
    again = admitted_vmi(first)["metadata"]
    assert "kvplace-hook" in again["annotations"][HOOK_SIDECARS]
    assert LABEL not in again["labels"]


@pytest.mark.parametrize(
    ("settings", "annotations"), [(SETTINGS, ASKS), (PLUGIN, ASKS | {"kvplace.io/cpu-policy": "none"})]
)
def test_a_label_that_a_user_has_written_goes_where_no_plugin_is_to_be_called(
    settings: Any, annotations: dict[str, str]
) -> None:
    given = vmi(annotations)
    given["metadata"]["labels"] = {LABEL: "plugin"}
    assert LABEL not in admitted_vmi(given, settings)["metadata"]["labels"]


def test_the_plugin_is_called_only_for_vms_with_both_labels_so_that_a_hand_written_one_stops_no_vm() -> None:
    (hook,) = yaml.safe_load(MANIFEST.read_text())["spec"]["domainHooks"]
    demanded = re.findall(r'"([\w./-]+)" in vmi\.Labels', hook["condition"])
    assert demanded == [LABEL, OPTED_IN_LABEL]  # pods without the second one do not come to admission
    assert set(demanded) <= admitted_vmi(vmi())["metadata"]["labels"].keys()


def test_the_pod_gets_the_hook_as_a_restartable_init_container_at_the_socket_of_the_plugin() -> None:
    made = admitted_pod(plugin_pod())
    hook = container(made, "kvplace-hook")
    assert hook in made["spec"]["initContainers"]
    assert {key: hook[key] for key in OUR_ENTRY} == OUR_ENTRY
    assert hook["restartPolicy"] == "Always"
    assert hook["startupProbe"]["exec"]["command"] == ["kvplace-hook", "ready"]
    assert hook["securityContext"] == {
        "runAsUser": 107,
        "runAsGroup": 107,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
    }
    (mount,) = [one for one in hook["volumeMounts"] if one["name"] == SOCKETS["name"]]
    assert mount["subPath"] == "kvplace"
    (variables,) = [{one["name"]: one.get("value") for one in hook["env"]}]
    (plugin,) = yaml.safe_load(MANIFEST.read_text())["spec"]["domainHooks"]
    path = f"{variables['KVPLACE_HOOK_FOLDER']}/{variables['KVPLACE_SOCKET_NAME']}"
    assert plugin["sidecar"]["socketPath"] == path
    assert mount["mountPath"] == variables["KVPLACE_HOOK_FOLDER"]
    assert written_request(made).request.vcpus == 4


def test_a_second_call_of_the_webhook_changes_nothing() -> None:
    once = as_defaulted(admitted_pod(plugin_pod()))
    assert admitted_pod(once) == once


def test_a_guaranteed_pod_stays_guaranteed() -> None:
    given = plugin_pod()
    resources = {"cpu": "4", "memory": "4Gi"}
    for each in (*given["spec"]["containers"], *given["spec"]["initContainers"]):
        each["resources"] = {"requests": dict(resources), "limits": dict(resources)}
    hook = container(admitted_pod(given), "kvplace-hook")
    assert hook["resources"]["requests"] == hook["resources"]["limits"] == {"cpu": "200m", "memory": "64Mi"}


def test_a_pod_without_the_volume_of_the_gate_is_refused_or_floats_by_its_on_failure() -> None:
    with pytest.raises(Misconfigured, match="KubeVirt's feature gate Plugins is off; switch it on"):
        admitted_pod(plugin_pod(gate=False))
    floating = plugin_pod(ASKS | {"kvplace.io/on-failure": "float"}, gate=False)
    made = admit_pod(floating, namespace="default", settings=PLUGIN, vmi=vmi_of(floating))
    assert "runs unpinned" in made.warnings[0]


def test_a_pod_whose_vmi_lost_its_options_keeps_the_hook_that_the_plugin_calls() -> None:
    given = plugin_pod()
    for key in ASKS:
        del given["metadata"]["annotations"][key]
    assert container(admitted_pod(given), "kvplace-hook")


def test_a_pod_of_a_vm_with_the_annotation_keeps_its_sidecar_when_the_setting_has_changed() -> None:
    given = launcher()
    assert admitted_pod(given) == admitted_pod(given, SETTINGS)
