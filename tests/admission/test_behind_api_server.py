"""Admission where it works: behind an API server that evaluates conditions and policies itself."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from harness.control_plane.cluster import MERGE_PATCH, ControlPlane, KubectlFailed, RequestRefused
from harness.control_plane.kubevirt_parts import KubeVirt
from kvplace.core.well_known_names import ASKING, OPTING_IN
from tests.admission.conftest import Admission
from tests.admission.registered import registered
from tests.admission.reviewed_objects import ASKS, OUR_ENTRY, Json, container, plain_pod, written_request
from tests.admission.stored_pods import PODS, create, forged_pod, message, named
from tests.manifests.policies import refused

VMS = "virtualmachines"
VMIS = "virtualmachineinstances"
HOOKS = "hooks.kubevirt.io/hookSidecars"


# Which objects arrive


@pytest.mark.parametrize(("webhook", "labels"), [("pod", {}), ("vm-pod", {"kvplace.io/opted-in": "true"})])
@pytest.mark.parametrize("key", ASKING)
def test_a_pod_with_any_option_is_sent_to_one_webhook(
    control_plane: ControlPlane, admission: Admission, key: str, webhook: str, labels: Json
) -> None:
    server, namespace = admission
    # A modifier is read where a request is.
    pod = named(plain_pod({key: "?"} if key in OPTING_IN else {"cpu-set": "any", key: "?"}))
    pod["metadata"]["labels"] = labels
    with pytest.raises(RequestRefused) as refusal:
        create(control_plane, namespace, pod)
    assert refusal.value.status == 422
    assert message(refusal.value).startswith(
        f'admission webhook "{webhook}.kvplace.io" denied the request: '
        f"annotation {key}: '?': must be one of "
    )
    assert server.names("Pod").count(pod["metadata"]["name"]) == 1


@pytest.mark.parametrize(
    "annotations", [None, {}, {"other.io/key": "cpu-set"}, {"cpu-map": "{}", "topology.crane.io/other": "x"}]
)
def test_a_pod_without_options_is_never_sent_to_the_webhook(
    control_plane: ControlPlane, admission: Admission, annotations: dict[str, str] | None
) -> None:
    server, namespace = admission
    pod = named(plain_pod(annotations))
    stored = create(control_plane, namespace, pod)
    assert pod["metadata"]["name"] not in server.names("Pod")
    assert stored["metadata"].get("annotations") == (annotations or None)
    assert "labels" not in stored["metadata"]
    assert stored["spec"]["schedulerName"] == "default-scheduler"


def test_a_pod_of_the_system_is_never_sent_to_the_webhook(
    control_plane: ControlPlane, admission: Admission
) -> None:
    server, _ = admission
    pod = named(plain_pod())
    stored = create(control_plane, "kube-system", pod, dry_run=True)
    assert pod["metadata"]["name"] not in server.names("Pod")
    assert "labels" not in stored["metadata"]


def test_only_creation_is_sent_to_the_webhook(control_plane: ControlPlane, admission: Admission) -> None:
    server, namespace = admission
    stored = create(control_plane, namespace, named(plain_pod()))
    name = stored["metadata"]["name"]
    path = f"{PODS.format(namespace)}/{name}"
    change = {"metadata": {"annotations": {"kvplace.io/smt": "require"}}}
    control_plane.request("PATCH", path, change, content_type=MERGE_PATCH)
    control_plane.request("DELETE", f"{path}?gracePeriodSeconds=0")
    assert server.names("Pod").count(name) == 1


def test_without_an_answer_only_objects_with_options_are_refused(
    control_plane: ControlPlane, namespace: str
) -> None:
    nobody = "https://127.0.0.1:1"
    with registered(
        control_plane, "admission/mutating-webhooks.yaml", [namespace], name=namespace, url=nobody
    ):
        refusal = refused(lambda: create(control_plane, namespace, plain_pod(), dry_run=True))
        assert 'failed calling webhook "pod.kvplace.io"' in message(refusal)
        create(control_plane, namespace, plain_pod(None))


# What is stored


def test_a_plain_pod_with_options_is_stored_with_its_request(
    control_plane: ControlPlane, admission: Admission
) -> None:
    _, namespace = admission
    pod = plain_pod(ASKS, {"limits": {"cpu": "4"}, "requests": {"cpu": "1"}})
    stored = create(control_plane, namespace, named(pod))
    assert stored["metadata"]["labels"] == {"kvplace.io/placed": "true"}
    assert written_request(stored).request.vcpus == 4
    assert stored["spec"]["schedulerName"] == "kvplace-scheduler"
    assert container(stored, "c0")["resources"] == {
        "limits": {"cpu": "4", "kvplace.io/vm": "0"},
        "requests": {"cpu": "4", "kvplace.io/vm": "0"},
    }


@pytest.mark.parametrize(
    ("whole", "requested"),
    [
        ({"requests": {"cpu": "1"}, "limits": {"cpu": "4"}}, "4"),
        ({"limits": {"cpu": "6"}}, "4"),
        ({"requests": {"cpu": "5"}}, "5"),
        ({"limits": {"memory": "1Gi"}}, "4"),
    ],
    ids=str,
)
def test_a_pod_with_resources_as_a_whole_is_stored_and_requests_its_cpus(
    control_plane: ControlPlane, admission: Admission, whole: Json, requested: str
) -> None:
    _, namespace = admission
    pod = plain_pod(ASKS, {"limits": {"cpu": "4"}, "requests": {"cpu": "1"}}, resources=whole)
    stored = create(control_plane, namespace, named(pod))
    assert container(stored, "c0")["resources"]["requests"]["cpu"] == "4"
    assert stored["spec"]["resources"]["requests"]["cpu"] == requested


def test_forged_results_are_not_stored(control_plane: ControlPlane, admission: Admission) -> None:
    _, namespace = admission
    forged = {"kvplace.io/placement": "{}", "kvplace.io/request": "{}", "other.io/key": "x"}
    stored = create(control_plane, namespace, named(plain_pod(forged)))
    assert stored["metadata"]["annotations"] == {"other.io/key": "x"}


# VMs and VMIs, through KubeVirt's own admission and virt-controller


def vmi_spec(**cpu: Any) -> Json:
    return {
        "domain": {"cpu": {"cores": 2, **cpu}, "memory": {"guest": "128Mi"}, "devices": {}},
        "terminationGracePeriodSeconds": 0,
    }


def vm_manifest(name: str, annotations: dict[str, str], **cpu: Any) -> Json:
    return {
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachine",
        "metadata": {"name": name},
        "spec": {
            "runStrategy": "Always",
            "template": {"metadata": {"annotations": annotations}, "spec": vmi_spec(**cpu)},
        },
    }


def test_a_vm_with_options_becomes_a_pod_with_a_request(
    control_plane: ControlPlane, admission: Admission, kubevirt: KubeVirt
) -> None:
    _, namespace = admission
    annotations = {**ASKS, "kvplace.io/placement": "left by a user"}
    kubevirt.create(VMS, namespace, vm_manifest("asks", annotations))
    pod = kubevirt.launcher_pod(namespace, "asks")
    path = f"/apis/kubevirt.io/v1/namespaces/{namespace}/{VMIS}/asks"
    vmi = control_plane.request("GET", path)

    assert json.loads(vmi["metadata"]["annotations"][HOOKS]) == [OUR_ENTRY]
    assert "kvplace.io/placement" not in vmi["metadata"]["annotations"] | pod["metadata"]["annotations"]
    written = written_request(pod)
    assert (written.vmi, written.request.vcpus) == (f"{namespace}/asks", 2)
    assert pod["spec"]["schedulerName"] == "kvplace-scheduler"
    assert container(pod, "compute")["resources"]["requests"]["cpu"] == "1985m"
    sidecar = container(pod, "hook-sidecar-0")
    assert sidecar["command"] == ["kvplace-hook"]
    assert sidecar["startupProbe"]["exec"] == {"command": ["kvplace-hook", "ready"]}
    assert "readinessProbe" not in sidecar
    assert sidecar["securityContext"]["readOnlyRootFilesystem"] is True
    assert {"name": "kvplace-pod", "mountPath": "/etc/kvplace-pod", "readOnly": True} in sidecar[
        "volumeMounts"
    ]
    control_plane.request("DELETE", f"/apis/kubevirt.io/v1/namespaces/{namespace}/{VMS}/asks")


VMI = "/apis/kubevirt.io/v1/namespaces/{}/virtualmachineinstances/{}"


@pytest.fixture
def stated(control_plane: ControlPlane, admission: Admission, kubevirt: KubeVirt) -> Iterator[str]:
    """Create a VMI with a request and a stated size; returns its path."""
    _, namespace = admission
    name = f"vmi-{secrets.token_hex(4)}"
    manifest = {"kind": "VirtualMachineInstance", "metadata": {"name": name, "annotations": ASKS}}
    kubevirt.create(VMIS, namespace, {**manifest, "spec": vmi_spec()})
    yield VMI.format(namespace, name)
    control_plane.request("DELETE", VMI.format(namespace, name))


def test_the_size_of_a_vm_reaches_its_pod_without_a_check_of_the_vmi(
    control_plane: ControlPlane, admission: Admission, kubevirt: KubeVirt, stated: str
) -> None:
    server, namespace = admission
    name = stated.rpartition("/")[2]
    metadata = control_plane.request("GET", stated)["metadata"]
    assert metadata["annotations"]["kvplace.io/vm-size"] == '{"vcpus":2,"memory":134217728}'
    pod = kubevirt.launcher_pod(namespace, name)
    assert written_request(pod).request.vcpus == 2
    assert "kvplace.io/vm-size" not in pod["metadata"]["annotations"]
    assert name not in server.vmis.read


def test_no_client_can_state_another_size_or_keep_changes_of_a_vmi_from_admission(
    control_plane: ControlPlane, stated: str
) -> None:
    size = "kvplace.io/vm-size"
    before = control_plane.request("GET", stated)["metadata"]["annotations"][size]
    for forged in (
        {"annotations": {"kvplace.io/vm-size": '{"vcpus":64}'}},
        {"annotations": {"kvplace.io/vm-size": None}},
        {"labels": {"kvplace.io/opted-in": None}},
    ):
        after = patching(control_plane, stated, **forged)()["metadata"]
        assert after["annotations"][size] == before
        assert after["labels"]["kvplace.io/opted-in"] == "true"


def test_only_changes_of_options_and_size_are_sent_of_a_vmi(
    control_plane: ControlPlane, admission: Admission, stated: str
) -> None:
    server, _ = admission
    name = stated.rpartition("/")[2]
    patching(control_plane, stated, annotations={"team": "a"}, labels={"team": "a"})()
    assert ("VirtualMachineInstance", "UPDATE", name) not in server.asked
    after = patching(control_plane, stated, annotations={"kvplace.io/cpu-policy": "share"})()
    assert ("VirtualMachineInstance", "UPDATE", name) in server.asked
    assert after["metadata"]["labels"]["kvplace.io/edited"] == "true"


def test_only_changes_of_template_and_options_are_sent_of_a_vm(
    control_plane: ControlPlane, admission: Admission, kubevirt: KubeVirt
) -> None:
    server, namespace = admission
    manifest = vm_manifest("changing", ASKS)
    manifest["spec"]["runStrategy"] = "Halted"
    kubevirt.create(VMS, namespace, manifest)
    path = f"/apis/kubevirt.io/v1/namespaces/{namespace}/{VMS}/changing"
    updated = ("VirtualMachine", "UPDATE", "changing")
    assert ("VirtualMachine", "CREATE", "changing") in server.asked

    def change(**fields: Json) -> None:
        control_plane.request("PATCH", path, fields, content_type=MERGE_PATCH)

    change(metadata={"labels": {"team": "a"}, "annotations": {"team": "a"}}, spec={"runStrategy": "Manual"})
    assert updated not in server.asked
    change(metadata={"annotations": {"cpu-set": "any"}})
    # The API server asks again when virt-controller has written the VM at the same moment.
    once = server.asked.count(updated)
    assert once >= 1
    change(spec={"template": {"metadata": {"annotations": {"cpu-set": "any"}}}})
    assert server.asked.count(updated) > once
    control_plane.request("DELETE", path)


def test_a_vm_without_options_and_its_vmi_and_pod_are_never_sent_to_the_webhooks(
    control_plane: ControlPlane, admission: Admission, kubevirt: KubeVirt
) -> None:
    server, namespace = admission
    kubevirt.create(VMS, namespace, vm_manifest("silent", {"other.io/key": "x"}, dedicatedCpuPlacement=False))
    pod = kubevirt.launcher_pod(namespace, "silent")
    assert "kvplace" not in json.dumps(pod)
    patching(control_plane, VMI.format(namespace, "silent"), annotations={"cpu-set": "one-numa"})()
    assert not [asked for asked in server.asked if "silent" in asked[2]]
    control_plane.request("DELETE", f"/apis/kubevirt.io/v1/namespaces/{namespace}/{VMS}/silent")


def test_a_vm_that_cannot_work_is_refused_when_it_is_applied(
    admission: Admission, kubevirt: KubeVirt
) -> None:
    _, namespace = admission
    with pytest.raises(RequestRefused) as refusal:
        kubevirt.create(VMS, namespace, vm_manifest("pinned", ASKS, dedicatedCpuPlacement=True))
    assert refusal.value.status == 422
    assert message(refusal.value) == (
        'admission webhook "vm.kvplace.io" denied the request: '
        f"VirtualMachine {namespace}/pinned: spec.template.spec.domain.cpu.dedicatedCpuPlacement and "
        "annotation cpu-set: 'one-numa' exclude each other, because the kubelet and KubeVirt would overwrite "
        "kvplace's pinning; remove one of the two"
    )


def test_a_vmi_with_a_field_of_the_wrong_type_is_refused_with_its_path(
    admission: Admission, kubevirt: KubeVirt
) -> None:
    _, namespace = admission
    manifest: Json = {
        "kind": "VirtualMachineInstance",
        "metadata": {"name": "odd", "annotations": ASKS},
        "spec": vmi_spec(cores="two"),
    }
    with pytest.raises(RequestRefused, match=r"spec\.domain\.cpu\.cores"):
        kubevirt.create(VMIS, namespace, manifest)


def test_kubectl_shows_the_warnings(
    control_plane: ControlPlane, admission: Admission, kubevirt: KubeVirt
) -> None:
    server, namespace = admission
    manifest = vm_manifest("warned", ASKS)
    manifest["metadata"]["annotations"] = {"cpu-set": "one-numa"}
    server.largest = 1
    try:
        with pytest.raises(KubectlFailed) as said:
            control_plane.kubectl(
                *("-n", namespace, "create", "-f", "-", "--dry-run=server", "--warnings-as-errors"),
                stdin=json.dumps(manifest),
            )
    finally:
        server.largest = None
    assert "move it to spec.template.metadata.annotations of the VM" in str(said.value)
    assert "2 vCPUs are more than the allocatable CPUs of any known machine (largest: 1)" in str(said.value)


def test_a_vm_that_was_wrong_before_kvplace_came_can_still_be_stopped_and_deleted(
    control_plane: ControlPlane, admission: Admission, kubevirt: KubeVirt
) -> None:
    server, namespace = admission
    path = f"/apis/kubevirt.io/v1/namespaces/{namespace}/{VMS}/older"
    manifest = vm_manifest("older", {"other.io/key": "x"}, dedicatedCpuPlacement=False)
    manifest["spec"]["runStrategy"] = "Halted"
    manifest["metadata"]["finalizers"] = ["kvplace.test/held"]
    kubevirt.create(VMS, namespace, manifest)

    def change(body: Json) -> Json:
        return control_plane.request("PATCH", path, body, content_type=MERGE_PATCH)

    with pytest.raises(RequestRefused, match="must be one of one-socket"):
        change({"spec": {"template": {"metadata": {"annotations": {"cpu-set": "near"}}}}})
    control_plane.request("DELETE", path)
    before = len(server.asked)
    change({"metadata": {"finalizers": []}})
    assert len(server.asked) == before


# The policy on results


@pytest.fixture
def placed(control_plane: ControlPlane, frozen: str) -> Iterator[str]:
    """Create a pod that asked and bind it, with results in the Binding; answers its path."""
    pod = named(plain_pod({"kvplace.io/request": "{}", "other.io/key": "x"}))
    pod["metadata"]["labels"] = {"kvplace.io/placed": "true"}
    stored = create(control_plane, frozen, pod)
    name = stored["metadata"]["name"]
    path = f"{PODS.format(frozen)}/{name}"
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": name, "annotations": {"kvplace.io/placement": "{}", "cpu-map": "{}"}},
        "target": {"kind": "Node", "name": "some-node"},
    }
    control_plane.request("POST", f"{path}/binding", binding)
    yield path
    control_plane.request("DELETE", f"{path}?gracePeriodSeconds=0")


def patching(plane: ControlPlane, path: str, **metadata: Any) -> Callable[[], Json]:
    return lambda: plane.request("PATCH", path, {"metadata": metadata}, content_type=MERGE_PATCH)


def test_the_binding_may_set_results(control_plane: ControlPlane, placed: str) -> None:
    annotations = control_plane.request("GET", placed)["metadata"]["annotations"]
    assert annotations == {
        "kvplace.io/request": "{}",
        "kvplace.io/placement": "{}",
        "cpu-map": "{}",
        "other.io/key": "x",
    }


@pytest.mark.parametrize("subresource", ["", "/status"])
@pytest.mark.parametrize("value", ["changed", None])
@pytest.mark.parametrize("key", ["kvplace.io/placement", "kvplace.io/request", "cpu-map"])
def test_no_client_changes_or_removes_a_result(
    control_plane: ControlPlane, placed: str, key: str, value: str | None, subresource: str
) -> None:
    with pytest.raises(RequestRefused) as refusal:
        patching(control_plane, placed + subresource, annotations={key: value})()
    assert refusal.value.status == 422
    assert key in message(refusal.value)
    assert message(refusal.value).endswith("delete the pod to have it placed again")


@pytest.mark.parametrize("value", ["false", None])
def test_no_client_hides_a_placed_pod_from_kvplace(
    control_plane: ControlPlane, placed: str, value: str | None
) -> None:
    with pytest.raises(
        RequestRefused, match=r"label kvplace\.io/placed is set by kvplace and cannot be changed"
    ):
        patching(control_plane, placed, labels={"kvplace.io/placed": value})()


def test_everything_else_of_a_placed_pod_may_change(control_plane: ControlPlane, placed: str) -> None:
    patching(control_plane, placed, annotations={"other.io/key": None}, labels={"app": "x"})()
    status = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    control_plane.request("PATCH", f"{placed}/status", status, content_type=MERGE_PATCH)
    stored = control_plane.request("GET", placed)
    assert stored["metadata"]["labels"] == {"app": "x", "kvplace.io/placed": "true"}
    assert stored["status"]["conditions"][0]["status"] == "True"


def test_a_pod_without_the_label_cannot_get_it_so_that_nothing_written_on_it_counts(
    control_plane: ControlPlane, frozen: str
) -> None:
    stored = create(control_plane, frozen, named(plain_pod(None)))
    path = f"{PODS.format(frozen)}/{stored['metadata']['name']}"
    patching(control_plane, path, annotations={"kvplace.io/placement": "{}", "kvplace.io/request": "{}"})()
    for subresource in ("", "/status"):
        with pytest.raises(RequestRefused, match="is set by kvplace"):
            patching(control_plane, path + subresource, labels={"kvplace.io/placed": "true"})()
    patching(control_plane, path, annotations={"cpu-map": "{}"})()
    patching(control_plane, path, annotations={"cpu-map": '{"socket0":["1"]}'})()
    patching(control_plane, path, annotations={"cpu-map": None})()


def test_another_scheduler_that_bound_a_placed_pod_may_set_its_cpu_map_once(
    control_plane: ControlPlane, frozen: str
) -> None:
    pod = named(plain_pod({"kvplace.io/request": "{}"}, nodeName="some-node"))
    pod["metadata"]["labels"] = {"kvplace.io/placed": "true"}
    path = f"{PODS.format(frozen)}/{create(control_plane, frozen, pod)['metadata']['name']}"
    patching(control_plane, path, annotations={"cpu-map": "{}"})()
    with pytest.raises(RequestRefused, match="annotation cpu-map is a result"):
        patching(control_plane, path, annotations={"cpu-map": '{"socket0":["1"]}'})()


def test_a_pod_with_options_gets_no_cpu_map_before_it_is_bound(
    control_plane: ControlPlane, frozen: str
) -> None:
    pod = named(plain_pod({"kvplace.io/request": "{}"}))
    pod["metadata"]["labels"] = {"kvplace.io/placed": "true"}
    path = f"{PODS.format(frozen)}/{create(control_plane, frozen, pod)['metadata']['name']}"
    with pytest.raises(RequestRefused, match="annotation cpu-map is a result"):
        patching(control_plane, path, annotations={"cpu-map": "{}"})()


def test_no_pod_is_made_with_a_placement(control_plane: ControlPlane, frozen: str) -> None:
    with pytest.raises(RequestRefused) as refusal:
        create(control_plane, frozen, named(forged_pod()))
    assert message(refusal.value).endswith(
        "annotation kvplace.io/placement is written by kvplace when it binds the pod; create the pod without "
        "it"
    )
