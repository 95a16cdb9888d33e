"""`kvplace explain` beside the real scheduler: before a VM exists, while it waits, and once it is bound."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.control_plane.cluster import ControlPlane
from harness.control_plane.hollow_node import NodesInBackground
from harness.control_plane.kubevirt_parts import KubeVirt
from harness.control_plane.watching import wait_for
from harness.kvplace_cluster.installation import Installation, described_nodes
from harness.kvplace_cluster.machines import node_shape
from harness.kvplace_cluster.vms import VMS, vm_manifest
from kvplace.core.errors import ExitCode
from kvplace.core.topology import Topology
from tests.cli.calls import Called, call_process

FAILED_TO_FIT = "no NUMA node with"


def was_refused(pod: dict[str, Any]) -> bool:
    """Return whether kube-scheduler has found no node for a pod."""
    conditions = pod.get("status", {}).get("conditions", [])
    return any(FAILED_TO_FIT in one.get("message", "") for one in conditions)


def is_stopped(vm: dict[str, Any]) -> bool:
    """Return whether KubeVirt calls a VM stopped."""
    return bool(vm.get("status", {}).get("printableStatus") == "Stopped")


def test_a_vm_is_explained_from_its_file_while_it_waits_and_once_it_is_bound(
    cluster: ControlPlane,
    virt: KubeVirt,
    kvplace: Installation,
    nodes: NodesInBackground,
    machine: Topology,
    vm_namespace: str,
    tmp_path: Path,
) -> None:
    def explain(*arguments: str) -> Called:
        return call_process(
            "explain", *arguments, "-n", vm_namespace, "--kubeconfig", str(cluster.kubeconfig)
        )

    size = max(node.cpus.bit_count() for node in machine.numa_nodes)
    wide = vm_manifest("wide", cores=size + 1, annotations={"cpu-set": "one-numa"})
    file = tmp_path / "wide.json"
    file.write_text(json.dumps({"apiVersion": "kubevirt.io/v1", **wide}))
    nodes.do(nodes.nodes.add(node_shape("first", machine)))
    with described_nodes(kvplace, {"first": machine}):
        before = explain("-f", str(file), "-o", "json")
        assert before.code == ExitCode.DOES_NOT_FIT, before.err
        groups = json.loads(before.out)["fits"]["refusals"]
        refusal = next(group for group in groups if "first" in group["nodes"])
        assert refusal["reason"] == "NoNumaNodeFits"

        virt.create(VMS, vm_namespace, wide)
        pod = virt.launcher_pod(vm_namespace, "wide")["metadata"]["name"]
        pods = f"/api/v1/namespaces/{vm_namespace}/pods"
        said = wait_for(cluster, pods, pod, was_refused)
        waiting = explain("vm/wide")
        assert waiting.code == ExitCode.DOES_NOT_FIT, waiting.err
        assert refusal["message"] in waiting.out
        assert any(refusal["message"] in one.get("message", "") for one in said["status"]["conditions"])
        assert "would fit" in waiting.out

        virt.create(VMS, vm_namespace, vm_manifest("small"))
        pod = virt.launcher_pod(vm_namespace, "small")["metadata"]["name"]
        bound = wait_for(cluster, pods, pod, lambda pod: bool(pod["spec"].get("nodeName")))
        cpu_map = json.loads(bound["metadata"]["annotations"]["cpu-map"])
        running = explain("vm/small", "-o", "json")
        assert running.code == ExitCode.DONE, running.err
        (seat,) = json.loads(running.out)["pods"]
        assert seat["node"] == "first"
        assert [str(cpu) for cpu in seat["placement"]["vcpus"]] == [
            c for ids in cpu_map.values() for c in ids
        ]
        assert "first" in explain("vmi/small").out

        nobody = explain("vm/nobody")
        assert (nobody.code, nobody.out) == (ExitCode.FAILED, "")
        assert f"there is no VirtualMachine {vm_namespace}/nobody" in nobody.err

        halted = vm_manifest("halted")
        halted["spec"]["runStrategy"] = "Halted"
        virt.create(VMS, vm_namespace, halted)
        stopped = f"/apis/kubevirt.io/v1/namespaces/{vm_namespace}/{VMS}"
        wait_for(cluster, stopped, "halted", is_stopped)
        idle = explain("vm/halted", "-o", "json")
        assert (idle.code, json.loads(idle.out)["state"]) == (ExitCode.DONE, "Stopped"), idle.err
        assert f"see `kubectl kvplace explain vm/halted -n {vm_namespace}`" in explain("vmi/halted").err
        elsewhere = call_process("explain", "vm/halted", "--kubeconfig", str(cluster.kubeconfig))
        assert f"but one of this name in {vm_namespace}: choose its namespace with -n" in elsewhere.err

        for name in ("wide", "small", "halted"):
            cluster.request("DELETE", f"/apis/kubevirt.io/v1/namespaces/{vm_namespace}/{VMS}/{name}")
            virt.gone(VMS, vm_namespace, name)
