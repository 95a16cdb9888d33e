"""Devices that a real kubelet gives to pods, and the prediction, on a machine that shows two NUMA nodes."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.control_plane.cluster import ControlPlane
from harness.node_programs.image import archive
from harness.node_programs.programs import NodePrograms
from harness.node_programs.small_images import busybox
from harness.real_node.kubelet import Kubelet
from harness.real_node.node_access import NodeAccess, apiserver_flags
from harness.real_node.runtime import ContainerRuntime
from harness.real_node.sandbox import Sandbox
from harness.waiting import wait_until
from kvplace.core.device_locality import Certainty, DevicePrediction, predicted_devices
from kvplace.core.errors import Unavailable
from kvplace.core.node_devices import NodeDevices, PodDevice, TopologyPolicy
from kvplace.core.scalars import NumaId, ResourceName
from kvplace.kubelet.pod_resources import ListedPod, count_devices, devices_of_pod, read_pod_resources
from tests.real_node.shown_machine import show_two_numa_nodes

VF, GPU = ResourceName("kvplace.test/vf"), ResourceName("kvplace.test/gpu")
DEVICES = {
    VF: {"0000:01:00.1": [0], "0000:01:00.2": [0], **{f"0000:c1:00.{number}": [1] for number in range(1, 5)}},
    GPU: {"11": [0], "21": [1], "22": [1], "23": [1]},
}
_TRIES = 9
_RESYNC_S = 60.0
"""The kubelet's `syncFrequency`: so often it writes such files although nothing has changed."""
_CHECKPOINT = "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"


class DeviceNode:
    """A node with a kubelet that sees two NUMA nodes and devices of two plugins."""

    def __init__(self, plane: ControlPlane, runtime: ContainerRuntime) -> None:
        self.plane = plane
        self.sandbox = runtime.sandbox
        show_two_numa_nodes(self.sandbox)
        self.policy = "none"
        self._kubelet = Kubelet(plane, NodeAccess(plane, self.sandbox), runtime)
        self._kubelet.wait_until_ready()
        for resource, devices in DEVICES.items():
            plugin = json.dumps({"resource": resource, "devices": devices})
            self.sandbox.start(
                f"plugin-{resource.rpartition('/')[2]}",
                *(sys.executable, "-m", "harness.device_plugin", plugin),
                environment={"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
            )

    def use_policy(self, policy: str) -> None:
        """Start the kubelet again with another policy, and wait for all devices.

        It forgets what it has given to pods: soon after a start it may count the devices of pods that have
        ended as taken.
        """
        self._kubelet.server.kill()
        self.sandbox.path(_CHECKPOINT).unlink(missing_ok=True)
        config = self.sandbox.path("/var/lib/kubelet/config.yaml")
        config.write_text(json.dumps({**json.loads(config.read_text()), "topologyManagerPolicy": policy}))
        self.policy = policy
        self._kubelet.start()
        self._kubelet.wait_until_ready()
        total = sum(map(len, DEVICES.values()))
        _until(lambda: sum(one.total for one in self.devices().counts) == total)

    def listed(self) -> tuple[Mapping[Any, Any], list[ListedPod]]:
        """Ask the kubelet as the agent does, and again if it refuses: it limits the rate of questions."""
        socket = self.sandbox.path("/var/lib/kubelet/pod-resources/kubelet.sock")
        for _ in range(_TRIES):
            try:
                return asyncio.run(read_pod_resources(socket))
            except Unavailable:
                time.sleep(0.1)
        return asyncio.run(read_pod_resources(socket))

    def devices(self) -> NodeDevices:
        return NodeDevices.of(count_devices(*self.listed()), TopologyPolicy(self.policy))

    def devices_of(self, namespace: str, name: str) -> tuple[PodDevice, ...]:
        pods = [pod for pod in self.listed()[1] if (pod.namespace, pod.name) == (namespace, name)]
        return devices_of_pod(pods[0]) if pods else ()

    def bind(
        self,
        namespace: str,
        name: str,
        requested: Mapping[ResourceName, int],
        annotations: Mapping[str, str] | None = None,
    ) -> None:
        """Create a pod that is bound to the node already; it prints its environment."""
        limits = {str(resource): str(count) for resource, count in requested.items()}
        container = {
            "name": "compute",
            "image": busybox().reference,
            "command": ["sh", "-c", "env; exec sleep inf"],
            "resources": {"limits": limits},
            "volumeMounts": [{"name": "placement", "mountPath": "/etc/placement"}],
        }
        placement = {
            "path": "it",
            "fieldRef": {"fieldPath": "metadata.annotations['kvplace.io/placement']"},
        }
        spec = {
            "nodeName": self.sandbox.name,
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "containers": [container],
            "volumes": [{"name": "placement", "downwardAPI": {"items": [placement]}}],
        }
        path = f"/api/v1/namespaces/{namespace}/pods"
        self.plane.request(
            "POST", path, {"metadata": {"name": name, "annotations": annotations or {}}, "spec": spec}
        )

    def outcome(self, namespace: str, name: str, count: int) -> tuple[PodDevice, ...] | str:
        """Wait for the kubelet's decision about a pod: its devices, or the reason for its failure."""
        found: list[tuple[PodDevice, ...] | str] = []

        def decided() -> bool:
            pod = self.plane.request("GET", f"/api/v1/namespaces/{namespace}/pods/{name}")
            if pod["status"]["phase"] == "Failed":
                print(pod["status"]["message"])
                found.append(str(pod["status"]["reason"]))
            elif len(devices := self.devices_of(namespace, name)) == count:
                found.append(devices)  # they come one resource after the other
            return bool(found)

        _until(decided)
        return found[0]

    def predicted(self, requested: Mapping[ResourceName, int]) -> DevicePrediction:
        return predicted_devices(self.devices(), requested)


@pytest.fixture(scope="module")
def node(
    sandbox_machine: None,
    node_programs: NodePrograms,
    kubernetes_programs: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[DeviceNode]:
    logs = tmp_path_factory.mktemp("device-node")
    with Sandbox("devices", logs) as sandbox:
        runtime = ContainerRuntime(sandbox, node_programs)
        runtime.import_image(archive(busybox()))
        with ControlPlane(apiserver_flags=apiserver_flags(sandbox), logs=logs) as plane:
            yield DeviceNode(plane, runtime)


@pytest.fixture
def namespace(node: DeviceNode) -> Iterator[str]:
    name = node.plane.create_namespace(f"devices-{time.monotonic_ns()}")
    yield name
    node.plane.remove_namespace(name)
    _until(lambda: not node.listed()[1])


# Each takes from what those before it have left.
PODS: tuple[dict[ResourceName, int], ...] = (
    {VF: 1},
    {GPU: 1},
    {VF: 1, GPU: 1},
    {VF: 1},
    {VF: 2, GPU: 1},
    {VF: 1, GPU: 1},
)


@pytest.mark.parametrize("policy", ["none", "best-effort", "restricted", "single-numa-node"])
def test_the_kubelet_gives_devices_of_the_numa_nodes_that_are_predicted(
    node: DeviceNode, namespace: str, policy: str
) -> None:
    node.use_policy(policy)
    told = []
    for number, requested in enumerate(PODS):
        predicted = node.predicted(requested)
        node.bind(namespace, f"pod-{number}", requested)
        outcome = node.outcome(namespace, f"pod-{number}", sum(requested.values()))
        told.append((policy, requested, predicted, outcome))
        print(*told[-1])
        if predicted.certainty is Certainty.REJECTED:
            assert outcome == "TopologyAffinityError", told
            continue
        assert not isinstance(outcome, str), told
        assert {device.node for device in outcome} <= predicted.nodes, told
        if policy != "none":
            assert predicted.certainty is Certainty.PREDICTED, told
    assert policy != "none" or Certainty.UNKNOWN in [predicted.certainty for _, _, predicted, _ in told]


@pytest.mark.parametrize("policy", ["restricted", "single-numa-node"])
def test_a_kubelet_that_cannot_align_fails_the_pod_as_predicted(
    node: DeviceNode, namespace: str, policy: str
) -> None:
    node.use_policy(policy)
    node.bind(namespace, "all-of-node-1", {VF: 4})
    assert {device.node for device in node.outcome(namespace, "all-of-node-1", 4)} == {1}  # type: ignore[union-attr]
    apart = {VF: 1, GPU: 3}
    assert node.predicted(apart) == DevicePrediction(Certainty.REJECTED, frozenset(map(NumaId, (0, 1))))
    node.bind(namespace, "apart", apart)
    assert node.outcome(namespace, "apart", 4) == "TopologyAffinityError"


def test_an_annotation_reaches_a_running_container_through_the_downward_api_within_seconds(
    node: DeviceNode, namespace: str
) -> None:
    """A later revision of a placement comes to the hook in this way."""
    node.bind(namespace, "pod", {VF: 1}, annotations={"kvplace.io/placement": "1"})
    pod = node.plane.request("GET", f"/api/v1/namespaces/{namespace}/pods/pod")
    volume = f"/var/lib/kubelet/pods/{pod['metadata']['uid']}/volumes/kubernetes.io~downward-api/placement/it"
    file = node.sandbox.path(volume)
    _until(lambda: file.read_text() == "1" and _runs(node, namespace))
    delays = []
    for revision in range(2, 7):
        node.plane.kubectl(
            *("annotate", "--overwrite", "--namespace", namespace, "pod", "pod"),
            f"kvplace.io/placement={revision}",
        )
        began = time.monotonic()
        _until(partial(_has_text, file, str(revision)))
        delays.append(time.monotonic() - began)
        time.sleep(0.3 * revision)
    print("seconds through the downward API:", [round(delay, 2) for delay in delays])
    assert max(delays) < _RESYNC_S / 2


def test_the_addresses_of_devices_are_in_the_environment_of_their_container(
    node: DeviceNode, namespace: str
) -> None:
    node.use_policy("best-effort")
    node.bind(namespace, "pod", {VF: 2})
    outcome = node.outcome(namespace, "pod", 2)
    assert not isinstance(outcome, str)
    addresses = [device.address for device in outcome]
    assert addresses == ["0000:01:00.1", "0000:01:00.2"]
    variables: dict[str, str] = {}

    def has_printed_it() -> bool:
        printed = node.plane.kubectl("logs", "--namespace", namespace, "pod")  # fails before it has started
        variables.update(dict(line.split("=", 1) for line in printed.splitlines() if "=" in line))
        return "PCIDEVICE_KVPLACE_TEST_VF" in variables

    _until(has_printed_it)
    assert sorted(variables["PCIDEVICE_KVPLACE_TEST_VF"].split(",")) == addresses


def test_of_two_pods_that_race_for_the_last_devices_one_fails(node: DeviceNode, namespace: str) -> None:
    node.use_policy("best-effort")
    for name in ("first", "second"):
        node.bind(namespace, name, {GPU: 3})
    outcomes = [node.outcome(namespace, name, 3) for name in ("first", "second")]
    failed = [outcome for outcome in outcomes if isinstance(outcome, str)]
    assert failed == ["UnexpectedAdmissionError"]
    assert [len(outcome) for outcome in outcomes if not isinstance(outcome, str)] == [3]


def _has_text(file: Path, text: str) -> bool:
    return file.read_text() == text


def _runs(node: DeviceNode, namespace: str) -> bool:
    pod = node.plane.request("GET", f"/api/v1/namespaces/{namespace}/pods/pod")
    return bool(pod["status"]["phase"] == "Running")


def _until(holds: Callable[[], object]) -> None:
    """Wait until it holds; while the kubelet is starting, an error means no."""
    failed = "no"

    def holds_by_now() -> object:
        nonlocal failed
        try:
            return holds()
        except Exception as error:
            failed = repr(error)
            return False

    wait_until(holds_by_now, lambda: f"the last answer was {failed}", pause_s=0.1)
