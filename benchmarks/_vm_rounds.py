"""Rounds of many VMs in one cluster: created at once, followed until they are bound, counted, removed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from benchmarks._api_requests import Call, Json, ask_all, counted_requests, requests_since
from benchmarks._bindings import Bindings
from benchmarks._instructions import Instructions
from benchmarks._processes import cpu_seconds, used_since
from harness.control_plane.cluster import ControlPlane, RequestRefused
from harness.control_plane.server_process import ServerProcess
from harness.kvplace_cluster.machines import node_shape, node_topology
from harness.kvplace_cluster.vms import VMIS
from kvplace.core.topology import Topology

AFTERWARDS_S = 4.0
_PATIENCE_S = 600.0


@dataclass(frozen=True, slots=True)
class Round:
    """The result of one round."""

    seconds: float
    """From the first VMI sent to the last pod bound."""
    cpu_ms: Mapping[str, float]
    """CPU milliseconds per VM by process."""
    instructions: Mapping[str, float]
    """Millions of instructions per VM by process; empty where perf cannot count them."""
    requests: Mapping[str, float]
    """Writes that the API server answered, per VM."""

    @property
    def sum_ms(self) -> float:
        """CPU milliseconds per VM of all processes."""
        return sum(self.cpu_ms.values())


class VmRounds:
    """One cluster, and the rounds in it."""

    def __init__(
        self, plane: ControlPlane, servers: Callable[[], Iterable[ServerProcess]], *, has_kvplace: bool
    ) -> None:
        """`servers` returns the processes to count CPU of; `has_kvplace`: its kinds are there."""
        self._plane = plane
        self._servers = servers
        self._has_kvplace = has_kvplace
        self._rounds = 0

    def add_nodes(self, added: Mapping[str, Topology], first: int) -> None:
        """Create nodes, and with kvplace what their agents would publish; `first` numbers their addresses."""
        calls: list[Call] = []
        for number, (name, machine) in enumerate(added.items(), first):
            node = node_shape(name, machine).manifest(
                f"172.{16 + number // 62500}.{number // 250 % 250}.{number % 250 + 1}"
            )
            calls.append(("POST", "/api/v1/nodes", node))
            if self._has_kvplace:
                described = node_topology(name, machine)
                calls.append(("POST", "/apis/kvplace.io/v1alpha1/nodetopologies", described))
        asyncio.run(ask_all(self._plane, calls))

    def measure(self, count: int, vmi: Callable[[str], Json]) -> Round:
        """Create VMIs of these manifests, follow them until all are bound, and remove them."""
        self._rounds += 1
        namespace = self._plane.create_namespace(f"vms-{self._rounds}")
        path = f"/apis/kubevirt.io/v1/namespaces/{namespace}/{VMIS}"
        vmis = [vmi(f"vm-{number:04}") for number in range(count)]
        calls: list[Call] = [("POST", path, {"apiVersion": "kubevirt.io/v1", **vmi}) for vmi in vmis]
        before = counted_requests(self._plane)
        with (
            Bindings(self._plane, namespace, count) as bindings,
            Instructions(self._processes()) as instructions,
        ):
            at_first, began = self._cpu(), time.monotonic()
            asyncio.run(ask_all(self._plane, calls))
            seconds = bindings.wait()[-1] - began
            time.sleep(AFTERWARDS_S)
            used = used_since(at_first, self._cpu())
        requests = requests_since(before, counted_requests(self._plane))
        self._remove(namespace)
        return Round(
            seconds,
            {name: 1000 * spent / count for name, spent in used.items()},
            {name: millions / count for name, millions in instructions.millions.items()},
            {name: number / count for name, number in requests.items()},
        )

    def _processes(self) -> dict[str, list[int]]:
        """Return the process ids by the name in the tables."""
        found: dict[str, list[int]] = {}
        for server in self._servers():
            if server.is_running:
                found.setdefault(process_name(server.name), []).append(server.pid)
        return found

    def _cpu(self) -> dict[str, float]:
        return {name: sum(map(cpu_seconds, pids)) for name, pids in self._processes().items()}

    def _remove(self, namespace: str) -> None:
        vmis = f"/apis/kubevirt.io/v1/namespaces/{namespace}/{VMIS}"
        self._plane.request("DELETE", vmis)
        deadline = time.monotonic() + _PATIENCE_S
        while self._plane.request("GET", f"{vmis}?limit=1")["items"] or self._is_claimed():
            # There is no kubelet here that would end the pods.
            self._plane.request("DELETE", f"/api/v1/namespaces/{namespace}/pods?gracePeriodSeconds=0")
            if time.monotonic() > deadline:
                raise TimeoutError(f"the VMs of {namespace} are still there after {_PATIENCE_S:.0f} s")
            time.sleep(0.5)

    def _is_claimed(self) -> bool:
        if not self._has_kvplace:
            return False
        try:
            ledgers = self._plane.request("GET", "/apis/kvplace.io/v1alpha1/nodeledgers")["items"]
        except RequestRefused as refused:
            if refused.status != 429:  # the first request of a new kind
                raise
            return True
        return any(ledger["spec"]["claims"] for ledger in ledgers)


def process_name(server: str) -> str:
    """Name the process as the tables do: schedulers, and replicas, count together."""
    for begins, name in (
        ("kvplace-serve", "kvplace"),
        ("kube-scheduler", "kube-scheduler"),
        ("kubevirt-admission", "KubeVirt's admission"),
    ):
        if server.startswith(begins):
            return name
    return server
