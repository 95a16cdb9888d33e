"""Names of kvplace in Kubernetes objects (annotations, labels, a resource, a pod condition) and in log lines.

A name is written here once, and its readers and writers import it. `annotations.py` reads the values of
requests. The fields of a log line that state its pod have one form in all components
(`log.info(..., extra=about_pod(...))`), so that the lines about a pod can be joined by its UID.
"""

from __future__ import annotations

from enum import StrEnum

from kvplace.core.scalars import PodUid

PREFIX = "kvplace.io/"
CPU_SET = "cpu-set"
KVPLACE_CPU_SET = "kvplace.io/cpu-set"
CPU_POLICY = "kvplace.io/cpu-policy"
SMT = "kvplace.io/smt"
EMULATOR_THREADS = "kvplace.io/emulator-threads"
NUMA_MEMORY = "kvplace.io/numa-memory"
GUEST_NUMA = "kvplace.io/guest-numa"
DEVICE_NUMA = "kvplace.io/device-numa"
ON_FAILURE = "kvplace.io/on-failure"
EXPLAIN = "kvplace.io/explain"
MOVABLE = "kvplace.io/movable"
MAKE_ROOM = "kvplace.io/make-room"
CRANE_POLICY = "topology.crane.io/cpu-policy"
CRANE_AWARENESS = "topology.crane.io/topology-awareness"
CRANE_MANAGER = "qos.gocrane.io/cpu-manager"

CPU_MAP = "cpu-map"
PLACEMENT = "kvplace.io/placement"
REQUEST = "kvplace.io/request"
EXPLANATION = "kvplace.io/explanation"
CRANE_RESULT = "topology.crane.io/topology-result"

OPTING_IN = (CPU_SET, KVPLACE_CPU_SET, CPU_POLICY, CRANE_POLICY, CRANE_AWARENESS, CRANE_MANAGER)
"""Keys that request cores; a VM without any of them is not touched."""
MODIFIERS = (
    SMT,
    EMULATOR_THREADS,
    NUMA_MEMORY,
    GUEST_NUMA,
    DEVICE_NUMA,
    ON_FAILURE,
    EXPLAIN,
    MOVABLE,
    MAKE_ROOM,
)
"""Keys that change such a request, and do nothing alone."""
ASKING = (*OPTING_IN, *MODIFIERS)
"""All keys of a request."""

RESULTS = (CPU_MAP, PLACEMENT, REQUEST, EXPLANATION, CRANE_RESULT)
"""Keys that only kvplace writes, and only on pods."""
PLACE_AGAIN = "kvplace.io/place-again"
"""Key of `kvplace defragment` on a running VM: `serve` is to give the pod with this UID, while it has this
revision, better cores if there are some. See `place_again_of`."""
VM_SIZE = "kvplace.io/vm-size"
"""Key that only admission writes, on VMIs: their size as KubeVirt reads it from their spec."""

PLACED_LABEL = "kvplace.io/placed"
"""Label, value `true`, of every pod that pod admission wrote a request on; watches select by it."""
OPTED_IN_LABEL = "kvplace.io/opted-in"
"""Label, value `true`, of a VMI created with options: admission sees every change of them and of its size."""
FRONT_END_LABEL = "kvplace.io/front-end"
"""Label, value `plugin`, of a VMI and its pods: a Plugin of KubeVirt calls the hook, not the annotation."""
PLUGIN_SOCKET = "/var/run/kubevirt-plugin/kvplace/hook.sock"
"""Socket of the hook that our Plugin calls (manifests/plugin), in a virt-launcher pod."""
EDITED_LABEL = "kvplace.io/edited"
"""Label, value `true`, of a VMI with a request that was edited while it ran; watches select by it."""
PINNED = "kvplace.io/Pinned"
"""Pod condition by the agent: True after the affinity of every thread has been read back as placed."""
RELOCATED = "kvplace.io/Relocated"
"""Pod condition by `serve`: whether the running pod got the cores that its edited annotations ask for."""
NO_LONGER_RUNNING = "NotRunning"
"""Reason of the condition Pinned: it was True, and the threads have ended."""
TOPOLOGY_READY = "Ready"
"""Condition of a NodeTopology by the agent: the sum of its others."""
MARKER_RESOURCE = "kvplace.io/vm"
"""Extended resource that no node offers; `managedResources` of the extender's configuration names it."""
MOVE_LABEL = "kvplace.io/move"
"""Label, value `true`, of a live migration that kvplace has created; its rights are limited to these."""
RELEASED_AT = "kvplace.io/released-at"
"""Node annotation; its change makes kube-scheduler try waiting pods again."""
ROLLOUT_LABEL = "kvplace.io/rollout"
"""Label of every VM, VMI and pod of a rollout, and of the ConfigMap with its document: the rollout's name."""


class FrontEnd(StrEnum):
    """How KubeVirt comes to call the hook of a VM."""

    ANNOTATION = "annotation"
    PLUGIN = "plugin"


def about_pod(
    uid: PodUid, namespace: str = "", name: str = "", *, vmi: str = "", node: str = "", attempt: int = 0
) -> dict[str, object]:
    """Name a pod, its VMI and its node if they are known, and kube-scheduler's attempt."""
    fields: dict[str, object] = {"uid": uid}
    if name:
        fields["pod"] = f"{namespace}/{name}"
    if vmi:
        fields["vm"] = f"{namespace}/{vmi}" if namespace else vmi
    if node:
        fields["node"] = node
    if attempt:
        fields["attempt"] = attempt
    return fields
