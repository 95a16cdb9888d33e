"""Templates started one after the other on a real node, each with its own words and devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tenacity import Retrying, stop_after_delay, wait_fixed

from harness.kvplace_cluster.vms import VMS
from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.request import Policy
from tests.real_node.vms import SMALL_DOMAIN, Vms, ledger

TEMPLATES = Path(__file__).resolve().parents[2] / "vm-templates"
POLICIES = {
    "analytics": Policy.EXCLUSIVE,
    "batch-worker": Policy.IMMOVABLE,
    "ci-runner": Policy.SHARE,
    "database": Policy.EXCLUSIVE,
    "game-server": Policy.EXCLUSIVE,
}
"""Templates besides web-server that fit here with more than their size, with their policies."""
NOT_HERE = {
    "arm64-server": "an arm64 node",
    "gpu-inference": "a GPU",
    "gpu-training": "a GPU, and a DRA driver",
    "in-memory-database": "huge pages, and a seccomp profile that allows to bind memory",
    "latency-test": "a CPU besides the vCPU's for QEMU, and the packages that its guest installs",
    "network-function": "huge pages, a network card with SR-IOV, and a CPU besides the vCPU's for QEMU",
    "trading-engine": "a CPU besides the vCPU's for QEMU",
    "virtual-desktop": "nothing: it shares its CPUs, see below",
    "web-server": "nothing: test_pinned_vms.py starts it",
    "windows-server": "KVM, for its Hyper-V features, and a disk with Windows",
}
"""The resources that the others need and that a node of two CPUs lacks."""


def small(name: str) -> dict[str, Any]:
    """Read a template and give its VM the size of this machine, and a guest that needs no time to stop."""
    vm: dict[str, Any] = yaml.safe_load((TEMPLATES / f"{name}.yaml").read_text())
    spec = vm["spec"]["template"]["spec"]
    domain = spec["domain"]
    domain["cpu"] = {"cores": 1}
    # A VM that owns no CPU requests its CPUs beside those of its sidecar: more than this node has.
    resources = {**SMALL_DOMAIN["resources"], "requests": {"cpu": "100m"}}
    domain |= {"memory": SMALL_DOMAIN["memory"], "resources": resources}
    spec["terminationGracePeriodSeconds"] = 0
    spec["nodeSelector"] = {"kubernetes.io/hostname": "n1"}
    return vm


def test_every_template_is_started_or_listed_with_its_needs() -> None:
    assert {path.stem for path in TEMPLATES.glob("*.yaml")} == POLICIES.keys() | NOT_HERE.keys()


@pytest.mark.parametrize("name", POLICIES)
def test_a_template_runs_where_its_policy_states(vms: Vms, name: str) -> None:
    vms.cluster.kubevirt.create(VMS, vms.namespace, small(name))
    running = vms.running(name)
    running.pinned()

    placement = running.bound().placement
    assert placement.policy is POLICIES[name]
    assert not placement.floats
    threads = running.threads()
    assert threads.vcpus() == {0: placement.cpus_of_vcpu(0)}
    assert set(threads.emulator().values()) == {placement.emulator_cpus or placement.cpus}
    assert set(threads.io_threads().values()) <= {*placement.io_thread_cpus, placement.emulator_cpus}
    owners = ledger(vms.cluster, "n1")["owners"]
    assert owners == ({"1": running.pod_uid} if placement.policy is Policy.EXCLUSIVE else {})
    (cpus,) = running.cpu_map().values()
    assert cpus == [str(cpu) for cpu in placement.cpus_in_order]


def test_a_template_of_policy_numa_runs_on_all_shared_cpus_of_its_numa_node(vms: Vms) -> None:
    vms.cluster.kubevirt.create(VMS, vms.namespace, small("virtual-desktop"))
    running = vms.running("virtual-desktop")
    running.pinned()

    placement = running.bound().placement
    assert placement.policy is Policy.NUMA
    assert not placement.floats
    # The reserved CPU belongs to what is shared.
    pool = placement.cpus | parse_cpu_list("0")
    # Until the VM before it has ended, the pool is smaller; the agent sets threads anew once a second.
    for attempt in Retrying(stop=stop_after_delay(20), wait=wait_fixed(0.2), reraise=True):
        with attempt:
            assert running.compute.cpus() == pool
            threads = running.threads()
            assert {*threads.vcpus().values(), *threads.emulator().values()} == {pool}
    assert ledger(vms.cluster, "n1")["owners"] == {}
