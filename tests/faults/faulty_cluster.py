"""The cluster in which faults are played, and what every scene checks at its end.

`serve` and the kube-schedulers reach the API server through the fault proxy; kube-scheduler reaches the
extender, and the API server reaches admission, through a balancer. The checks ask the API server itself.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from harness.certificates import Authority
from harness.control_plane.cluster import ControlPlane, RequestRefused, Scheduler
from harness.control_plane.hollow_node import nodes_in_background
from harness.control_plane.kubelet_admission import has_ended
from harness.faults.balancer import Balancer, balancer
from harness.faults.proxy import FaultProxy, fault_proxy
from harness.kvplace_cluster.installation import NAMESPACE, Installation, Replica
from harness.kvplace_cluster.machines import node_shape, node_topology, two_socket_machine
from kvplace.core.topology import Topology
from tests.faults.observer import LEDGERS, Observer, observing, owned_cpus, waits_with_a_reason

Json = dict[str, Any]


class Stage:
    """A running control plane with kvplace in it, and with faults between its parts."""

    def __init__(self, *, logs: Path | None = None) -> None:
        """Start everything; use it as a context manager."""
        self._flags: tuple[str, ...] = ()
        """Of the first replica, for one scenario."""
        self._stack = contextlib.ExitStack()
        enter = self._stack.enter_context
        try:
            self.plane = enter(ControlPlane(logs=logs))
            self.proxy: FaultProxy = enter(fault_proxy(self.plane))
            self.second_authority = Authority(Path(enter(tempfile.TemporaryDirectory())), "second")
            """Signs what certificates are replaced by."""
            self.api_ca = self._copy(self.plane.ca_file, "api-ca.crt")
            self.extender_ca = self._copy(self.plane.ca_file, "both-ca.crt")
            """The CA that clients of `serve` trust: neither kube-scheduler nor a webhook reads it again."""
            with self.extender_ca.open("ab") as file:
                file.write(self.second_authority.file.read_bytes())
            issued = self.plane.issue_certificate("kvplace-serve")
            self.certificate = (
                self._copy(issued[0], "serve-in-use.crt"),
                self._copy(issued[1], "serve-in-use.key"),
            )
            self.installation = enter(
                Installation(
                    self.plane,
                    start=self._start_replica,
                    admission=self._admission_url,
                    admission_ca=self.extender_ca,
                )
            )
            self.extender: Balancer = enter(balancer(self.serve.extender_url))
            self.scheduler: Scheduler = self.installation.add_scheduler(
                self.extender.url, ca_file=self.extender_ca
            )
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def second_replica(self) -> Iterator[Replica]:
        """Run one more `serve` behind the same addresses while the block runs."""
        replica = self._start_replica(self.plane, 1)
        try:
            replica.wait_until_ready()
            with self.extender.also(replica.extender_url), self.admission.also(replica.admission_url):
                yield replica
        finally:
            replica.stop()

    @property
    def serve(self) -> Replica:
        """The first replica; kills are meant for it."""
        return self.installation.replicas[0]

    def kill_serve(self) -> None:
        """Kill the first replica and start it again at once, as a kubelet does after a first crash."""
        self.serve.process.kill()
        self.serve.start(*self._flags)

    @contextlib.contextmanager
    def serving_with(self, *flags: str) -> Iterator[None]:
        """Run the first replica with further flags, if any, while the block runs."""
        if not flags:
            yield
            return
        self._flags = flags
        self.kill_serve()
        try:
            yield
        finally:
            self._flags = ()
            self.kill_serve()

    def _start_replica(self, plane: ControlPlane, number: int) -> Replica:
        token = plane.service_account_token(NAMESPACE, "kvplace-serve")
        kubeconfig = self.proxy.kubeconfig(token, name=f"serve-{number}", ca_file=self.api_ca)
        return Replica(plane, number, self.certificate, kubeconfig=kubeconfig)

    def _admission_url(self, replicas: Sequence[Replica]) -> str:
        self.admission: Balancer = self._stack.enter_context(balancer(replicas[0].admission_url))
        return self.admission.url

    def _copy(self, file: Path, name: str) -> Path:
        return Path(shutil.copyfile(file, self.plane.folder / name))


@dataclass
class Outcome:
    """The results of a scene: seconds after the fault, None where it does not apply."""

    name: str
    pods: int
    bound_s: float | None = None
    """Until the last pod was bound."""
    agree_s: float | None = None
    """Until the ledgers held just what bound pods own."""
    freed_s: float | None = None
    """From the deletion of the pods, or a fault after that, until the ledgers were empty."""


@dataclass
class Scene:
    """Some nodes and pods of their own on the stage, for one scenario."""

    stage: Stage
    name: str
    namespace: str
    nodes: dict[str, Topology]
    observer: Observer
    expected: int = 0
    """How many pods there must be."""
    _created: int = 0
    _begun_at: float = 0.0
    _fault_ended_at: float = 0.0

    @property
    def plane(self) -> ControlPlane:
        return self.stage.plane

    @contextlib.contextmanager
    def burst(self, count: int, cpus: int = 2, *, scheduler: str = "") -> Iterator[None]:
        """Create pods; kube-scheduler sees them all at once when the block has ended."""
        names = [f"pod-{number}" for number in range(self._created, self._created + count)]
        self._created += count
        self.expected += count
        with self.stage.scheduler.process.paused():
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda name: self.create_one(name, cpus, scheduler=scheduler), names))
            # What holds of all pods would else hold of those that have been seen.
            self.observer.wait_until(
                lambda: len(self.observer.pods) == self.expected, "that all pods are seen"
            )
            yield
        self._begun_at = self._fault_ended_at = time.monotonic()

    def create_one(self, name: str, cpus: int = 2, *, scheduler: str = "") -> Json:
        """Create one pod, for a scheduler by name if not for kvplace's; raises RequestRefused."""
        return self.plane.request("POST", self.pods_path, pod_manifest(name, cpus, scheduler))

    @property
    def pods_path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods"

    def fault_is_over(self) -> None:
        """Note that the fault has ended now; scripted faults note it themselves."""
        self._fault_ended_at = time.monotonic()

    def since_burst(self, moment: float) -> float:
        """Seconds from the moment at which kube-scheduler saw the pods."""
        return moment - self._begun_at

    def after_fault(self, moment: float) -> float:
        """Seconds from the end of the last fault until a moment."""
        return max(0.0, moment - max(self._fault_ended_at, self.stage.proxy.script.last_fault_at))

    def wait_until_agreed(self) -> float:
        """Wait until the ledgers hold just what bound pods own, and check it with the API server."""
        nodes = list(self.nodes)
        agreed = self.observer.wait_until(
            lambda: self.observer.ledgers_agree(nodes), "that ledgers and placements agree"
        )
        self.check()
        return agreed

    def check(self) -> None:
        """Check with the API server: no core is lost or has two owners, and no pod is forgotten."""
        pods = self.plane.request("GET", self.pods_path)["items"]
        assert len(pods) == self.expected
        owners: dict[tuple[str, int], str] = {}
        for pod in pods:
            uid = pod["metadata"]["uid"]
            for place in owned_cpus(pod):
                assert owners.setdefault(place, uid) == uid, f"CPU {place} has two owners"
            assert pod["spec"].get("nodeName") or waits_with_a_reason(pod), pod
        for node in self.nodes:
            spec = self.ledger(node)
            assert spec["owners"] == {str(cpu): uid for (on, cpu), uid in owners.items() if on == node}
            assert set(spec["claims"]) == {
                pod["metadata"]["uid"]
                for pod in pods
                if pod["spec"].get("nodeName") == node and not has_ended(pod)
            }
        assert self.observer.broken == []

    def ledger(self, node: str) -> Json:
        """Read the owners and claims of a node's ledger."""
        return self.stage.installation.ledger(node)

    def delete_all(self) -> None:
        """Delete all pods by force, and wait until the API server has none."""
        self.plane.request("DELETE", f"{self.pods_path}?gracePeriodSeconds=0")
        self.expected = 0
        self.observer.wait_until(lambda: not self.observer.pods, "that all pods are gone")
        self.fault_is_over()

    def delete(self, pods: Sequence[Json]) -> None:
        """Delete some pods by force, and wait until they are gone."""
        for pod in pods:
            self.plane.request("DELETE", f"{self.pods_path}/{pod['metadata']['name']}?gracePeriodSeconds=0")
        self.expected -= len(pods)
        gone = {pod["metadata"]["uid"] for pod in pods}
        self.observer.wait_until(lambda: not gone & self.observer.pods.keys(), "that the pods are gone")
        self.fault_is_over()

    def wait_until_freed(self) -> float:
        """Wait until every core is free again, and check it with the API server."""
        nodes = list(self.nodes)
        freed = self.observer.wait_until(
            lambda: self.observer.ledgers_are_empty(nodes), "that all cores are free"
        )
        for node in nodes:
            assert self.ledger(node) == {"owners": {}, "claims": {}}
        assert self.observer.broken == []
        return freed


@contextlib.contextmanager
def scene(
    stage: Stage, name: str, *, nodes: int = 4, machine: Topology | None = None, kubelets: bool = False
) -> Iterator[Scene]:
    """Put nodes of one scenario on the stage, and take them away with all pods at the end.

    Without `kubelets` kube-scheduler sees more CPUs than kvplace gives out, so that the refusal is kvplace's.
    """
    machine = machine or two_socket_machine()
    plane = stage.plane
    machines = {f"{name}-{number}": machine for number in range(nodes)}
    stage.serve.wait_until_ready()
    shapes = [node_shape(node, machine) for node in machines]
    for number, shape in enumerate([] if kubelets else shapes):
        roomy = replace(shape, reserved_cpus=0)
        plane.request("POST", "/api/v1/nodes", roomy.manifest(f"172.16.0.{number + 1}"))
    for node in machines:
        plane.request("POST", "/apis/kvplace.io/v1alpha1/nodetopologies", node_topology(node, machine))
    namespace = plane.create_namespace(f"faults-{name}")
    played = nodes_in_background(plane, shapes, admits=True) if kubelets else contextlib.nullcontext()
    try:
        with played, observing(plane, namespace) as observer:
            yield Scene(stage, name, namespace, machines, observer)
    finally:
        stage.proxy.script.play(())
        plane.remove_namespace(namespace)
        for node in machines:
            for path in ("/api/v1/nodes", "/apis/kvplace.io/v1alpha1/nodetopologies", LEDGERS):
                with contextlib.suppress(RequestRefused):
                    plane.request("DELETE", f"{path}/{node}")


def pod_manifest(name: str, cpus: int, scheduler: str = "") -> Json:
    """Write a pod that requests exclusive cores."""
    return {
        "metadata": {"name": name, "annotations": {"cpu-set": "any"}},
        "spec": {
            **({"schedulerName": scheduler} if scheduler else {}),
            "terminationGracePeriodSeconds": 0,
            "containers": [
                {"name": "work", "image": "work.test/work", "resources": {"limits": {"cpu": str(cpus)}}}
            ],
        },
    }
