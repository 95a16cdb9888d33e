"""Launcher pods of VMs at creation, as KubeVirt makes them; plain pods are in test_plain_pod.py."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvplace.core.errors import Conflict, Misconfigured
from kvplace.core.request import (
    EmulatorThreads,
    GuestNuma,
    NumaMemory,
    OnFailure,
    PinningOptions,
    Policy,
    Request,
    Scope,
    Smt,
)
from kvplace.core.scalars import Bytes
from kvplace.core.well_known_names import RESULTS
from tests.admission.pod_admission import (
    admit,
    is_guaranteed,
    launcher,
    needed_vmi,
    patch_for,
    refusal,
)
from tests.admission.reviewed_objects import (
    ASKS,
    SETTINGS,
    Json,
    as_defaulted,
    captured_pod,
    container,
    plain_pod,
    vmi_of,
    written_request,
)
from tests.kubevirt_documents import PODS

FILES = sorted(PODS.glob("*.pod.json"))
each_pod = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.removesuffix(".pod.json"))
with_hook = pytest.mark.parametrize(
    "path",
    [path for path in FILES if not path.name.endswith(("nohook.pod.json", "livupdate.pod.json"))],
    ids=lambda path: path.name.removesuffix(".pod.json"),
)
FLOATS = {**ASKS, "kvplace.io/on-failure": "float"}
ISOLATES = {**ASKS, "kvplace.io/emulator-threads": "isolate"}


# Pods without a request


@each_pod
def test_a_captured_pod_without_options_is_not_changed(path: Path) -> None:
    raw = json.loads(path.read_text())
    after, warnings = admit(copy.deepcopy(raw))
    assert after == raw
    assert warnings == ()
    assert needed_vmi(raw) is None


@pytest.mark.parametrize(
    "annotations",
    [
        None,
        {},
        {"cpu-map": '{"socket0":["1"]}'},
        {"kvplace.io/cpu-policy": "none"},
        {**ASKS, "kubevirt.io/ephemeral-provisioning": "true"},
    ],
)
def test_a_plain_pod_without_options_is_not_changed(annotations: dict[str, str] | None) -> None:
    raw = plain_pod(annotations, {"limits": {"cpu": "100m"}})
    assert patch_for(raw) == []


FORGED = {"kvplace.io/placement": "{}", "kvplace.io/request": "{}", "cpu-map": "{}", "other.io/key": "x"}


def test_only_forged_results_are_removed_from_a_pod_without_options() -> None:
    raw = plain_pod(FORGED)
    assert sorted(entry["path"] for entry in patch_for(raw)) == [
        "/metadata/annotations/kvplace.io~1placement",
        "/metadata/annotations/kvplace.io~1request",
    ]


# Pods with policy none


UNPINNED = {"kvplace.io/cpu-policy": "none"}


def test_a_pod_with_policy_none_keeps_its_scheduler_and_resources_and_gets_a_request_for_later() -> None:
    raw = plain_pod({**FORGED, **UNPINNED}, {"limits": {"cpu": "2"}})
    after, warnings = admit(raw)
    assert warnings == ()
    assert after["spec"] == raw["spec"]
    assert after["metadata"]["labels"] == {"kvplace.io/placed": "true"}
    annotations = after["metadata"]["annotations"]
    request = written_request(after).request
    assert (request.vcpus, request.options.policy) == (2, Policy.NONE)
    assert "kvplace.io/placement" not in annotations
    assert annotations["cpu-map"] == "{}"  # another scheduler may use it


@pytest.mark.parametrize("limits", [{"cpu": "100m"}, {}])
def test_a_pod_with_policy_none_whose_size_is_not_clear_is_not_changed(limits: dict[str, str]) -> None:
    raw = plain_pod(UNPINNED, {"limits": limits})
    assert patch_for(raw) == []


# Launcher pods with a request


@with_hook
def test_a_captured_launcher_pod_with_options_gets_its_request(path: Path) -> None:
    raw = captured_pod(path)
    before = copy.deepcopy(raw)
    assert needed_vmi(raw) == raw["metadata"]["ownerReferences"][0]["name"]
    after, _ = admit(raw, vmi_of(raw))

    assert raw == before
    assert after["metadata"]["labels"]["kvplace.io/placed"] == "true"
    assert after["spec"]["schedulerName"] == "kvplace-scheduler"
    compute = container(after, "compute")["resources"]
    assert (compute["requests"]["kvplace.io/vm"], compute["limits"]["kvplace.io/vm"]) == ("0", "0")
    written = written_request(after)
    assert written.vmi == f"default/{needed_vmi(raw)}"
    assert written.request == Request(
        vcpus=4, options=PinningOptions(scope=Scope.ONE_NUMA), memory=Bytes(4 << 30)
    )
    assert is_guaranteed(after) == is_guaranteed(raw)
    untouched = {"metadata", "spec"}
    assert {key: after[key] for key in after.keys() - untouched} == {
        key: before[key] for key in before.keys() - untouched
    }


@with_hook
@pytest.mark.parametrize("annotations", [ASKS, FLOATS, ISOLATES], ids=["waits", "floats", "isolates"])
def test_admission_done_again_changes_nothing(path: Path, annotations: dict[str, str]) -> None:
    raw = captured_pod(path, annotations)
    once, _ = admit(raw, vmi_of(raw))
    again = as_defaulted(once)
    assert patch_for(again, vmi_of(raw)) == []


@with_hook
def test_the_hook_sidecar_becomes_the_last_init_container_and_ends_with_the_others(path: Path) -> None:
    raw = captured_pod(path)
    after, _ = admit(raw, vmi_of(raw))
    initial = [entry["name"] for entry in raw["spec"].get("initContainers", [])]
    assert [entry["name"] for entry in after["spec"]["initContainers"]] == [*initial, "hook-sidecar-0"]
    assert container(after, "hook-sidecar-0")["restartPolicy"] == "Always"
    assert "hook-sidecar-0" not in [entry["name"] for entry in after["spec"]["containers"]]


@with_hook
def test_the_hook_sidecar_gets_the_results_as_files_and_its_probe(path: Path) -> None:
    raw = captured_pod(path)
    after, _ = admit(raw, vmi_of(raw))
    (volume,) = [entry for entry in after["spec"]["volumes"] if entry["name"] == "kvplace-pod"]
    files = {item["path"]: item["fieldRef"]["fieldPath"] for item in volume["downwardAPI"]["items"]}
    assert files == {
        "placement": "metadata.annotations['kvplace.io/placement']",
        "cpu-map": "metadata.annotations['cpu-map']",
        "request": "metadata.annotations['kvplace.io/request']",
        "uid": "metadata.uid",
        "name": "metadata.name",
        "namespace": "metadata.namespace",
    }
    before, sidecar = container(raw, "hook-sidecar-0"), container(after, "hook-sidecar-0")
    assert sidecar["volumeMounts"] == [
        *before["volumeMounts"],
        {"name": "kvplace-pod", "mountPath": "/etc/kvplace-pod", "readOnly": True},
        {"name": "kvplace-libvirt-hooks", "mountPath": "/var/run/kvplace-libvirt-hooks"},
    ]
    assert container(after, "compute")["volumeMounts"] == [
        *container(raw, "compute")["volumeMounts"],
        {"name": "kvplace-libvirt-hooks", "mountPath": "/etc/libvirt/hooks/qemu.d", "readOnly": True},
    ]
    assert sidecar["env"] == [
        *before["env"],
        {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "KVPLACE_STAYS_AFTER_SHUTDOWN", "value": "true"},
    ]
    assert sidecar["startupProbe"] == {
        "exec": {"command": ["kvplace-hook", "ready"]},
        "periodSeconds": 1,
        "timeoutSeconds": 30,
        "failureThreshold": 2**31 - 1,
    }
    assert "readinessProbe" not in sidecar
    assert sidecar["securityContext"] == {
        **before["securityContext"],
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
    }
    if before["resources"]:
        assert sidecar["resources"] == before["resources"]
    else:
        assert sidecar["resources"] == {
            "requests": {"cpu": "10m", "memory": "32Mi"},
            "limits": {"cpu": "200m", "memory": "64Mi"},
        }


def test_sidecars_of_others_are_left_alone() -> None:
    raw = launcher()
    theirs = {"name": "hook-sidecar-1", "image": "x", "command": ["kvplace-hook-not"], "resources": {}}
    raw["spec"]["containers"].append(theirs)
    after, _ = admit(raw, vmi_of(raw))
    assert container(after, "hook-sidecar-1") == theirs


def migration_target(annotations: dict[str, str]) -> Json:
    """Return the target of a migration: KubeVirt copies the VMI's annotations and adds these marks."""
    pod = launcher(annotations={**annotations, "kubevirt.io/migrationJobName": "kubevirt-migrate-vm-x"})
    pod["metadata"]["labels"] |= {"kubevirt.io/migrationJobUID": "uid-1", "kubevirt.io/nodeName": "node01"}
    return pod


def test_results_that_a_migration_target_inherits_are_removed() -> None:
    inherited = dict.fromkeys(RESULTS, "inherited")
    raw = migration_target({**ASKS, **inherited})
    after, _ = admit(raw, vmi_of(raw))
    annotations = after["metadata"]["annotations"]
    assert set(RESULTS) & annotations.keys() == {"kvplace.io/request"}
    assert written_request(after).request.vcpus == 4


def test_the_request_contains_every_option_and_the_size_of_the_vm() -> None:
    raw = launcher(
        annotations={
            "kvplace.io/cpu-set": "spread-numa",
            "kvplace.io/smt": "isolate",
            "kvplace.io/emulator-threads": "isolate",
            "kvplace.io/numa-memory": "strict",
            "kvplace.io/guest-numa": "mirror",
            "kvplace.io/on-failure": "float",
            "kvplace.io/explain": "true",
            "kvplace.io/movable": "true",
        }
    )
    size = {
        "cpu": {"sockets": 2, "cores": 2, "threads": 2},
        "memory": {"guest": "16Gi", "hugepages": {"pageSize": "1Gi"}},
        "ioThreadsPolicy": "supplementalPool",
        "ioThreads": {"supplementalPoolThreadCount": 3},
    }
    written = written_request(admit(raw, vmi_of(raw, **size))[0])
    assert written.request == Request(
        vcpus=8,
        options=PinningOptions(
            scope=Scope.SPREAD_NUMA,
            smt=Smt.ISOLATE,
            emulator_threads=EmulatorThreads.ISOLATE,
            numa_memory=NumaMemory.STRICT,
            guest_numa=GuestNuma.MIRROR,
            on_failure=OnFailure.FLOAT,
        ),
        memory=Bytes(16 << 30),
        huge_pages={Bytes(1 << 30): 16},
        io_threads=3,
    )
    assert (written.explain, written.crane_result) == (True, False)
    assert (written.movable, written.make_room) == (True, False)


# Schedulers


@pytest.mark.parametrize("given", [None, "", "default-scheduler", "kvplace-scheduler"])
def test_a_pod_that_names_no_scheduler_gets_ours(given: str | None) -> None:
    raw = plain_pod(schedulerName=given)
    after, warnings = admit(raw)
    assert after["spec"]["schedulerName"] == "kvplace-scheduler"
    assert warnings == ()


def test_a_scheduler_that_has_our_extender_is_kept() -> None:
    after, warnings = admit(plain_pod(schedulerName="main-scheduler"))
    assert after["spec"]["schedulerName"] == "main-scheduler"
    assert warnings == ()


def test_any_other_scheduler_is_kept_with_a_warning() -> None:
    after, warnings = admit(plain_pod(schedulerName="volcano"))
    assert after["spec"]["schedulerName"] == "volcano"
    assert warnings == (
        (
            "scheduler volcano is not known to call kvplace's extender; if it does not, the pod stays "
            "Pending: remove schedulerName, or name the scheduler in --other-scheduler of kvplace serve"
        ),
    )


# Launcher pods that cannot be placed


def without_sidecar(annotations: Mapping[str, str]) -> Json:
    return launcher("virt-launcher-plain-nohook", annotations)


def test_a_launcher_pod_without_our_sidecar_is_refused_with_wait() -> None:
    raw = without_sidecar(ASKS)
    assert refusal(raw, vmi_of(raw)) == (
        "Pod default/virt-launcher-plain-nohook-… has no container with the command kvplace-hook, because "
        "its VMI is older than kvplace or than its annotations; restart the VM, or annotate it with "
        "kvplace.io/on-failure: float"
    )


def test_a_launcher_pod_without_our_sidecar_runs_unpinned_with_float() -> None:
    raw = without_sidecar({**FLOATS, "kvplace.io/placement": "inherited", "cpu-map": "inherited"})
    after, warnings = admit(raw, vmi_of(raw))
    assert [entry["op"] for entry in patch_for(raw, vmi_of(raw))] == ["remove", "remove"]
    assert not set(RESULTS) & after["metadata"]["annotations"].keys()
    assert len(warnings) == 1
    assert warnings[0].startswith(
        "the pod runs unpinned, because kvplace.io/on-failure is float: Pod default/virt-launcher-"
    )


def test_a_migration_target_without_our_sidecar_is_placed_because_no_hook_works_there() -> None:
    raw = without_sidecar(ASKS)
    raw["metadata"]["labels"]["kubevirt.io/migrationJobUID"] = "some-uid"
    after, _ = admit(raw, vmi_of(raw))
    assert written_request(after).request.vcpus == 4
    assert all(volume["name"] != "kvplace-pod" for volume in after["spec"]["volumes"])


def test_a_vm_that_kubevirt_pins_is_refused_or_runs_unpinned_by_on_failure() -> None:
    raw = launcher("virt-launcher-amd64-dedicated-hook")
    dedicated = {"cpu": {"cores": 4, "dedicatedCpuPlacement": True}}
    assert refusal(raw, vmi_of(raw, **dedicated)).startswith(
        "VirtualMachineInstance default/amd64-dedicated-hook: spec.domain.cpu.dedicatedCpuPlacement and "
        "annotation cpu-set: 'one-numa' exclude each other"
    )
    raw = launcher("virt-launcher-amd64-dedicated-hook", FLOATS)
    # Only its hook is completed.
    changed = {operation["path"].split("/")[2] for operation in patch_for(raw, vmi_of(raw, **dedicated))}
    assert changed == {"volumes", "containers", "initContainers"}
    _, warnings = admit(raw, vmi_of(raw, **dedicated))
    assert len(warnings) == 1


def test_a_pod_with_a_node_name_is_refused_or_runs_unpinned_by_on_failure() -> None:
    assert refusal(plain_pod(nodeName="worker-1")) == (
        "Pod default/solver: spec.nodeName is worker-1, so no scheduler places the pod; use "
        "spec.nodeSelector instead"
    )
    raw = plain_pod(FLOATS, nodeName="worker-1")
    assert patch_for(raw) == []


def test_a_launcher_pod_whose_vmi_is_gone_or_another_one_is_a_conflict() -> None:
    raw = launcher()
    assert refusal(raw, None, Conflict) == (
        "Pod default/virt-launcher-plain-hook-nonroot-…: VirtualMachineInstance default/plain-hook-nonroot, "
        "which controls it, is gone; delete the pod"
    )
    other = vmi_of(raw)
    other["metadata"]["uid"] = "another"
    assert refusal(raw, other, Conflict) == (
        "Pod default/virt-launcher-plain-hook-nonroot-…: VirtualMachineInstance default/plain-hook-nonroot "
        "was created again and gets its own pod; delete this one"
    )


def test_a_vmi_whose_size_cannot_be_read_is_named_and_not_the_pod() -> None:
    raw = launcher()
    assert refusal(raw, vmi_of(raw, memory={"guest": "much"})) == (
        "VirtualMachineInstance default/plain-hook-nonroot: spec.domain.memory.guest: 'much' is not a "
        "quantity such as 8Gi, 512Mi, 4 or 500m"
    )


def test_a_pod_that_only_pretends_to_be_a_vms_is_refused() -> None:
    raw = plain_pod()
    raw["metadata"]["labels"] = {"kubevirt.io": "virt-launcher"}
    sentence = (
        "has the label kubevirt.io: virt-launcher, but no VirtualMachineInstance controls it; remove the "
        "label, or let KubeVirt create the pod"
    )
    assert refusal(raw) == f"Pod default/solver {sentence}"
    with pytest.raises(Misconfigured, match="no VirtualMachineInstance controls it"):
        needed_vmi(raw)


def test_a_key_from_a_newer_release_does_not_stop_a_live_migration() -> None:
    raw = migration_target({**ASKS, "kvplace.io/from-the-future": "x"})
    assert written_request(admit(raw, vmi_of(raw))[0]).request.vcpus == 4


def test_a_volume_of_the_user_with_our_name_is_refused() -> None:
    raw = launcher()
    raw["spec"]["volumes"].append({"name": "kvplace-pod", "emptyDir": {}})
    assert refusal(raw, vmi_of(raw)) == (
        "Pod default/virt-launcher-plain-hook-nonroot-…: the volume name kvplace-pod is kvplace's; "
        "rename the volume"
    )


def test_a_volume_with_our_name_and_other_files_is_refused() -> None:
    raw = launcher()
    items = [{"path": "placement", "fieldRef": {"fieldPath": "metadata.annotations['mine']"}}]
    raw["spec"]["volumes"].append({"name": "kvplace-pod", "downwardAPI": {"items": items}})
    assert "is kvplace's" in refusal(raw, vmi_of(raw))


def test_options_that_exclude_each_other_are_refused_on_the_pod_too() -> None:
    raw = launcher(annotations={"kvplace.io/cpu-policy": "numa", "kvplace.io/guest-numa": "mirror"})
    assert refusal(raw, vmi_of(raw)).startswith(
        "annotation kvplace.io/guest-numa: 'mirror': contradicts kvplace.io/cpu-policy: 'numa'"
    )


def test_only_the_vmi_that_controls_a_pod_is_asked_for_its_size() -> None:
    raw = launcher()
    (owner,) = raw["metadata"]["ownerReferences"]
    raw["metadata"]["ownerReferences"] = [
        {**owner, "kind": "ReplicaSet", "name": "another"},
        {**owner, "name": "a-guest", "controller": False},
        {**owner, "name": "foreign", "apiVersion": "example.test/v1"},
        {**owner, "name": ""},
        owner,
    ]
    assert needed_vmi(raw) == owner["name"]


# The size that admission of the VMI has stated

STATED = {**ASKS, "kvplace.io/vm-size": '{"vcpus":6,"memory":8589934592,"ioThreads":2}'}


def stating(annotations: Mapping[str, str] = STATED, label: str = "true") -> Json:
    """Make a launcher pod that KubeVirt has copied label and size to."""
    raw = launcher(annotations=annotations)
    raw["metadata"]["labels"]["kvplace.io/opted-in"] = label
    return raw


def test_the_pod_of_virt_controller_takes_the_stated_size_without_a_check_of_its_vmi() -> None:
    raw = stating()
    author = SETTINGS.kubevirt_controller
    assert needed_vmi(raw, author=author) is None
    after, _ = admit(raw, author=author)
    written = written_request(after)
    assert (written.request.vcpus, written.request.memory, written.request.io_threads) == (6, 8 << 30, 2)
    assert written.vmi == "default/plain-hook-nonroot"
    assert "kvplace.io/vm-size" not in after["metadata"]["annotations"]


@pytest.mark.parametrize("author", ["", "admin", "system:serviceaccount:tenant:kubevirt-controller"])
def test_a_size_on_a_pod_that_virt_controller_has_not_made_counts_for_nothing(author: str) -> None:
    raw = stating()
    assert needed_vmi(raw, author=author) == "plain-hook-nonroot"
    after, _ = admit(raw, vmi_of(raw), author)
    assert written_request(after).request.vcpus == 4
    assert "kvplace.io/vm-size" not in after["metadata"]["annotations"]


@pytest.mark.parametrize("labels", [{"kvplace.io/opted-in": "false"}, {}], ids=str)
def test_a_size_on_a_vmi_whose_changes_admission_does_not_see_counts_for_nothing(
    labels: dict[str, str],
) -> None:
    raw = launcher(annotations=STATED)
    raw["metadata"]["labels"] |= labels
    author = SETTINGS.kubevirt_controller
    assert needed_vmi(raw, author=author) == "plain-hook-nonroot"
    assert written_request(admit(raw, vmi_of(raw), author)[0]).request.vcpus == 4


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", "[]", "{", '{"vcpus":0}', '{"vcpus":"6"}', '{"vcpus":6,"memory":-1}'),
        *('{"vcpus":1000000}', '{"vcpus":6,"other":1}'),
    ],
)
def test_a_size_that_cannot_be_read_is_read_from_the_vmi(text: str) -> None:
    raw = stating({**ASKS, "kvplace.io/vm-size": text})
    author = SETTINGS.kubevirt_controller
    assert needed_vmi(raw, author=author) == "plain-hook-nonroot"
    assert written_request(admit(raw, vmi_of(raw), author)[0]).request.vcpus == 4
