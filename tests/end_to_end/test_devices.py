"""Pods with devices of Dynamic Resource Allocation, allocated by the real kube-scheduler."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.control_plane.cluster import ControlPlane
from harness.control_plane.hollow_node import nodes_in_background
from harness.control_plane.watching import wait_for
from harness.kvplace_cluster.installation import Installation, described_nodes
from harness.kvplace_cluster.machines import node_shape, two_socket_machine
from harness.waiting import wait_until
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.well_known_names import PLACEMENT

Json = dict[str, Any]
DRA = "/apis/resource.k8s.io/v1"
MACHINE = two_socket_machine(cores_per_socket=4, reserved_cores=0)
"""Two sockets, each a NUMA node of eight CPUs."""


class Devices:
    """Drivers and users of devices."""

    def __init__(self, cluster: ControlPlane, namespace: str) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.driver = f"gpu-{secrets.token_hex(3)}.example.com"
        """A driver, class and resource of this test alone."""

    def publish(self, node: str, *devices: Json) -> None:
        spec = {
            "driver": self.driver,
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": devices,
        }
        document = {"metadata": {"name": f"{node}-{self.driver}"}, "spec": spec}
        self.cluster.request("POST", f"{DRA}/resourceslices", document)

    def create_class(self) -> None:
        selector = {"cel": {"expression": f'device.driver == "{self.driver}"'}}
        spec = {"selectors": [selector], "extendedResourceName": self.resource}
        self.cluster.request(
            "POST", f"{DRA}/deviceclasses", {"metadata": {"name": self.driver}, "spec": spec}
        )

    @property
    def resource(self) -> str:
        return f"{self.driver}/gpu"

    def remove(self, *nodes: str) -> None:
        for node in nodes:
            self.cluster.request("DELETE", f"{DRA}/resourceslices/{node}-{self.driver}")
        self.cluster.request("DELETE", f"{DRA}/deviceclasses/{self.driver}")

    def create_claim(self, name: str, count: int = 1, model: str = "") -> None:
        exactly: Json = {"deviceClassName": self.driver, "count": count}
        if model:
            expression = f'device.attributes["{self.driver}"].model == "{model}"'
            exactly["selectors"] = [{"cel": {"expression": expression}}]
        request = {"name": "gpu", "exactly": exactly}
        document = {"metadata": {"name": name}, "spec": {"devices": {"requests": [request]}}}
        self.cluster.request("POST", f"{DRA}/namespaces/{self.namespace}/resourceclaims", document)

    def claim(self, name: str) -> Json:
        return self.cluster.request("GET", f"{DRA}/namespaces/{self.namespace}/resourceclaims/{name}")

    def create_pod(self, name: str, cpus: int, *claims: str, near: str = "required", gpus: int = 0) -> None:
        limits = {"cpu": str(cpus), **({self.resource: str(gpus)} if gpus else {})}
        resources = {"limits": limits, "claims": [{"name": claim} for claim in claims]}
        annotations = {"cpu-set": "one-numa", "kvplace.io/device-numa": near}
        spec = {
            "containers": [{"name": "work", "image": "work.test/work", "resources": resources}],
            "resourceClaims": [{"name": claim, "resourceClaimName": claim} for claim in claims],
        }
        document = {"metadata": {"name": name, "annotations": annotations}, "spec": spec}
        self.cluster.request("POST", self.pods, document)

    @property
    def pods(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods"

    def bound(self, name: str) -> tuple[str, Placement]:
        pod = wait_for(self.cluster, self.pods, name, lambda pod: bool(pod["spec"].get("nodeName")))
        placement = PodPlacement.from_json(pod["metadata"]["annotations"][PLACEMENT]).placement
        return pod["spec"]["nodeName"], placement

    def refused_binds(self, pod: str) -> list[str]:
        """Return what kube-scheduler states about each bind that was refused."""
        events = f"/apis/events.k8s.io/v1/namespaces/{self.namespace}/events"
        found = self.cluster.request("GET", f"{events}?fieldSelector=regarding.name={pod}")["items"]
        return [event["note"] for event in found if event["note"].startswith("node ")]


def gpu(number: int, **attributes: Json) -> Json:
    return {"name": f"gpu{number}", "attributes": attributes}


def on_node(numa_node: int) -> Json:
    return {"resource.kubernetes.io/numaNode": {"int": numa_node}}


@pytest.fixture(scope="module")
def plane(kubernetes_programs: Path) -> Iterator[ControlPlane]:
    """Start a control plane of its own: two kube-schedulers would allocate the same devices."""
    with ControlPlane() as running:
        yield running


@pytest.fixture(scope="module")
def installed(plane: ControlPlane) -> Iterator[Installation]:
    """Install kvplace, one replica with its kube-scheduler; no right may be missing."""
    with Installation(plane) as installation:
        installation.add_scheduler(installation.replicas[0])
        yield installation
        assert installation.replicas[0].denials() == []


@pytest.fixture
def devices(plane: ControlPlane, installed: Installation) -> Iterator[Devices]:
    namespace = plane.create_namespace(f"vms-{secrets.token_hex(4)}")
    yield Devices(plane, namespace)
    plane.remove_namespace(namespace)


@pytest.fixture
def two_nodes(plane: ControlPlane, installed: Installation, devices: Devices) -> Iterator[tuple[str, str]]:
    """Describe two nodes; on the first the GPU of NUMA node 0 comes first, and only node 1 has free cores."""
    names = (f"a-{devices.namespace}", f"b-{devices.namespace}")
    shapes = [node_shape(name, MACHINE) for name in names]
    with nodes_in_background(plane, shapes), described_nodes(installed, dict.fromkeys(names, MACHINE)):
        devices.create_class()
        yield names
        devices.remove(*names)


def test_the_cores_are_beside_the_device_that_kube_scheduler_has_allocated(
    devices: Devices, two_nodes: tuple[str, str]
) -> None:
    first, second = two_nodes
    devices.publish(first, gpu(0, **on_node(1)), gpu(1, **on_node(0)))
    devices.publish(second, gpu(0, **on_node(1)), gpu(1, **on_node(0)))
    for number in range(4):
        devices.create_claim(f"io-{number}")
        devices.create_pod(f"vm-{number}", 4, f"io-{number}")
    for number in range(4):
        _, placement = devices.bound(f"vm-{number}")
        allocation = devices.claim(f"io-{number}")["status"]["allocation"]
        (result,) = allocation["devices"]["results"]
        assert placement.numa_nodes == ({"gpu0": 1, "gpu1": 0}[result["device"]],)


@pytest.mark.parametrize("near", ["preferred", "required"])
def test_a_pod_goes_to_the_node_with_room_beside_the_device_that_kube_scheduler_will_allocate(
    devices: Devices, two_nodes: tuple[str, str], near: str
) -> None:
    first, second = two_nodes
    devices.publish(first, gpu(0, **on_node(0)), gpu(1, **on_node(1)))
    # All CPUs of NUMA node 0 of the first node are taken. It is fuller, so it would be the best node.
    devices.create_pod("occupant", 8, near="off")
    node, placement = devices.bound("occupant")
    assert (node, placement.numa_nodes) == (first, (0,))
    devices.publish(second, gpu(0, **on_node(0)), gpu(1, **on_node(1)))
    devices.create_claim("io")
    devices.create_pod("vm", 8, "io", near=near)
    node, placement = devices.bound("vm")
    assert (node, placement.numa_nodes) == (second, (0,))
    (result,) = devices.claim("io")["status"]["allocation"]["devices"]["results"]
    assert (result["pool"], result["device"]) == (second, "gpu0")
    assert devices.refused_binds("vm") == []


def test_a_pod_that_bind_has_refused_gets_its_devices_on_another_node(
    devices: Devices, two_nodes: tuple[str, str]
) -> None:
    first, second = two_nodes
    models = [{"model": {"string": model}} for model in ("slow", "fast")]
    gpus = [gpu(number, **on_node(1 - number), **model) for number, model in enumerate(models)]
    devices.publish(first, *gpus)
    # All CPUs of NUMA node 0 of the first node are taken, and kvplace does not evaluate the selector.
    devices.create_pod("occupant", 8, near="off")
    node, placement = devices.bound("occupant")
    assert (node, placement.numa_nodes) == (first, (0,))
    devices.publish(second, *gpus)
    devices.create_claim("io", model="fast")
    devices.create_pod("vm", 8, "io")
    node, placement = devices.bound("vm")
    assert (node, placement.numa_nodes) == (second, (0,))
    (result,) = devices.claim("io")["status"]["allocation"]["devices"]["results"]
    assert (result["pool"], result["device"]) == (second, "gpu1")
    # kube-scheduler writes its events beside its other work.
    wait_until(lambda: devices.refused_binds("vm"), lambda: "no refused bind was reported")
    refused = devices.refused_binds("vm")
    assert refused == [f"node {first}: no 8 free CPUs on NUMA node 0, the NUMA node of its devices; best 0"]


def test_a_resource_claim_for_dozens_of_devices_binds_on_their_numa_node(
    devices: Devices, two_nodes: tuple[str, str]
) -> None:
    first, second = two_nodes
    for node in (first, second):
        devices.publish(node, *(gpu(number, **on_node(1)) for number in range(32)))
    devices.create_claim("io", count=32)
    devices.create_pod("vm", 4, "io")
    _, placement = devices.bound("vm")
    assert placement.numa_nodes == (1,)


def test_devices_with_missing_or_contradicting_attributes_bind(
    devices: Devices, two_nodes: tuple[str, str]
) -> None:
    first, second = two_nodes
    for node in (first, second):
        devices.publish(
            node,
            gpu(0),
            gpu(1, **on_node(-1), numa={"string": "one"}),
            gpu(2, **on_node(1), numa={"int": 0}),
            gpu(3, **on_node(900)),
        )
    devices.create_claim("io", count=4)
    devices.create_pod("vm", 4, "io")
    _, placement = devices.bound("vm")
    assert placement.numa_nodes == (1,)


def test_an_extended_resource_by_dra_binds_beside_its_device_and_beside_the_marker_of_quantity_0(
    devices: Devices, two_nodes: tuple[str, str]
) -> None:
    first, second = two_nodes
    for node in (first, second):
        devices.publish(node, gpu(0, **on_node(1)))
    devices.create_pod("vm", 4, gpus=1)
    _, placement = devices.bound("vm")
    pod = devices.cluster.request("GET", f"{devices.pods}/vm")
    assert pod["spec"]["containers"][0]["resources"]["limits"]["kvplace.io/vm"] == "0"
    assert pod["status"]["extendedResourceClaimStatus"]["resourceClaimName"]
    assert placement.numa_nodes == (1,)
