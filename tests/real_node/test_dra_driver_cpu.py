"""dra-driver-cpu v0.2.0 beside a real kubelet and containerd: a container gets the cores of the ledger."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.control_plane.cluster import ControlPlane
from harness.kvplace_cluster.installation import Installation
from harness.node_programs.image import archive
from harness.node_programs.programs import NodePrograms
from harness.node_programs.small_images import busybox
from harness.real_node.kubelet import Kubelet
from harness.real_node.node_access import NodeAccess, apiserver_flags
from harness.real_node.runtime import NRI_SOCKET, ContainerRuntime
from harness.real_node.sandbox import Sandbox
from harness.waiting import wait_until
from kvplace.core.cpuset import format_cpu_list, mask_of, parse_cpu_list
from kvplace.core.placement import PodPlacement
from kvplace.core.well_known_names import PINNED, PLACEMENT

Json = dict[str, Any]
DRA = "/apis/resource.k8s.io/v1"
TOPOLOGIES = "/apis/kvplace.io/v1alpha1/nodetopologies"


class DriverNode:
    """A node where the driver sets the cpusets, the agent observes, and a kubelet runs pods."""

    def __init__(self, plane: ControlPlane, runtime: ContainerRuntime, driver: Path) -> None:
        self.plane = plane
        self.runtime = runtime
        self.sandbox = runtime.sandbox
        self.name = self.sandbox.name
        access = NodeAccess(plane, self.sandbox)
        admin = access.kubeconfig(plane.kubeconfig_for(plane.admin.token, name=f"driver-{self.name}"))
        self.sandbox.write("/etc/kubernetes/admin.kubeconfig", admin, mode=0o600)
        Kubelet(plane, access, runtime).wait_until_ready()
        self.driver = self.sandbox.start(
            "dra-driver-cpu",
            driver,
            *("--cpu-device-mode=grouped", "--group-by=machine", "--v=4"),
            f"--hostname-override={self.name}",
            *("--bind-address=127.0.0.1:8090", "--kubeconfig=/etc/kubernetes/admin.kubeconfig"),
        )
        self.agent = self.sandbox.start(
            "agent",
            *(sys.executable, "-m", "kvplace", "agent", f"--node-name={self.name}", "--enforcement=dra"),
            *("--reserved-cpus=0", f"--nri-socket={NRI_SOCKET}", "--health-address=127.0.0.1:8091"),
            "--kubeconfig=/etc/kubernetes/admin.kubeconfig",
            environment={"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        )
        wait_until(lambda: self.mode() == "dra" and self.slices(), self.agent.log_tail)

    def mode(self) -> str:
        found = self.plane.request("GET", TOPOLOGIES)["items"]
        return str(found[0].get("status", {}).get("enforcement", "")) if found else ""

    def ready(self) -> Json:
        (found,) = self.plane.request("GET", TOPOLOGIES)["items"]
        return next(one for one in found["status"]["conditions"] if one["type"] == "Ready")

    def slices(self) -> list[Json]:
        return list(self.plane.request("GET", f"{DRA}/resourceslices")["items"])

    def create_pod(self, namespace: str, name: str, cpus: int, *, placed: bool = True) -> None:
        """Create a pod that prints its CPUs, with a ResourceClaim for so many if it is to be placed."""
        container: Json = {
            "name": "work",
            "image": busybox().reference,
            "command": ["sh", "-c", "grep Cpus_allowed_list /proc/self/status; exec sleep inf"],
        }
        spec: Json = {
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "containers": [container],
        }
        metadata: Json = {"name": name}
        if placed:
            exactly = {"deviceClassName": "dra.cpu", "capacity": {"requests": {"dra.cpu/cpu": str(cpus)}}}
            claim = {"devices": {"requests": [{"name": "cpus", "exactly": exactly}]}}
            path = f"{DRA}/namespaces/{namespace}/resourceclaims"
            self.plane.request("POST", path, {"metadata": {"name": name}, "spec": claim})
            container["resources"] = {"limits": {"cpu": str(cpus)}, "claims": [{"name": "cpus"}]}
            spec["resourceClaims"] = [{"name": "cpus", "resourceClaimName": name}]
            metadata["annotations"] = {"cpu-set": "any"}
        else:
            spec["nodeName"] = self.name
        path = f"/api/v1/namespaces/{namespace}/pods"
        self.plane.request("POST", path, {"metadata": metadata, "spec": spec})

    def pod(self, namespace: str, name: str) -> Json:
        return self.plane.request("GET", f"/api/v1/namespaces/{namespace}/pods/{name}")

    def container(self, namespace: str, name: str) -> str:
        """Wait until the container of a pod runs; returns its id."""
        found: list[str] = []

        def runs() -> bool:
            statuses = self.pod(namespace, name)["status"].get("containerStatuses", [])
            running = [one["containerID"] for one in statuses if "running" in one["state"]]
            found.extend(one.partition("//")[2] for one in running)
            return bool(found)

        wait_until(runs, lambda: json.dumps(self.pod(namespace, name)["status"]))
        return found[0]

    def first_cpus(self, container: str) -> str:
        """Read the CPUs of the first instruction of a container."""
        wait_until(
            lambda: self.runtime.crictl("logs", container), lambda: f"container {container} printed nothing"
        )
        return self.runtime.crictl("logs", container).split()[-1]

    def cpuset(self, container: str) -> str:
        """Read the CPUs that the kernel gives to a container now."""
        described = json.loads(self.runtime.crictl("inspect", container))
        return self.sandbox.cpuset(described["info"]["pid"])


@pytest.fixture(scope="module")
def node(
    sandbox_machine: None,
    node_programs: NodePrograms,
    kubernetes_programs: Path,
    dra_driver_cpu: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[DriverNode]:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("a pod needs a CPU beside the one that the node reserves")
    kept = os.environ.get("KVPLACE_REAL_NODE_LOGS")
    logs = Path(kept) if kept else tmp_path_factory.mktemp("driver-node")
    with Sandbox("driver", logs) as sandbox:
        runtime = ContainerRuntime(sandbox, node_programs)
        runtime.import_image(archive(busybox()))
        with ControlPlane(
            apiserver_flags=apiserver_flags(sandbox), controller_manager=True, logs=logs
        ) as plane:
            selector = {"cel": {"expression": 'device.driver == "dra.cpu"'}}
            cpus = {"metadata": {"name": "dra.cpu"}, "spec": {"selectors": [selector]}}
            plane.request("POST", f"{DRA}/deviceclasses", cpus)
            folders = ("base", "scheduler", "agent")
            with Installation(plane, resources=folders, components=["dra-driver-cpu"]) as installation:
                installation.add_scheduler(installation.replicas[0])
                yield DriverNode(plane, runtime, dra_driver_cpu)
                assert installation.replicas[0].denials() == []


@pytest.fixture
def namespace(node: DriverNode) -> Iterator[str]:
    name = node.plane.create_namespace(f"pods-{secrets.token_hex(4)}")
    yield name
    node.plane.remove_namespace(name)


def test_a_container_runs_on_the_cores_of_the_ledger_and_others_leave_them(
    node: DriverNode, namespace: str
) -> None:
    cores = len(os.sched_getaffinity(0)) - 1
    node.create_pod(namespace, "other", 0, placed=False)
    other = node.container(namespace, "other")
    node.create_pod(namespace, "pod", cores)
    container = node.container(namespace, "pod")
    bound = PodPlacement.from_json(node.pod(namespace, "pod")["metadata"]["annotations"][PLACEMENT])
    (ledger,) = node.plane.request("GET", "/apis/kvplace.io/v1alpha1/nodeledgers")["items"]
    owned = format_cpu_list(mask_of(int(cpu) for cpu in ledger["spec"]["owners"]))
    assert owned == format_cpu_list(bound.placement.owned)
    assert node.cpuset(container) == node.first_cpus(container) == owned
    wait_until(lambda: not parse_cpu_list(node.cpuset(other)) & bound.placement.owned, node.agent.log_tail)

    def pinned() -> Json:
        conditions = node.pod(namespace, "pod")["status"]["conditions"]
        return next((one for one in conditions if one["type"] == PINNED), {})

    wait_until(
        lambda: pinned().get("status") == "True", lambda: f"{json.dumps(pinned())}\n{node.agent.log_tail()}"
    )
    assert pinned()["message"] == f"revision 1: all threads run on CPU {owned} as placed"
    assert "dra-driver-cpu sets cpusets here" in node.ready()["message"]
