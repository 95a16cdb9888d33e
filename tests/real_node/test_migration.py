"""A VM that migrates between two nodes with other CPUs to give out, with every real part on both sides."""

from __future__ import annotations

import re
from http.client import HTTPConnection
from xml.etree import ElementTree as ET

from harness.control_plane.cluster import MERGE_PATCH
from harness.control_plane.watching import condition, is_ready, wait_for
from harness.kvplace_cluster.vms import VMIS, VMS, vm_manifest
from harness.real_node.cluster import RealCluster
from harness.real_node.kvplace_pods import AGENT
from harness.waiting import PATIENCE_S
from tests.real_node.vms import LEDGERS, ON_ITS_OWN, SMALL_DOMAIN, VIRSH, Vm, Vms, ledger, migrate

OWN_CPU = {"n1": 1, "n2": 0}
"""The CPU that each node has to give: the other one is reserved."""
SMALL_REQUEST = {"limits": {"cpu": "1"}, "requests": {"cpu": "100m"}}
"""For a VM that has given its CPUs back: its pod requests then what KubeVirt reports."""


def test_a_vm_is_on_the_cpu_of_its_target_at_once_and_leaves_no_claim_behind(vms: Vms) -> None:
    cluster = vms.cluster
    vm = vms.start("moves")
    vm.pinned()
    source = vm.node.name
    target = next(name for name in OWN_CPU if name != source)
    assert {thread.cpus for thread in vm.threads().threads} == {1 << OWN_CPU[source]}
    drifts = drifts_counted(cluster, target)

    migrate(vms, vm)

    moved = vms.running("moves")
    assert moved.pod_uid != vm.pod_uid
    assert moved.node.name == target
    assert {thread.name: thread.cpus for thread in moved.threads().threads} == {
        thread.name: 1 << OWN_CPU[target] for thread in moved.threads().threads
    }
    assert moved.pinned() == f"revision 1: all threads run on CPU {OWN_CPU[target]} as placed"
    # They came up there: nothing had to be repaired.
    assert drifts_counted(cluster, target) == drifts
    (pin,) = domain_of(moved).iterfind("cputune/vcpupin[@vcpu='0']")
    assert pin.get("cpuset") == str(OWN_CPU[target])
    assert moved.cpu_map() == {"socket0": [str(OWN_CPU[target])]}
    assert ledger(cluster, target)["owners"] == {str(OWN_CPU[target]): moved.pod_uid}
    wait_for(cluster.plane, LEDGERS, source, lambda seen: not seen["spec"].get("claims"))


def test_a_vm_that_has_given_its_cpus_back_migrates_and_runs_unpinned(vms: Vms) -> None:
    vm = vms.start("modest", domain={**SMALL_DOMAIN, "resources": SMALL_REQUEST})
    vm.pinned()
    source = vm.node.name
    vm.ask({"kvplace.io/cpu-policy": "none"})
    wait_for(vms.cluster.plane, LEDGERS, source, lambda seen: not seen["spec"].get("claims"))

    migrate(vms, vm)

    moved = vms.running("modest")
    assert moved.node.name != source
    wait_for(vms.cluster.plane, vms.pods, moved.pod()["metadata"]["name"], is_ready)
    assert ledger(vms.cluster, moved.node.name)["owners"] == {}


def test_a_socket_that_is_plugged_into_a_vm_comes_with_its_migration(vms: Vms) -> None:
    cluster = vms.cluster
    domain = {**SMALL_DOMAIN, "resources": SMALL_REQUEST, "cpu": {"sockets": 1, "cores": 1}}
    manifest = vm_manifest("grows", annotations=ON_ITS_OWN, domain=domain)
    cluster.kubevirt.create(VMS, vms.namespace, manifest)
    vm = vms.running("grows")
    vm.pinned()
    # A node has one CPU to give.
    vm.ask({"kvplace.io/cpu-policy": "none"})
    wait_for(cluster.plane, LEDGERS, vm.node.name, lambda seen: not seen["spec"].get("claims"))

    grown = {"spec": {"template": {"spec": {"domain": {"cpu": {"sockets": 2}}}}}}
    path = f"/apis/kubevirt.io/v1/namespaces/{vms.namespace}/{VMS}/grows"
    cluster.plane.request("PATCH", path, grown, content_type=MERGE_PATCH)
    vmis = f"/apis/kubevirt.io/v1/namespaces/{vms.namespace}/{VMIS}"
    wait_for(cluster.plane, vmis, "grows", lambda seen: condition(seen, "HotVCPUChange") == "True")
    migrate(vms, vm)

    moved = vms.running("grows")
    assert moved.node.name != vm.node.name
    assert moved.threads().vcpus().keys() == {0, 1}


def drifts_counted(cluster: RealCluster, node: str) -> float:
    """Read from the metrics of a node's agent how often it found threads elsewhere."""
    path = f"/api/v1/namespaces/{AGENT}/pods?fieldSelector=spec.nodeName={node}"
    (agent,) = cluster.plane.request("GET", path)["items"]
    connection = HTTPConnection(agent["status"]["podIP"], 8082, timeout=PATIENCE_S)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    found = re.findall(r"^kvplace_agent_drifts_total\{.*\} ([0-9.]+)$", text, re.MULTILINE)
    return sum(map(float, found))


def domain_of(vm: Vm) -> ET.Element:
    """The pins that libvirt in the VM's pod knows of."""
    vms = vm.vms
    text = vms.cluster.plane.kubectl(
        *("exec", "--namespace", vms.namespace, vm.pod()["metadata"]["name"], "-c", "compute", "--"),
        *VIRSH,
        *("dumpxml", "--domain", f"{vms.namespace}_{vm.name}"),
    )
    return ET.fromstring(re.sub(r"^[^<]*", "", text))
