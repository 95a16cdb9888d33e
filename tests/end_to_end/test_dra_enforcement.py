"""Exact cores for dra-driver-cpu: the real kube-scheduler allocates, and Bind hands cores over."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.control_plane.cluster import ControlPlane
from harness.control_plane.hollow_node import nodes_in_background
from harness.control_plane.watching import wait_for
from harness.kvplace_cluster.installation import Installation, described_nodes
from harness.kvplace_cluster.machines import node_shape, two_socket_machine
from kvplace.core.cpuset import format_cpu_list, parse_cpu_list
from kvplace.core.placement import PodPlacement
from kvplace.core.well_known_names import PLACEMENT
from tests.docs.blocks import block

Json = dict[str, Any]
DRA = "/apis/resource.k8s.io/v1"
TOPOLOGIES = "/apis/kvplace.io/v1alpha1/nodetopologies"
MACHINE = two_socket_machine(cores_per_socket=8, reserved_cores=0)
"""Two sockets of sixteen CPUs."""
MERGE = "application/merge-patch+json"


class CpuDriver:
    """dra-driver-cpu with `--group-by=machine`, as far as the API server sees it, and its users."""

    def __init__(self, cluster: ControlPlane, namespace: str) -> None:
        self.cluster = cluster
        self.namespace = namespace

    def publish(self, node: str) -> None:
        """Publish the device of a node, and the mode of its agent."""
        device = {
            "name": "cpudevmachine",
            "allowMultipleAllocations": True,
            "attributes": {"dra.cpu/numCPUs": {"int": 32}},
            "capacity": {"dra.cpu/cpu": {"value": "32"}},
        }
        pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
        spec = {"driver": "dra.cpu", "nodeName": node, "pool": pool, "devices": [device]}
        self.cluster.request("POST", f"{DRA}/resourceslices", {"metadata": {"name": node}, "spec": spec})
        mode = {"status": {"enforcement": "dra"}}
        self.cluster.request("PATCH", f"{TOPOLOGIES}/{node}/status", mode, content_type=MERGE)

    @property
    def claims(self) -> str:
        return f"{DRA}/namespaces/{self.namespace}/resourceclaims"

    def create_claim(self, name: str, cpus: int = 6) -> None:
        """Make the ResourceClaim of the page, for so many CPUs."""
        document = yaml.safe_load(block("docs/devices.md", "      exactly: {deviceClassName: dra.cpu"))
        (request,) = document["spec"]["devices"]["requests"]
        request["exactly"]["capacity"]["requests"]["dra.cpu/cpu"] = str(cpus)
        self.cluster.request("POST", self.claims, {"metadata": {"name": name}, **document})

    def create_pod(self, name: str, cpus: int, *claims: str) -> None:
        resources = {"limits": {"cpu": str(cpus)}, "claims": [{"name": claim} for claim in claims]}
        spec = {
            "containers": [{"name": "work", "image": "work.test/work", "resources": resources}],
            "resourceClaims": [{"name": claim, "resourceClaimName": claim} for claim in claims],
        }
        metadata = {"name": name, "annotations": {"cpu-set": "one-socket"}}
        self.cluster.request("POST", self.pods, {"metadata": metadata, "spec": spec})

    @property
    def pods(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods"

    def bound(self, name: str) -> PodPlacement:
        pod = wait_for(self.cluster, self.pods, name, lambda pod: bool(pod["spec"].get("nodeName")))
        return PodPlacement.from_json(pod["metadata"]["annotations"][PLACEMENT])

    def given(self, claim: str) -> str:
        """Return the CPUs that the driver would give to the container of a resource claim."""
        allocation = self.cluster.request("GET", f"{self.claims}/{claim}")["status"]["allocation"]
        (result,) = allocation["devices"]["results"]
        (config,) = allocation["devices"]["config"]
        assert (config["source"], config["requests"]) == ("FromClaim", [result["request"]])
        cpus = config["opaque"]["parameters"]["cpuConfig"]["cpuset"]
        assert parse_cpu_list(cpus).bit_count() == int(result["consumedCapacity"]["dra.cpu/cpu"])
        return str(cpus)

    def reason(self, pod: str, part: str) -> str:
        """Wait until kube-scheduler states such a reason why a pod has no node."""
        found = wait_for(self.cluster, self.pods, pod, lambda pod: part in _why_waiting(pod))
        return _why_waiting(found)


def _why_waiting(pod: Json) -> str:
    conditions = pod["status"].get("conditions", [])
    return " ".join(one.get("message", "") for one in conditions if one["type"] == "PodScheduled")


@pytest.fixture(scope="module")
def plane(kubernetes_programs: Path) -> Iterator[ControlPlane]:
    """Start a control plane of its own: two kube-schedulers would allocate the same devices."""
    with ControlPlane(controller_manager=True) as running:
        selector = {"cel": {"expression": 'device.driver == "dra.cpu"'}}
        cpus = {"metadata": {"name": "dra.cpu"}, "spec": {"selectors": [selector]}}
        running.request("POST", f"{DRA}/deviceclasses", cpus)
        yield running


@pytest.fixture(scope="module")
def installed(plane: ControlPlane) -> Iterator[Installation]:
    """Install kvplace with the component, one replica with its kube-scheduler; no right may be missing."""
    folders = ("base", "scheduler", "agent")
    with Installation(plane, resources=folders, components=["dra-driver-cpu"]) as installation:
        installation.add_scheduler(installation.replicas[0])
        yield installation
        assert installation.replicas[0].denials() == []


@pytest.fixture
def driver(plane: ControlPlane, installed: Installation) -> Iterator[CpuDriver]:
    """Describe one node with the driver."""
    namespace = plane.create_namespace(f"pods-{secrets.token_hex(4)}")
    name = f"node-{namespace}"
    with nodes_in_background(plane, [node_shape(name, MACHINE)]), described_nodes(installed, {name: MACHINE}):
        made = CpuDriver(plane, namespace)
        made.publish(name)
        yield made
        plane.remove_namespace(namespace)
        plane.request("DELETE", f"{DRA}/resourceslices/{name}")


def test_the_allocations_have_the_cpus_of_the_ledger_and_no_cpu_is_given_twice(
    driver: CpuDriver, installed: Installation
) -> None:
    for number in range(4):
        driver.create_claim(f"cpus-{number}")
        driver.create_pod(f"pod-{number}", 6, f"cpus-{number}")
    given, node = [], ""
    for number in range(4):
        bound = driver.bound(f"pod-{number}")
        given.append(parse_cpu_list(driver.given(f"cpus-{number}")))
        assert driver.given(f"cpus-{number}") == format_cpu_list(bound.placement.owned)
        assert bound.enforced
        node = bound.node
    owners = installed.ledger(node)["owners"]
    assert len(owners) == sum(cpus.bit_count() for cpus in given) == 24
    assert sum(given) == parse_cpu_list(",".join(owners))


def test_a_claim_for_another_number_is_refused_with_the_fix_and_a_new_one_binds(driver: CpuDriver) -> None:
    driver.create_claim("cpus", cpus=4)
    driver.create_pod("pod", 6, "cpus")
    claim = f"ResourceClaim {driver.namespace}/cpus"
    why = f"{claim} has 4 CPUs, and the pod owns 6: set dra.cpu/cpu of its request to 6"
    assert why in driver.reason("pod", "has 4 CPUs")
    driver.cluster.request("DELETE", f"{driver.pods}/pod")
    driver.cluster.request("DELETE", f"{driver.claims}/cpus")
    driver.create_claim("right")
    driver.create_pod("next", 6, "right")
    assert format_cpu_list(driver.bound("next").placement.owned) == driver.given("right")


def test_a_pod_without_a_claim_waits_with_the_reason(driver: CpuDriver) -> None:
    driver.create_pod("pod", 6)
    assert "the pod has no ResourceClaim with dra.cpu/cpu" in driver.reason("pod", "ResourceClaim")
