"""A VM on a real node: by the kernel, its threads, and no others, are on the CPUs of its claim."""

from __future__ import annotations

import time
from pathlib import Path

import yaml

from harness.control_plane.watching import condition, wait_for
from harness.kvplace_cluster.vms import VMIS, VMS
from harness.real_node.kernel_view import ContainerInKernel
from harness.waiting import wait_until
from kvplace.core.cpuset import parse_cpu_list
from tests.real_node.vms import LEDGERS, PINNED, SMALL_DOMAIN, TOPOLOGIES, Vms, ledger

TEMPLATES = Path(__file__).resolve().parents[2] / "vm-templates"
MEASURED_S = 2.0


def test_a_vm_from_a_template_runs_with_every_thread_where_its_cpu_map_states_and_gives_its_cpus_back(
    vms: Vms,
) -> None:
    cluster = vms.cluster
    vm = yaml.safe_load((TEMPLATES / "web-server.yaml").read_text())
    spec = vm["spec"]["template"]["spec"]
    domain = spec["domain"]
    # Its size is all that does not fit the machine of a test.
    domain["cpu"]["cores"] = 1
    domain |= {"memory": SMALL_DOMAIN["memory"], "resources": SMALL_DOMAIN["resources"]}
    spec["nodeSelector"] = {"kubernetes.io/hostname": "n1"}
    spec["terminationGracePeriodSeconds"] = 0
    cluster.kubevirt.create(VMS, vms.namespace, vm)
    running = vms.running("web-server")

    assert running.pinned() == "revision 1: vCPUs run on CPU 1, emulator threads run on CPU 0 as placed"
    assert running.cpu_map() == {"socket0": ["1"]}
    placement = running.bound().placement
    threads = running.threads()
    assert threads.vcpus() == {0: 0b10}
    assert set(threads.emulator().values()) == {placement.emulator_cpus}
    assert running.compute.cpus() == placement.cpus | placement.emulator_cpus
    assert ledger(cluster, "n1")["owners"] == {"1": running.pod_uid}

    status = wait_for(
        cluster.plane,
        TOPOLOGIES,
        "n1",
        lambda seen: any(entry["pinned"] for entry in seen.get("status", {}).get("pods", [])),
    )["status"]
    assert status["enforcement"] == "nri"
    (entry,) = status["pods"]
    assert (entry["uid"], entry["revision"], entry["drift"]) == (running.pod_uid, 1, "")

    qemu = running.compute.qemu()
    cluster.plane.request("DELETE", f"/apis/kubevirt.io/v1/namespaces/{vms.namespace}/{VMS}/web-server")
    wait_for(cluster.plane, LEDGERS, "n1", lambda seen: not seen["spec"]["owners"])
    assert not Path(f"/proc/{qemu}").exists()
    cluster.kubevirt.gone(VMIS, vms.namespace, "web-server")
    wait_for(cluster.plane, TOPOLOGIES, "n1", lambda seen: not seen["status"].get("pods"))


def test_busy_containers_are_off_the_vms_cpu_the_running_one_and_the_new_one_from_its_first_instruction(
    vms: Vms,
) -> None:
    before = vms.busy_pod("before", "n1")
    assert before.cpus() == 0b11
    vm = vms.start("quiet", node="n1")
    (own,) = {cpus.bit_length() - 1 for cpus in vm.threads().vcpus().values()}
    after = vms.busy_pod("after", "n1")

    def first_words() -> list[str]:
        return vms.cluster.plane.kubectl("logs", "--namespace", vms.namespace, "after").split()

    wait_until(first_words, lambda: "the container has printed nothing")
    allowed = parse_cpu_list(first_words()[1])
    assert allowed == 0b11 & ~(1 << own)
    assert before.cpus() == after.cpus() == allowed

    started = [container.time_on_cpus() for container in (before, after)]
    time.sleep(MEASURED_S)  # what is measured is time itself
    ended = [container.time_on_cpus() for container in (before, after)]
    for start, end in zip(started, ended, strict=True):
        used = [later - earlier for earlier, later in zip(start, end, strict=True)]
        assert used[own] == 0
        assert sum(used) > 0.01e9 * MEASURED_S, "it should be busy, however loaded the machine is"
    # runc prepares a container in its group before the container's own program begins.
    assert started[1][own] < 50e6


def test_the_containers_of_an_exclusive_plain_pod_have_its_cpus_and_no_others(vms: Vms) -> None:
    plane = vms.cluster.plane
    container = {
        "name": "work",
        "image": "busybox:1",
        "command": ["sleep", "inf"],
        "resources": {"requests": {"cpu": "100m"}, "limits": {"cpu": "1"}},
    }
    spec = {
        "nodeSelector": {"kubernetes.io/hostname": "n1"},
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
    }
    metadata = {"name": "exclusive", "annotations": {"cpu-set": "any"}}
    plane.request("POST", vms.pods, {"metadata": metadata, "spec": spec})
    pod = wait_for(plane, vms.pods, "exclusive", lambda seen: condition(seen, PINNED) == "True")

    running = ContainerInKernel.of_pod(vms.cluster.nodes["n1"].sandbox, pod, "work")
    assert running.cpus() == 0b10
    assert ledger(vms.cluster, "n1")["owners"] == {"1": pod["metadata"]["uid"]}
