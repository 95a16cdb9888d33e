"""A node without an agent is described through a pod that needs nothing and leaves nothing."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.errors import BadTopology, KvplaceError, Misconfigured, Unavailable
from kvplace.core.node_devices import NO_NUMA, DeviceCount, NodeDevices, TopologyPolicy
from kvplace.core.node_topology import node_topology
from kvplace.core.scalars import NodeName, NumaId, ResourceName
from kvplace.kube.api_errors import ApiUnavailable, Denied, NotFound
from kvplace.kube.node_filters import NodeStatus, SchedulableNode
from kvplace.kube.object_client import Document, ObjectClient
from kvplace.kube.object_parts import ConditionObject
from kvplace.kube.watches import ApiKind
from kvplace.nodes.describing_pod import (
    MAX_LOG_BYTES,
    check_node,
    describe_through_pod,
    describing_pod,
    note_on_devices,
    reserved_by_kubelet,
)
from tests.nodes.machines import TWO

NODE = NodeName("worker")
PRINTED = json.dumps(node_topology("its-hostname", TWO), indent=2).encode()


def ended(phase: str = "Succeeded") -> dict[str, Any]:
    terminated = {"reason": "Completed"} if phase == "Succeeded" else {"reason": "OOMKilled", "exitCode": 137}
    return {"phase": phase, "containerStatuses": [{"name": "topology", "state": {"terminated": terminated}}]}


def waiting(reason: str) -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": "not found"}}
    return {"phase": "Pending", "containerStatuses": [{"image": "docker.io/kvplace/serve:1", "state": state}]}


def never_began(reason: str) -> dict[str, Any]:
    state = {"terminated": {"reason": reason, "message": "no such command", "exitCode": 128}}
    return {"phase": "Failed", "containerStatuses": [{"image": "docker.io/kvplace/serve:1", "state": state}]}


class Cluster(ObjectClient):
    """A cluster that runs the pod: it has these statuses one after the other, and prints this log."""

    def __init__(self, *statuses: dict[str, Any] | None, log: bytes = PRINTED) -> None:
        self.statuses = list(statuses)
        self.log = log
        self.pods: dict[str, Document] = {}
        self.made = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        """Lets the creation of the pod, which is there already, be answered."""
        self.pauses = 0

    async def create(
        self, kind: ApiKind, document: Document, *, namespace: str = "", dry_run: bool = False
    ) -> Document:
        self.pods["describe-1"] = document
        self.made.set()
        await self.may_answer.wait()
        return {**document, "metadata": {"name": "describe-1", "namespace": namespace}}

    async def read(self, kind: ApiKind, name: str, *, namespace: str = "") -> Document | None:
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        return None if status is None else {"status": status}

    async def delete(self, kind: ApiKind, name: str, *, namespace: str = "") -> None:
        if name not in self.pods:
            raise NotFound(name)
        del self.pods[name]

    async def read_log(self, namespace: str, pod: str, container: str, *, limit: int) -> bytes:
        assert limit == MAX_LOG_BYTES
        return self.log

    async def pause(self, seconds: float) -> None:
        self.pauses += 1

    async def describe(self, seconds: float = 60.0) -> Any:
        try:
            return await describe_through_pod(
                self,
                NODE,
                image="kvplace/serve:1",
                namespace="kvplace-system",
                seconds=seconds,
                pause=self.pause,
            )
        finally:
            assert self.pods == {}, "the pod is left behind"


async def test_the_pod_prints_the_machine_and_its_notes_are_kept_apart() -> None:
    cluster = Cluster(
        {"phase": "Pending"},
        ended(),
        log=b"kvplace: the machine names no L3\n" + PRINTED + b"\nkvplace: so\n",
    )
    topology, notes = await cluster.describe()
    assert topology == TWO
    assert notes == ("the machine names no L3", "so")
    assert cluster.pauses == 1


@pytest.mark.parametrize("log", [b"", b"{", b"\xff\x00", b'{"kind": "Pod"}', b"[1]", b'{"spec": {}}'])
async def test_output_that_is_not_a_machine_is_refused(log: bytes) -> None:
    with pytest.raises(BadTopology):
        await Cluster(ended(), log=log).describe()


async def test_a_pod_that_fails_states_why() -> None:
    with pytest.raises(BadTopology, match=r"\(OOMKilled, exit code 137\); it printed: /sys/devices/system"):
        await Cluster(ended("Failed"), log=b"kvplace: /sys/devices/system/cpu cannot be read\n").describe()


@pytest.mark.parametrize(
    ("statuses", "error", "sentence"),
    [
        ((waiting("ImagePullBackOff"),), Misconfigured, "image kvplace/serve:1 cannot run on the node"),
        ((never_began("StartError"),), Misconfigured, "StartError: no such command"),
        (({"phase": "Failed", "reason": "NodeAffinity"},), Unavailable, "the kubelet does not run"),
        ((None,), Unavailable, "was deleted before"),
    ],
)
async def test_a_pod_that_cannot_run_is_given_up_at_once(
    statuses: tuple[Any, ...], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        await Cluster(*statuses).describe()


async def test_an_interrupt_before_the_answer_to_its_creation_leaves_no_pod() -> None:
    cluster = Cluster(ended())
    cluster.may_answer.clear()
    describing = asyncio.create_task(cluster.describe())
    await cluster.made.wait()
    describing.cancel()
    await asyncio.sleep(0)
    cluster.may_answer.set()
    with pytest.raises(asyncio.CancelledError):
        await describing


async def test_a_pod_that_does_not_end_is_given_up_in_time() -> None:
    with pytest.raises(Unavailable, match="has not ended in 0 s"):
        await Cluster({"phase": "Running"}).describe(seconds=0.0)


def test_the_pod_has_no_token_no_volume_and_no_privilege() -> None:
    spec = describing_pod(NODE, "kvplace/serve:1", 60)["spec"]
    (container,) = spec["containers"]
    assert spec["automountServiceAccountToken"] is False
    assert "volumes" not in spec
    assert "volumeMounts" not in container
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["activeDeadlineSeconds"] == 60


def test_a_node_that_is_not_there_or_not_ready_is_named() -> None:
    ready = SchedulableNode(status=NodeStatus((ConditionObject("Ready", "True"),)))
    check_node(ready, NODE)
    with pytest.raises(Misconfigured, match="there is no node worker"):
        check_node(None, NODE)
    with pytest.raises(Unavailable, match="node worker is not Ready"):
        check_node(SchedulableNode(), NODE)


class Kubelet(ObjectClient):
    """States what it was made with."""

    def __init__(self, says: dict[str, Any] | KvplaceError) -> None:
        self.says = says

    async def read_kubelet_configuration(self, node: str) -> dict[str, Any]:
        assert node == NODE
        if isinstance(self.says, KvplaceError):
            raise self.says
        return self.says


async def test_cpus_that_the_kubelet_reserves_are_reserved() -> None:
    reserved, said = await reserved_by_kubelet(Kubelet({"reservedSystemCPUs": "1,9"}), NODE, TWO)
    assert reserved == parse_cpu_list("1,9")
    assert said == "CPU 1,9 is reserved, as the kubelet's reservedSystemCPUs state"


@pytest.mark.parametrize(
    ("says", "because"),
    [
        ({}, "the kubelet of worker reserves no CPU (reservedSystemCPUs)"),
        ({"reservedSystemCPUs": "99"}, "the kubelet of worker reserves no CPU (reservedSystemCPUs)"),
        ({"reservedSystemCPUs": "a"}, "could not be read"),
        (Denied("get", "nodes/proxy", "no"), "were not read (you may not get nodes/proxy)"),
        (ApiUnavailable("the kubelet does not answer"), "could not be read (the kubelet does not answer)"),
    ],
)
async def test_otherwise_the_core_of_the_lowest_cpu_is_and_a_sentence_states_why(
    says: dict[str, Any] | KvplaceError, because: str
) -> None:
    reserved, said = await reserved_by_kubelet(Kubelet(says), NODE, TWO)
    assert reserved == parse_cpu_list("0,8")
    assert because in said
    assert said.endswith("CPU 0,8 is reserved, the core of the lowest CPU; --reserved names others")


def test_devices_of_a_node_are_named_and_only_an_agent_knows_their_numa_nodes() -> None:
    allocatable = {"cpu": "8", "intel.com/vf": "4", "nvidia.com/gpu": "0", "devices.kubevirt.io/kvm": "1k"}
    assert note_on_devices(NODE, allocatable, None) == (
        "NUMA nodes of the devices of worker (4 intel.com/vf) are unknown: only an agent can ask the kubelet"
    )
    assert note_on_devices(NODE, {"cpu": "8"}, None) == ""
    vf = ResourceName("intel.com/vf")
    counts = [DeviceCount(vf, NumaId(0), 4, 3), DeviceCount(vf, NO_NUMA, 1, 1)]
    known = NodeDevices.of(counts, TopologyPolicy())
    said = note_on_devices(NODE, allocatable, known)
    assert said.startswith("free and all devices by NUMA node, as the agent of worker reports: intel.com/vf ")
    assert "0:3/4" in said
    assert "?:1/1" in said
    assert note_on_devices(NODE, allocatable, NodeDevices.of([], TopologyPolicy())) == ""
