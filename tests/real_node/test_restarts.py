"""Anything of a real node may be killed: the VM goes on where it is, and what comes back finds it there."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from harness.control_plane.cluster import MERGE_PATCH, KubectlFailed
from harness.control_plane.pod_status import container_runs
from harness.control_plane.watching import is_ready, wait_for
from harness.kvplace_cluster.installation import NAMESPACE
from harness.kvplace_cluster.vms import VMIS, vmi_manifest
from harness.real_node.cluster import RealCluster
from harness.real_node.kvplace_pods import AGENT
from harness.waiting import PATIENCE_S
from tests.real_node.killing import kill_container, pods_of
from tests.real_node.vms import (
    LEDGERS,
    ON_ITS_OWN,
    SMALL_DOMAIN,
    TOPOLOGIES,
    Vm,
    Vms,
    begin_to_migrate,
    end_of_migration,
    end_of_pod,
    ledger,
    uid_of_target,
)

Json = dict[str, Any]


@pytest.fixture
def vm(vms: Vms) -> Vm:
    """Start a VM that owns CPU 1 of n1."""
    running = vms.start("lasting", node="n1")
    running.pinned()
    return running


def test_a_vm_outlives_every_program_around_it_and_stays_on_its_cpu(vms: Vms, vm: Vm) -> None:
    cluster = vms.cluster
    node = cluster.nodes["n1"]
    qemu = vm.compute.qemu()

    node.runtime.server.kill()
    node.runtime.start()
    # After the runtime: without one a kubelet ends, and what starts it again elsewhere is systemd.
    node.kubelet.server.kill()
    node.kubelet.start()
    for pod in pods_of(cluster, NAMESPACE, "serve"):
        kill_container(cluster, NAMESPACE, pod, "serve")
    (agent,) = [pod for pod in pods_of(cluster, AGENT, "agent") if pod["spec"]["nodeName"] == "n1"]
    kill_container(cluster, AGENT, agent, "agent")
    node.virt_handler.server.kill()
    node.virt_handler.start()

    assert vm.compute.qemu() == qemu
    assert {thread.cpus for thread in vm.threads().threads} == {0b10}
    assert ledger(cluster, "n1")["owners"] == {"1": vm.pod_uid}
    newcomer = vms.busy_pod("newcomer", "n1")
    assert newcomer.cpus() == 0b01
    wait_for(
        cluster.plane,
        TOPOLOGIES,
        "n1",
        lambda seen: (
            [entry["uid"] for entry in seen["status"].get("pods", []) if entry["pinned"]] == [vm.pod_uid]
        ),
    )


def test_a_migration_ends_well_when_the_agents_of_both_nodes_are_killed_in_the_middle(vms: Vms) -> None:
    vm = vms.start("goes")
    vm.pinned()
    source = vm.node.name
    begin_to_migrate(vms, vm, "away")
    uid_of_target(vms, vm)
    for agent in pods_of(vms.cluster, AGENT, "agent"):
        kill_container(vms.cluster, AGENT, agent, "agent")
    assert end_of_migration(vms, vm, "away") == "Succeeded"

    assert end_of_pod(vms, vm)["status"]["phase"] == "Succeeded"
    wait_for(vms.cluster.plane, LEDGERS, source, lambda seen: not seen["spec"].get("claims"))
    moved = vms.running("goes")
    moved.pinned()
    assert moved.node.name != source
    assert {thread.cpus for thread in moved.threads().threads} == {0b10 if source == "n2" else 0b01}


@pytest.fixture
def without_agents(kvplace: RealCluster) -> Iterator[None]:
    """Remove the agent from every node while the test's first part runs; `bring_back` returns it."""
    send_agents_to(kvplace, "nowhere")
    yield
    bring_back(kvplace)


def send_agents_to(cluster: RealCluster, label: str | None) -> None:
    path = f"/apis/apps/v1/namespaces/{AGENT}/daemonsets/{AGENT}"
    patch = {"spec": {"template": {"spec": {"nodeSelector": {"kvplace.test/agents": label}}}}}
    cluster.plane.request("PATCH", path, patch, content_type=MERGE_PATCH)
    wanted = 0 if label else len(cluster.nodes)
    wait_for(
        cluster.plane,
        f"/apis/apps/v1/namespaces/{AGENT}/daemonsets",
        AGENT,
        lambda seen: (
            seen["status"].get("observedGeneration") == seen["metadata"]["generation"]
            and seen["status"].get("numberReady", 0) == wanted
            and seen["status"].get("currentNumberScheduled", 0) == wanted
            and seen["status"].get("numberMisscheduled", 0) == 0  # those that go have ended
            and seen["status"].get("updatedNumberScheduled", 0) == wanted
        ),
    )


def bring_back(cluster: RealCluster) -> None:
    send_agents_to(cluster, None)


@pytest.mark.usefixtures("without_agents")
def test_a_vm_that_owns_cpus_waits_for_the_agent_and_starts_when_it_is_there(vms: Vms) -> None:
    cluster = vms.cluster
    manifest = vmi_manifest(
        "waits",
        cores=1,
        annotations=ON_ITS_OWN,
        domain=SMALL_DOMAIN,
        nodeSelector={"kubernetes.io/hostname": "n1"},
    )
    cluster.kubevirt.create(VMIS, vms.namespace, manifest)
    pod = cluster.kubevirt.launcher_pod(vms.namespace, "waits")["metadata"]["name"]
    held = wait_for(cluster.plane, vms.pods, pod, hook_runs)
    assert not is_ready(held)
    # Nothing of the VM runs until the sidecar is ready.
    assert not container_runs(held, "compute")
    # The probe of the sidecar names the missing condition.
    assert "CPU" in what_the_probe_says(vms, pod)
    assert json.loads(held["metadata"]["annotations"]["kvplace.io/placement"])["enforced"] is True

    bring_back(cluster)
    vms.running("waits").pinned()


@pytest.mark.usefixtures("without_agents")
def test_a_vm_that_may_float_starts_without_the_agent(vms: Vms) -> None:
    running = vms.start("floats", annotations={**ON_ITS_OWN, "kvplace.io/on-failure": "float"}, node="n1")
    assert is_ready(running.pod())
    assert running.threads().vcpus() == {0: 0b10}


def what_the_probe_says(vms: Vms, pod: str) -> str:
    """Ask the probe of a sidecar that is not ready, once its hook listens: its container runs before that."""
    ends = time.monotonic() + PATIENCE_S
    while True:
        with pytest.raises(KubectlFailed) as failed:
            vms.cluster.plane.kubectl(
                *("exec", "--namespace", vms.namespace, pod, "-c", "hook-sidecar-0", "--"),
                *("kvplace-hook", "ready", "--once"),
            )
        if "does not listen" not in str(failed.value) or time.monotonic() > ends:
            return str(failed.value)


def hook_runs(pod: Json) -> bool:
    return container_runs(pod, "hook-sidecar-0")
