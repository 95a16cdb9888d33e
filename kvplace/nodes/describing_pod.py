"""A short-lived pod that describes the machine of a node without an agent.

Every container sees the sysfs of its machine, so the pod needs no volume, no token, no capability and no
root. It prints the NodeTopology. The command reads it from the log and checks it before use.

The API server passes the question about the CPUs reserved for the host to the kubelet. A pod could read them
only in the kubelet's configuration file: that takes a volume of the host and often root. A user who may
describe nodes can often ask the kubelet (`get nodes/proxy`); for others the command names the missing values.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from kvplace.core.cpuset import format_cpu_list, parse_cpu_list
from kvplace.core.errors import BadBody, BadTopology, KvplaceError, Misconfigured, Unavailable
from kvplace.core.node_devices import NodeDevices, is_device
from kvplace.core.node_topology import read_node_topology
from kvplace.core.scalars import CpuMask, NodeName
from kvplace.core.strict_json import json_object
from kvplace.core.topology import Topology
from kvplace.kube.api_errors import Denied, NotFound
from kvplace.kube.node_filters import SchedulableNode
from kvplace.kube.object_client import ObjectClient
from kvplace.kube.watches import PODS

CONTAINER = "topology"
MAX_LOG_BYTES = 1 << 20
"""Far more than the largest machine takes, and little enough to hold."""
_NOTE = "kvplace: "
"""The prefix of the program's lines on stderr; a log mixes stdout and stderr."""
_POLL_S = 0.5
_CANNOT_START = (
    "ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "ImageInspectError", "RegistryUnavailable",
    "InvalidImageName", "CreateContainerConfigError", "CreateContainerError", "RunContainerError",
    "StartError", "ContainerCannotRun",
)  # fmt: skip
"""Reasons of a container that waits for good, and of one that ended before its program began."""


def describing_pod(node: NodeName, image: str, seconds: float) -> dict[str, Any]:
    """Write the pod; it ends by itself, even if nothing is left to delete it."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": "kvplace-describe-",
            "labels": {"app.kubernetes.io/name": "kvplace", "app.kubernetes.io/component": "describe-node"},
        },
        "spec": {
            "nodeName": node,
            "restartPolicy": "Never",
            "activeDeadlineSeconds": max(1, round(seconds)),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 0,
            "tolerations": [{"operator": "Exists"}],
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 65532,
                "runAsGroup": 65532,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": CONTAINER,
                    "image": image,
                    "command": ["kvplace", "topology", "--output=json"],
                    "resources": {
                        "requests": {"cpu": "10m", "memory": "64Mi"},
                        "limits": {"cpu": "1", "memory": "256Mi"},
                    },
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                }
            ],
        },
    }


async def describe_through_pod(
    client: ObjectClient,
    node: NodeName,
    *,
    image: str,
    namespace: str,
    seconds: float,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> tuple[Topology, tuple[str, ...]]:
    """Read the machine of a node, and notes about it, through a pod that is deleted in any case.

    Raises Misconfigured without the namespace, or if the image cannot run there, BadTopology if the pod
    prints no machine, and Unavailable if it has not ended in time.
    """
    creating = asyncio.create_task(_created(client, describing_pod(node, image, seconds), namespace))
    try:
        name = await asyncio.shield(creating)
        failure = await _ended(client, namespace, name, image, seconds, pause)
        log = await client.read_log(namespace, name, CONTAINER, limit=MAX_LOG_BYTES)
    finally:
        await asyncio.shield(_gone(client, namespace, creating))
    return _read_described(log, node, failure)


async def _created(client: ObjectClient, pod: dict[str, Any], namespace: str) -> str:
    """Create the pod and return its name."""
    try:
        made = await client.create(PODS.api, pod, namespace=namespace)
    except NotFound:
        raise Misconfigured(
            f"there is no namespace {namespace} for the pod; name one with --pod-namespace"
        ) from None
    return str(made["metadata"]["name"])


def _read_described(log: bytes, node: NodeName, failure: str) -> tuple[Topology, tuple[str, ...]]:
    """Read the machine and the notes out of a log; raises BadTopology, also where the pod has failed."""
    lines = log.decode("utf-8", "replace").splitlines()
    notes = tuple(line.removeprefix(_NOTE) for line in lines if line.startswith(_NOTE))
    text = "\n".join(line for line in lines if not line.startswith(_NOTE)).strip()
    if failure:
        said = "; ".join((*notes, *text.splitlines()[-1:])) or "nothing"
        raise BadTopology(
            f"the pod on node {node} could not read its machine ({failure}); it printed: {said[:500]}"
        )
    try:
        _, topology = read_node_topology(json_object(text, what=f"the output of the pod on node {node}"))
    except BadBody as error:
        raise BadTopology(str(error)) from None
    return topology, notes


def check_node(node: SchedulableNode | None, name: NodeName) -> None:
    """Raise Misconfigured or Unavailable for a node where no pod can be started."""
    if node is None:
        raise Misconfigured(f"there is no node {name}; `kubectl get nodes` lists them")
    if not node.is_ready:
        raise Unavailable(f"node {name} is not Ready, so its kubelet starts no pods; describe it when it is")


async def _ended(
    client: ObjectClient,
    namespace: str,
    name: str,
    image: str,
    seconds: float,
    pause: Callable[[float], Awaitable[None]],
) -> str:
    """Wait until the pod has ended, and return why it has failed; empty when it has not."""
    loop = asyncio.get_running_loop()
    ends = loop.time() + seconds
    while True:
        pod = await client.read(PODS.api, name, namespace=namespace)
        if pod is None:
            raise Unavailable(f"pod {namespace}/{name} was deleted before it had read the machine")
        status = pod.get("status") or {}
        phase, containers = status.get("phase"), status.get("containerStatuses") or ()
        for container in containers:
            for state in (container.get("state") or {}).values():
                if state.get("reason") in _CANNOT_START:
                    raise Misconfigured(
                        f"image {image} cannot run on the node ({state['reason']}: "
                        f"{state.get('message', '')}); name one with --image"
                    )
        if phase == "Succeeded":
            return ""
        if phase == "Failed" and containers:
            terminated = (containers[0].get("state") or {}).get("terminated") or {}
            return f"{terminated.get('reason', 'Error')}, exit code {terminated.get('exitCode')}"
        if phase == "Failed":
            why = status.get("message") or status.get("reason") or "no reason given"
            raise Unavailable(f"the kubelet does not run pod {namespace}/{name}: {why}")
        if loop.time() >= ends:
            raise Unavailable(
                f"pod {namespace}/{name} has not ended in {seconds:.0f} s (phase {phase}); "
                "give it more time with --timeout, or see why its node does not start it"
            )
        await pause(_POLL_S)


async def _gone(client: ObjectClient, namespace: str, creating: asyncio.Task[str]) -> None:
    """Delete the pod, after the answer to its creation."""
    await asyncio.wait([creating])
    if creating.exception() is not None:
        return
    with contextlib.suppress(NotFound):
        await client.delete(PODS.api, creating.result(), namespace=namespace)


def note_on_devices(node: NodeName, allocatable: Mapping[str, str], known: NodeDevices | None) -> str:
    """State in a sentence the devices of a node and their NUMA nodes; empty where it has none.

    The pod cannot ask the kubelet: its socket needs a volume of the host. So only an agent (`known`) knows
    the NUMA nodes, and the API server has the number of devices alone.
    """
    if known is not None:
        places = known.phrase
        return (
            f"free and all devices by NUMA node, as the agent of {node} reports: {places}" if places else ""
        )
    counts = ", ".join(
        f"{count} {name}" for name, count in sorted(allocatable.items()) if is_device(name) and count != "0"
    )
    if not counts:
        return ""
    return f"NUMA nodes of the devices of {node} ({counts}) are unknown: only an agent can ask the kubelet"


async def reserved_by_kubelet(
    reader: ObjectClient, node: NodeName, topology: Topology
) -> tuple[CpuMask, str]:
    """Return the CPUs to reserve if the user names none, and a sentence about their source."""
    lowest = topology.cores[0]
    others = f"CPU {format_cpu_list(lowest)} is reserved, the core of the lowest CPU; --reserved names others"
    try:
        said = (await reader.read_kubelet_configuration(node)).get("reservedSystemCPUs") or ""
        reserved = parse_cpu_list(str(said), what="reservedSystemCPUs") & topology.cpus
    except Denied:
        return (
            lowest,
            f"the kubelet's reservedSystemCPUs were not read (you may not get nodes/proxy): {others}",
        )
    except (KvplaceError, ValueError) as error:
        return lowest, f"the kubelet's reservedSystemCPUs could not be read ({error}): {others}"
    if not reserved:
        return lowest, f"the kubelet of {node} reserves no CPU (reservedSystemCPUs): {others}"
    return reserved, f"CPU {format_cpu_list(reserved)} is reserved, as the kubelet's reservedSystemCPUs state"
