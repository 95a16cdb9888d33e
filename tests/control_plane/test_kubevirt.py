"""KubeVirt in the tests' cluster: what tests of the whole way of a VM take for granted about it."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.control_plane.cluster import ControlPlane, RequestRefused
from harness.control_plane.hollow_node import NodeShape, nodes_in_background
from harness.control_plane.kubevirt_parts import NAMESPACE, KubeVirt
from tests.kubevirt_documents import pods

VMIS = "virtualmachineinstances"
VMS = "virtualmachines"


def small_vmi(name: str, **changes: Any) -> dict[str, Any]:
    domain = {"cpu": {"cores": 2}, "memory": {"guest": "1Gi"}, "devices": {}, **changes.pop("domain", {})}
    return {
        "kind": "VirtualMachineInstance",
        "metadata": {"name": name, **changes.pop("metadata", {})},
        "spec": {"domain": domain, "terminationGracePeriodSeconds": 0, **changes},
    }


def small_vm(name: str, **changes: Any) -> dict[str, Any]:
    vmi = small_vmi(name, **changes)
    return {
        "kind": "VirtualMachine",
        "metadata": {"name": name},
        "spec": {"runStrategy": "Always", "template": {"metadata": {}, "spec": vmi["spec"]}},
    }


@pytest.fixture
def node(control_plane: ControlPlane) -> Iterator[str]:
    """Run a hollow node, on which pods are Ready at once; no scheduler schedules to it by himself."""
    name = f"kubevirt-{secrets.token_hex(4)}"
    with nodes_in_background(control_plane, [NodeShape(name)]):
        yield name


def bind(plane: ControlPlane, pod: dict[str, Any], node: str) -> None:
    meta = pod["metadata"]
    plane.request(
        "POST",
        f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/binding",
        {"metadata": {"name": meta["name"]}, "target": {"kind": "Node", "name": node}},
    )


def test_a_vmi_gets_a_pod_and_is_scheduled_once_the_pod_is_ready(
    control_plane: ControlPlane, kubevirt: KubeVirt, namespace: str, node: str
) -> None:
    kubevirt.create(VMIS, namespace, small_vmi("one"))
    pod = kubevirt.launcher_pod(namespace, "one")
    kubevirt.vmi_in_phase(namespace, "one", "Scheduling")

    bind(control_plane, pod, node)

    vmi = kubevirt.vmi_in_phase(namespace, "one", "Scheduled")
    assert vmi["status"]["nodeName"] == node
    assert vmi["status"]["activePods"] == {pod["metadata"]["uid"]: node}
    assert vmi["metadata"]["labels"]["kubevirt.io/nodeName"] == node


def test_a_vm_becomes_a_vmi_and_a_pod_and_goes_when_it_is_deleted(
    control_plane: ControlPlane, kubevirt: KubeVirt, namespace: str, node: str
) -> None:
    kubevirt.create(VMS, namespace, small_vm("one"))
    pod = kubevirt.launcher_pod(namespace, "one")
    bind(control_plane, pod, node)
    kubevirt.vmi_in_phase(namespace, "one", "Scheduled")

    control_plane.request("DELETE", f"/apis/kubevirt.io/v1/namespaces/{namespace}/{VMS}/one")
    kubevirt.gone(VMIS, namespace, "one")
    kubevirt.gone(VMS, namespace, "one")


def test_admission_sets_the_defaults_of_a_vmi(kubevirt: KubeVirt, namespace: str) -> None:
    vmi = kubevirt.create(VMIS, namespace, small_vmi("one", domain={"cpu": {"cores": 2}}))

    assert vmi["spec"]["architecture"] == "amd64"
    assert vmi["spec"]["domain"]["machine"] == {"type": "q35"}
    assert vmi["status"]["runtimeUser"] == 107
    # Given one of the three, KubeVirt leaves the other two alone.
    assert {key: vmi["spec"]["domain"]["cpu"].get(key) for key in ("sockets", "cores", "threads")} == {
        "sockets": None,
        "cores": 2,
        "threads": None,
    }


MALFORMED = {
    "a disk without a volume": (
        {"devices": {"disks": [{"name": "root", "disk": {}}]}},
        r"disks\[0\]\.[nN]ame",
    ),
    "memory that is no multiple of its huge page": (
        {"memory": {"guest": "1025Mi", "hugepages": {"pageSize": "2Mi"}}},
        "not a multiple of the page size",
    ),
    "half a dedicated CPU": (
        {"cpu": {"dedicatedCpuPlacement": True}, "resources": {"requests": {"cpu": "1500m"}}},
        "CPU requests must be an int",
    ),
}


@pytest.mark.parametrize(("domain", "complaint"), MALFORMED.values(), ids=MALFORMED.keys())
@pytest.mark.parametrize("kind", [VMIS, VMS])
def test_a_malformed_spec_is_refused_with_the_fault(
    kubevirt: KubeVirt, namespace: str, kind: str, domain: dict[str, Any], complaint: str
) -> None:
    manifest = (small_vm if kind == VMS else small_vmi)("one", domain=domain)
    with pytest.raises(RequestRefused, match=complaint) as refused:
        kubevirt.create(kind, namespace, manifest)
    assert refused.value.status == 422


def test_a_hook_sidecar_of_the_vmi_becomes_a_container_of_the_pod(kubevirt: KubeVirt, namespace: str) -> None:
    asked = {"annotations": {"hooks.kubevirt.io/hookSidecars": '[{"image": "example.test/hook"}]'}}
    kubevirt.create(VMIS, namespace, small_vmi("one", metadata=asked))
    pod = kubevirt.launcher_pod(namespace, "one")

    (sidecar,) = (c for c in pod["spec"]["containers"] if c["name"] == "hook-sidecar-0")
    assert sidecar["image"] == "example.test/hook"
    (compute,) = (c for c in pod["spec"]["containers"] if c["name"] == "compute")
    assert "--hook-sidecars" in compute["command"]


def test_kubevirts_processes_have_the_rights_of_their_service_accounts_and_no_more(
    control_plane: ControlPlane, kubevirt: KubeVirt
) -> None:
    assert kubevirt.virt_controller.is_running
    for account in ("kubevirt-controller", "kubevirt-apiserver"):
        token = control_plane.service_account_token(NAMESPACE, account)
        with pytest.raises(RequestRefused, match=account) as refused:
            control_plane.request("GET", "/api/v1/namespaces/kube-system/secrets", token=token)
        assert refused.value.status == 403


@pytest.mark.parametrize("program", ["virt-controller", "webhooks"])
def test_a_process_of_kubevirt_ends_when_its_starter_lets_go(
    control_plane: ControlPlane, kubevirt_programs: Path, program: str
) -> None:
    kubeconfig = f"--kubeconfig={control_plane.kubeconfig}"
    flags = {"virt-controller": ["--listen=127.0.0.1", "--port=0"], "webhooks": []}[program]
    ended = subprocess.run(
        [kubevirt_programs / program, kubeconfig, *flags],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr.decode()


def test_the_pods_that_tests_read_are_those_that_kubevirt_makes(kubevirt: KubeVirt, namespace: str) -> None:
    """After a change of KubeVirt's version: `python -m tests.kubevirt_documents`."""
    assert pods.made(kubevirt, namespace) == {name: pods.kept(name) for name in pods.VMIS}
