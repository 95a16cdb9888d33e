"""Pods at creation: launcher pods of VMs, captured from KubeVirt, and plain pods."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.admission.json_patch import difference
from kvplace.admission.pod import admit_pod, needed_vmi
from kvplace.core.annotations import ASKING, RESULTS, Spelling
from kvplace.core.errors import Conflict, KvplaceError, Misconfigured
from kvplace.core.quantity import parse_quantity
from kvplace.core.request import EmulatorThreads, OnFailure, Policy, Request, Scope, Smt
from tests.admission.makers import (
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
from tests.captured import captured_files, captured_folder

PODS = captured_files("kubevirt/pods", "*.pod.json")
each_pod = pytest.mark.parametrize("path", PODS, ids=lambda path: path.name.removesuffix(".pod.json"))
with_hook = pytest.mark.parametrize(
    "path",
    [path for path in PODS if not path.name.endswith(("nohook.pod.json", "livupdate.pod.json"))],
    ids=lambda path: path.name.removesuffix(".pod.json"),
)
FLOATS = {**ASKS, "kvplace.io/on-failure": "float"}
ISOLATES = {**ASKS, "kvplace.io/emulator-threads": "isolate"}


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


# Pods that ask for nothing


@each_pod
def test_a_captured_pod_that_asks_for_nothing_leaves_as_it_came(path: Path) -> None:
    captured_folder("kubevirt/pods")
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
def test_a_plain_pod_that_asks_for_nothing_leaves_as_it_came(annotations: dict[str, str] | None) -> None:
    raw = plain_pod(annotations, {"limits": {"cpu": "100m"}})
    assert difference(raw, admit(raw)[0]) == []


@pytest.mark.parametrize("more", [{}, {"kvplace.io/cpu-policy": "none"}])
def test_forged_results_are_removed_from_a_pod_that_asks_for_nothing_and_nothing_else_is(
    more: dict[str, str],
) -> None:
    forged = {"kvplace.io/placement": "{}", "kvplace.io/request": "{}", "cpu-map": "{}", "other.io/key": "x"}
    raw = plain_pod({**forged, **more})
    assert sorted(entry["path"] for entry in difference(raw, admit(raw)[0])) == [
        "/metadata/annotations/kvplace.io~1placement",
        "/metadata/annotations/kvplace.io~1request",
    ]


# Launcher pods that ask


@with_hook
def test_a_captured_launcher_pod_that_asks_is_made_ready_to_be_placed(path: Path) -> None:
    captured_folder("kubevirt/pods")
    raw = captured_pod(path)
    before = copy.deepcopy(raw)
    assert needed_vmi(raw) == raw["metadata"]["ownerReferences"][0]["name"]
    after, _ = admit(raw, vmi_of(raw))

    assert raw == before
    assert after["metadata"]["labels"]["kvplace.io/placed"] == "true"
    assert after["spec"]["schedulerName"] == "kvplace-scheduler"
    compute = container(after, "compute")["resources"]
    assert (compute["requests"]["kvplace.io/vm"], compute["limits"]["kvplace.io/vm"]) == ("1", "1")
    written = written_request(after)
    assert written.vmi == f"default/{needed_vmi(raw)}"
    assert written.request == Request(vcpus=4, scope=Scope.ONE_NUMA, memory=4 << 30)
    assert is_guaranteed(after) == is_guaranteed(raw)
    untouched = {"metadata", "spec"}
    assert {key: after[key] for key in after.keys() - untouched} == {
        key: before[key] for key in before.keys() - untouched
    }


@with_hook
@pytest.mark.parametrize("annotations", [ASKS, FLOATS, ISOLATES], ids=["waits", "floats", "isolates"])
def test_admission_done_again_changes_nothing(path: Path, annotations: dict[str, str]) -> None:
    captured_folder("kubevirt/pods")
    raw = captured_pod(path, annotations)
    once, _ = admit(raw, vmi_of(raw))
    again = as_defaulted(once)
    assert difference(again, admit(again, vmi_of(raw))[0]) == []


@with_hook
def test_the_hook_sidecar_gets_the_results_as_files_and_the_gate(path: Path) -> None:
    captured_folder("kubevirt/pods")
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
    ]
    assert sidecar["env"] == [
        *before["env"],
        {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
    ]
    for probe in ("startupProbe", "readinessProbe"):
        assert sidecar[probe]["exec"] == {"command": ["kvplace-hook", "ready"]}
    assert sidecar["startupProbe"]["periodSeconds"] == 1
    assert sidecar["startupProbe"]["failureThreshold"] == 2**31 - 1
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


def test_results_that_a_migration_target_inherits_are_removed() -> None:
    inherited = dict.fromkeys(RESULTS, "inherited")
    raw = launcher("virt-launcher-mig", {**ASKS, **inherited})
    after, _ = admit(raw, vmi_of(raw))
    annotations = after["metadata"]["annotations"]
    assert set(RESULTS) & annotations.keys() == {"kvplace.io/request"}
    assert written_request(after).request.vcpus == 4


def test_the_request_carries_every_wish_and_the_size_of_the_vm() -> None:
    raw = launcher(
        annotations={
            "kvplace.io/cpu-set": "one-l3",
            "kvplace.io/smt": "isolate",
            "kvplace.io/emulator-threads": "isolate",
            "kvplace.io/on-failure": "float",
            "kvplace.io/explain": "true",
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
        scope=Scope.ONE_L3,
        smt=Smt.ISOLATE,
        emulator_threads=EmulatorThreads.ISOLATE,
        on_failure=OnFailure.FLOAT,
        memory=16 << 30,
        huge_pages={1 << 30: 16},
        io_threads=3,
    )
    assert (written.explain, written.spelling) == (True, Spelling.KVPLACE)


@pytest.mark.parametrize(
    ("annotations", "requested"),
    [
        (ASKS, "4"),
        (ISOLATES, "5"),
        ({**ASKS, "kvplace.io/smt": "isolate"}, "4"),
        ({**ASKS, "kvplace.io/cpu-policy": "share"}, "400m"),
        ({**ASKS, "kvplace.io/cpu-policy": "immovable"}, "400m"),
    ],
)
def test_compute_requests_the_cpus_that_the_vm_will_own(annotations: dict[str, str], requested: str) -> None:
    raw = launcher(annotations=annotations)
    assert cpu(raw, "compute") == "400m"
    assert cpu(admit(raw, vmi_of(raw))[0], "compute") == requested


def test_a_request_is_never_lowered() -> None:
    raw = launcher()
    container(raw, "compute")["resources"]["requests"]["cpu"] = "9500m"
    assert cpu(admit(raw, vmi_of(raw))[0], "compute") == "9500m"


def test_a_request_never_passes_its_limit_and_the_user_hears_of_it() -> None:
    raw = launcher(annotations=ISOLATES)
    container(raw, "compute")["resources"]["limits"]["cpu"] = "4"
    after, warnings = admit(raw, vmi_of(raw))
    assert cpu(after, "compute") == "4"
    assert warnings == ("the CPU limit 4 of container compute throttles the 5 CPUs it will own",)


def test_a_guaranteed_pod_stays_guaranteed() -> None:
    raw = launcher("virt-launcher-plain-guaranteed-hook", ISOLATES)
    assert is_guaranteed(raw)
    assert is_guaranteed(admit(raw, vmi_of(raw))[0])


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
            "scheduler volcano is not known to ask kvplace, and if it does not the pod stays Pending; leave "
            "schedulerName out, or have the operator add it to kvplace's schedulers"
        ),
    )


# Launcher pods that cannot be placed


def without_sidecar(annotations: Mapping[str, str]) -> Json:
    return launcher("virt-launcher-plain-nohook", annotations)


def test_a_launcher_pod_without_our_sidecar_is_refused_when_it_would_wait() -> None:
    raw = without_sidecar(ASKS)
    assert refusal(raw, vmi_of(raw)) == (
        "Pod default/virt-launcher-plain-nohook-… has no container with the command kvplace-hook, as its VMI "
        "is older than kvplace or asked too late; restart the VM, or annotate it with kvplace.io/on-failure: "
        "float"
    )


def test_a_launcher_pod_without_our_sidecar_floats_when_it_may() -> None:
    raw = without_sidecar({**FLOATS, "kvplace.io/placement": "inherited", "cpu-map": "inherited"})
    after, warnings = admit(raw, vmi_of(raw))
    assert [entry["op"] for entry in difference(raw, after)] == ["remove", "remove"]
    assert not set(RESULTS) & after["metadata"]["annotations"].keys()
    assert len(warnings) == 1
    assert warnings[0].startswith(
        "runs unpinned, as kvplace.io/on-failure is float: Pod default/virt-launcher-"
    )


def test_a_migration_target_without_our_sidecar_is_placed_because_no_hook_works_there() -> None:
    raw = without_sidecar(ASKS)
    raw["metadata"]["labels"]["kubevirt.io/migrationJobUID"] = "some-uid"
    after, _ = admit(raw, vmi_of(raw))
    assert written_request(after).request.vcpus == 4
    assert all(volume["name"] != "kvplace-pod" for volume in after["spec"]["volumes"])


def test_a_vm_that_kubevirt_pins_is_refused_or_floats() -> None:
    raw = launcher("virt-launcher-amd64-dedicated-hook")
    dedicated = {"cpu": {"cores": 4, "dedicatedCpuPlacement": True}}
    assert refusal(raw, vmi_of(raw, **dedicated)).startswith(
        "VirtualMachineInstance default/amd64-dedicated-hook: spec.domain.cpu.dedicatedCpuPlacement and "
        "annotation cpu-set: 'one-numa' exclude each other"
    )
    raw = launcher("virt-launcher-amd64-dedicated-hook", FLOATS)
    after, warnings = admit(raw, vmi_of(raw, **dedicated))
    assert difference(raw, after) == []
    assert len(warnings) == 1


def test_a_pod_whose_node_is_chosen_already_is_refused_or_floats() -> None:
    assert refusal(plain_pod(nodeName="worker-1")) == (
        "Pod default/solver: spec.nodeName is worker-1, so no scheduler is asked where its cores are; use "
        "spec.nodeSelector instead"
    )
    raw = plain_pod(FLOATS, nodeName="worker-1")
    assert difference(raw, admit(raw)[0]) == []


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
        "was made anew since and gets its own pod; delete this one"
    )


def test_a_pod_that_only_pretends_to_be_a_vms_is_refused() -> None:
    raw = plain_pod()
    raw["metadata"]["labels"] = {"kubevirt.io": "virt-launcher"}
    sentence = (
        "has the label kubevirt.io: virt-launcher, but no VirtualMachineInstance controls it; remove the "
        "label, or let KubeVirt make the pod"
    )
    assert refusal(raw) == f"Pod default/solver {sentence}"
    with pytest.raises(Misconfigured, match="no VirtualMachineInstance controls it"):
        needed_vmi(raw)


def test_a_key_from_a_newer_release_does_not_stop_a_live_migration() -> None:
    raw = launcher("virt-launcher-mig", {**ASKS, "kvplace.io/from-the-future": "x"})
    assert written_request(admit(raw, vmi_of(raw))[0]).request.vcpus == 4


def test_a_volume_of_the_user_with_our_name_is_refused() -> None:
    raw = launcher()
    raw["spec"]["volumes"].append({"name": "kvplace-pod", "emptyDir": {}})
    assert refusal(raw, vmi_of(raw)) == (
        "Pod default/virt-launcher-plain-hook-nonroot-…: the volume name kvplace-pod belongs to kvplace; "
        "name yours differently"
    )


def test_a_volume_with_our_name_and_other_files_is_refused() -> None:
    raw = launcher()
    items = [{"path": "placement", "fieldRef": {"fieldPath": "metadata.annotations['mine']"}}]
    raw["spec"]["volumes"].append({"name": "kvplace-pod", "downwardAPI": {"items": items}})
    assert "belongs to kvplace" in refusal(raw, vmi_of(raw))


def test_a_value_that_is_not_offered_is_refused_on_the_pod_too() -> None:
    raw = launcher(annotations={"cpu-set": "spread-numa"})
    assert refusal(raw, vmi_of(raw)).startswith("annotation cpu-set: 'spread-numa': is not offered")


# Plain pods


def test_a_plain_pod_is_as_large_as_the_limits_of_its_containers() -> None:
    raw = plain_pod(
        ISOLATES,
        {"limits": {"cpu": "4", "memory": "8Gi"}, "requests": {"cpu": "1"}},
        {"requests": {"cpu": "100m", "memory": "1Gi"}},
        {"limits": {"cpu": 2, "hugepages-1Gi": "2Gi"}, "requests": {"cpu": "2"}},
    )
    after, warnings = admit(raw)
    written = written_request(after)
    assert written.request == Request(vcpus=6, scope=Scope.ONE_NUMA, memory=11 << 30, huge_pages={1 << 30: 2})
    assert written.vmi == ""
    assert [cpu(after, f"c{index}") for index in range(3)] == ["4", "100m", "2"]
    assert warnings == ("annotation kvplace.io/emulator-threads has no effect on a pod without a VM",)
    assert "volumes" not in after["spec"]


def test_a_plain_pod_with_only_limits_needs_no_change_of_its_requests() -> None:
    paths = [entry["path"] for entry in difference(plain_pod(), admit(plain_pod())[0])]
    assert paths == [
        "/metadata/annotations/kvplace.io~1request",
        "/metadata/labels",
        "/spec/containers/0/resources/limits/kvplace.io~1vm",
        "/spec/containers/0/resources/requests",
        "/spec/schedulerName",
    ]
    assert container(admit(plain_pod())[0], "c0")["resources"]["requests"] == {"kvplace.io/vm": "1"}


@pytest.mark.parametrize(
    ("resources", "sentence"),
    [
        (
            [{"limits": {"cpu": "1500m"}}],
            (
                "Pod default/solver: container c0: CPU limit '1500m' is no whole number, and a pod that asks "
                "for CPUs of its own gets whole ones; write 2, or leave the limit out"
            ),
        ),
        (
            [{"limits": {"cpu": "2"}}, {"limits": {"cpu": "200m"}}],
            (
                "Pod default/solver: container c1: CPU limit '200m' is no whole number, and a pod that asks "
                "for CPUs of its own gets whole ones; write 1, or leave the limit out"
            ),
        ),
        (
            [{"requests": {"cpu": "2"}}],
            (
                "Pod default/solver asks for CPUs of its own, but no container has a CPU limit; set "
                "spec.containers[].resources.limits.cpu to the number of CPUs"
            ),
        ),
        (
            [{"limits": {"cpu": "5000"}}],
            "Pod default/solver is limited to 5000 CPUs; kvplace gives at most 4096",
        ),
        (
            [{"limits": {"cpu": "lots"}}],
            (
                "Pod default/solver: container c0: CPU limit 'lots': 'lots' is not a quantity such as 8Gi, "
                "512Mi, 4 or 500m"
            ),
        ),
        (
            [{"limits": {"cpu": "1", "memory": "-1"}}],
            "Pod default/solver: container c0: memory: '-1' is negative",
        ),
    ],
)
def test_a_plain_pod_whose_cpus_cannot_be_counted_is_refused(resources: list[Json], sentence: str) -> None:
    assert refusal(plain_pod(ASKS, *resources)) == sentence


def test_a_floating_plain_pod_with_a_bad_limit_is_refused_all_the_same() -> None:
    assert "is no whole number" in refusal(plain_pod(FLOATS, {"limits": {"cpu": "1500m"}}))


def test_a_pod_without_containers_is_refused() -> None:
    raw = plain_pod()
    raw["spec"]["containers"] = []
    assert refusal(raw) == "Pod default/solver asks for CPUs but has no container; add one"


@pytest.mark.parametrize("policy", ["share", "immovable"])
def test_policies_that_own_nothing_leave_the_requests_of_a_plain_pod_alone(policy: str) -> None:
    raw = plain_pod({"kvplace.io/cpu-policy": policy}, {"limits": {"cpu": "4"}, "requests": {"cpu": "1"}})
    after, _ = admit(raw)
    assert cpu(after, "c0") == "1"
    assert written_request(after).request.policy is Policy(policy)


# Anything

amounts = st.sampled_from(["0", "1", "2", "500m", "8", "1Gi", "x", "-1", "1e3", 3])
quantities = st.none() | st.dictionaries(
    st.sampled_from(["cpu", "memory", "hugepages-2Mi", "hugepages-", "kvplace.io/vm"]), amounts, max_size=3
)
resources = st.fixed_dictionaries({}, optional={"requests": quantities, "limits": quantities})
words = st.sampled_from(
    ["one-numa", "exclusive", "share", "none", "true", "float", "isolate", "spread-numa", "?"]
)
wishes = st.dictionaries(st.sampled_from((*ASKING, *RESULTS)), words, max_size=4)


@given(wishes, st.lists(resources, max_size=3), st.none() | st.sampled_from(["", "volcano"]))
def test_whatever_a_plain_pod_says_the_answer_is_sound(
    annotations: dict[str, str], given_resources: list[Json], scheduler: str | None
) -> None:
    raw = plain_pod(annotations, *given_resources, schedulerName=scheduler)
    before = copy.deepcopy(raw)
    try:
        after, _ = admit(raw)
    except KvplaceError:
        return
    finally:
        assert raw == before
    again = as_defaulted(after)
    assert difference(again, admit(again)[0]) == []
    asks = "kvplace.io/placed" in after["metadata"].get("labels", {})
    assert asks is ("kvplace.io/request" in after["metadata"].get("annotations", {}))
    assert "kvplace.io/placement" not in after["metadata"].get("annotations", {})
    if not asks:
        assert after["spec"] == before["spec"]
    for old, new in zip(as_defaulted(before)["spec"]["containers"], again["spec"]["containers"], strict=True):
        _assert_not_lowered(old["resources"], new["resources"])


def _assert_not_lowered(old: Json, new: Json) -> None:
    before, after = ((entry.get("requests") or {}).get("cpu", "0") for entry in (old, new))
    # What the API server would refuse later stays as it is.
    assert before == after or parse_quantity(after) > parse_quantity(before)
    old_limits, new_limits = old.get("limits") or {}, new.get("limits") or {}
    assert {**new_limits, "kvplace.io/vm": "1"} == {**old_limits, "kvplace.io/vm": "1"}
