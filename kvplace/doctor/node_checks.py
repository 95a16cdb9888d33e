"""Checks of the nodes: kubelet, description, agent, and the devices that agents report."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from kvplace.core.cpuset import format_cpu_list
from kvplace.core.node_devices import NO_NUMA, DeviceCount, DeviceReport
from kvplace.core.node_topology import Enforcement
from kvplace.core.quantity import counted
from kvplace.core.scalars import NumaId, ResourceName
from kvplace.core.topology import Topology
from kvplace.doctor.admission_checks import CPU_CLAIMS_POLICY
from kvplace.doctor.installation import (
    AGENT,
    Finding,
    Installation,
    name_nodes,
    object_name,
    some,
    warning,
    wrong,
)
from kvplace.doctor.program_checks import pods_of
from kvplace.kube.node_filters import SchedulableNode
from kvplace.kube.object_client import Document, at, items_at
from kvplace.kube.object_records import TopologyRecord
from kvplace.nodes.cluster_view import NodeView
from kvplace.nodes.node_machine import NOT_DESCRIBED, Unusable

_SHOWN = 5
_INSTANCE = "app.kubernetes.io/instance"
_RELEASE = (
    "kubectl patch nodetopology NODE --subresource status --type merge -p "
    """'{"status":{"enforcement":"none"}}'"""
)
_RUNS_VMS = "kubevirt.io/schedulable"
OLDEST_KUBELET = (1, 29)
"""The first release that runs restartable init containers, unless its gate `SidecarContainers` is off."""
_REJECTED = "InitContainerRestartPolicyForbidden"
"""The reason that a kubelet gives a pod with such a container when it does not run them."""


def check_descriptions(found: Installation) -> Iterator[Finding]:
    """Check that every node for VMs has a readable description."""
    missing: list[str] = []
    unreadable: list[NodeView] = []
    for node in _vm_nodes(found):
        view = found.view.nodes.get(node.metadata.name)  # type: ignore[call-overload]
        if view is None or not isinstance(view.machine, Unusable):
            continue  # a ledger that cannot be read has a check of its own
        if view.machine == NOT_DESCRIBED:
            missing.append(view.name)
        else:
            unreadable.append(view)
    if missing:
        yield warning(
            counted(len(missing), "node"),
            f"nothing describes {some(missing, _SHOWN)}, so no VM that opted in is placed there",
            "let the agent run there, or `kubectl kvplace describe-node NODE --apply`",
        )
    for view in unreadable[:_SHOWN]:
        is_object = view.described is not None and view.described.topology is None
        yield wrong(
            f"node {view.name}",
            f"nothing can be placed there: {view.problem}",
            f"see `kubectl get nodetopology {view.name} -o yaml`"
            if is_object
            else f"see its annotation cpu-map: `kubectl get node {view.name} -o yaml`",
        )
    if len(unreadable) > _SHOWN:
        more = counted(len(unreadable) - _SHOWN, "more node")
        yield wrong(more, "nothing can be placed there", "see `kubectl kvplace get nodes`")


def check_kubelets(found: Installation) -> Iterator[Finding]:
    """Check that the kubelet of every node for VMs runs restartable init containers, such as the hook."""
    old: dict[str, str] = {}
    for node in _vm_nodes(found):
        version = node.status.node_info.kubelet_version
        match = re.match(r"v?(\d+)\.(\d+)", version)
        if match is not None and (int(match[1]), int(match[2])) < OLDEST_KUBELET:
            old[node.metadata.name] = version
    problem = "rejects the pods of VMs that opted in: it does not run restartable init containers"
    keep_away = "until then, keep VMs that opted in away from there, for example with a taint"
    if old:
        versions = some(set(old.values()))
        oldest = ".".join(map(str, OLDEST_KUBELET))
        yield wrong(
            name_nodes(old),
            f"the kubelet ({versions}) {problem}",
            f"upgrade the kubelet to {oldest} or newer; {keep_away}",
        )
    rejecting = {
        str(at(pod, "spec", "nodeName"))
        for pod in found.of("failed pods")
        if at(pod, "status", "reason") == _REJECTED
    }
    if off := rejecting - old.keys():
        yield wrong(
            name_nodes(off),
            f"the kubelet {problem} ({_REJECTED})",
            f"switch its feature gate SidecarContainers on; {keep_away}",
        )


def check_agents(found: Installation) -> Iterator[Finding]:
    """Check that every node for VMs has its agent, and that the agents report no fault."""
    daemonsets = found.component("daemonsets", AGENT)
    if not daemonsets:
        yield warning(
            "DaemonSet of the agent",
            "it is missing: nodes are not described, nothing keeps other containers off the cores of VMs, "
            "and Pinned is never reported",
            "take the component without-agent out of your folder and apply it again, unless the nodes are "
            "described by hand on purpose",
        )
    instances = {at(one, "metadata", "labels", _INSTANCE) for one in daemonsets}
    if len(daemonsets) > len(instances):  # the nodes of dra-driver-cpu have their own
        names = some(object_name(one, "DaemonSet") for one in daemonsets)
        yield wrong("DaemonSets of the agent", f"there are several ({names})", "delete the unused DaemonSet")
    for one in daemonsets:
        wanted, ready = (at(one, "status", key) or 0 for key in ("desiredNumberScheduled", "numberReady"))
        if ready < wanted:
            alive = {at(pod, "spec", "nodeName") for pod in pods_of(found, AGENT) if _is_ready(pod)}
            down = [
                node.metadata.name
                for node in found.nodes
                if node.is_ready and node.metadata.name not in alive and _is_chosen(node, one)
            ]
            where = f": {some(down, _SHOWN)}" if down else ""
            yield wrong(
                object_name(one, "DaemonSet"),
                f"{ready} of {counted(wanted, 'agent')} ready{where}; VMs with own cores do not start there",
                f"see `kubectl -n {one['metadata'].get('namespace')} get pods -o wide` and "
                '"The agent of a node is down" in Troubleshooting',
            )
    yield from _stale(found, has_agent=bool(daemonsets))


def check_conditions(found: Installation) -> Iterator[Finding]:
    """Check the conditions that agents report on their nodes, and the CPUs that kubelets hold."""
    for view in found.view.nodes.values():
        if view.described is not None:
            yield from _said(view.described)
    there = {view.name: view.described for view in found.view.nodes.values() if view.exists}
    by_agents = {name: described for name, described in there.items() if described is not None}
    held = {name: described.kubelet_cpus for name, described in by_agents.items() if described.kubelet_cpus}
    if held:
        cpus = "; ".join(f"{name}: CPUs {format_cpu_list(held[name])}" for name in sorted(held)[:_SHOWN])
        yield warning(
            name_nodes(held),
            f"the kubelet's static policy holds {cpus}; kvplace sets no cpusets there",
            "set cpuManagerPolicy: none, or keep VMs that opted in away from there",
        )
    of_driver = [name for name, described in by_agents.items() if described.enforcement is Enforcement.DRA]
    if of_driver and found.named("validatingadmissionpolicies", CPU_CLAIMS_POLICY) is None:
        yield wrong(
            name_nodes(of_driver),
            "dra-driver-cpu sets the cpusets there (enforcement dra), and kvplace may not hand cores over",
            "add the component dra-driver-cpu to your folder and apply it again",
        )
    elif of_driver:
        yield warning(
            name_nodes(of_driver),
            "dra-driver-cpu sets the cpusets there (enforcement dra, experimental): VMs get no cores there",
            "nothing for plain pods with ResourceClaims; for VMs set ENFORCEMENT=auto and remove the driver",
        )
    open_nodes = [
        name
        for name, described in by_agents.items()
        if name not in held and described.by_agent and described.enforcement is Enforcement.NONE
    ]
    if open_nodes:
        yield warning(
            name_nodes(open_nodes),
            "nothing keeps other containers off the cores of VMs there (enforcement none)",
            "set ENFORCEMENT=auto in kvplace-agent-settings, or dedicate the nodes with a taint",
        )


def check_reserved(found: Installation) -> Iterator[Finding]:
    """Check that QEMU's own threads find reserved CPUs on each NUMA node that VMs get cores from."""
    lacking = {
        view.name: numbers
        for view in found.view.nodes.values()
        if view.exists and view.described is not None and (topology := view.described.topology) is not None
        if (numbers := _without_reserved(topology))
    }
    if lacking:
        where = "; ".join(
            f"{name}: NUMA node {', '.join(map(str, lacking[name]))}" for name in sorted(lacking)[:_SHOWN]
        )
        yield warning(
            name_nodes(lacking),
            f"no CPU is reserved on {where}; QEMU's own threads of the VMs there run on reserved CPUs of "
            "another NUMA node of the socket, or on the VMs' own CPUs",
            "reserve at least one core of each NUMA node (RESERVED_CPUS of the agent, or the kubelet's "
            "reservedSystemCPUs), or set kvplace.io/emulator-threads: isolate",
        )


def _without_reserved(topology: Topology) -> list[NumaId]:
    """Return the NUMA nodes of several cores that have no reserved CPU."""
    return [
        node.id
        for node in topology.numa_nodes
        if not node.cpus & topology.reserved and len(topology.cores_in(node.cpus)) > 1
    ]


def _said(topology: TopologyRecord) -> Iterator[Finding]:
    if topology.agent_fault:
        yield wrong(
            f"NodeTopology {topology.node}",
            topology.agent_fault,
            f"see `kubectl get nodetopology {topology.node} -o yaml` and "
            '"Conditions of the NodeTopology" in The node agent',
        )
    if topology.is_unread:
        yield warning(
            f"NodeTopology {topology.node}",
            "its agent has not read the newest description yet",
            "check again; if it remains, read the log of the agent there",
        )


def _stale(found: Installation, *, has_agent: bool) -> Iterator[Finding]:
    """Find descriptions of nodes that are gone, and of agents that are gone."""
    gone = [name for name, node in found.view.nodes.items() if not node.exists and node.described is not None]
    if gone:
        yield warning(
            counted(len(gone), "NodeTopology").replace("ys", "ies"),
            f"{some(gone, _SHOWN)}: their nodes do not exist any more",
            "kubectl delete nodetopology NAME",
        )
    orphans = [
        name
        for name, node in found.view.nodes.items()
        if not has_agent and node.exists and node.described is not None and node.described.by_agent
    ]
    if orphans:
        yield warning(
            counted(len(orphans), "node"),
            f"{some(orphans, _SHOWN)}: their agent is gone; changes of the machine are not noticed",
            f'run the agent again; "Run a node without its agent" in Troubleshooting: `{_RELEASE}`',
        )


def _vm_nodes(found: Installation) -> Iterator[SchedulableNode]:
    """Return the nodes that may run VMs; all that take pods, where KubeVirt marks none."""
    marked = [node for node in found.nodes if (node.metadata.labels or {}).get(_RUNS_VMS) == "true"]
    return iter(
        marked or [node for node in found.nodes if not node.spec.unschedulable and not _tainted(node)]
    )


def _tainted(node: SchedulableNode) -> bool:
    return any(taint.effect in ("NoSchedule", "NoExecute") for taint in node.spec.taints or ())


def _is_chosen(node: SchedulableNode, daemonset: Document) -> bool:
    """Whether a DaemonSet is meant for a node: people narrow the agent's DaemonSet by a node selector."""
    labels = node.metadata.labels or {}
    wanted = at(daemonset, "spec", "template", "spec", "nodeSelector") or {}
    return all(labels.get(key) == value for key, value in wanted.items())


def _is_ready(pod: object) -> bool:
    return any(
        one.get("type") == "Ready" and one.get("status") == "True"
        for one in (items_at(pod, "status", "conditions") if isinstance(pod, dict) else ())
    )


_LOWEST = NumaId(0)


def check_devices(found: Installation) -> Iterator[Finding]:
    """Check the nodes with several NUMA nodes: on others every device is local."""
    reports = {
        view.name: view.described.devices
        for view in found.view.nodes.values()
        if view.exists and view.described is not None and view.described.devices is not None
        if (topology := view.described.topology) is not None and len(topology.numa_nodes) > 1
    }
    for resources_of, problem, fix in _DEVICE_FAULTS:
        nodes = {name: resources for name, report in reports.items() if (resources := resources_of(report))}
        if nodes:
            named = ", ".join(sorted({resource for resources in nodes.values() for resource in resources}))
            yield warning(name_nodes(nodes), problem.format(named), fix)


def _sent_as_node_0(report: DeviceReport) -> set[ResourceName]:
    """Return the resources with a plugin that sends NUMA node 0 without knowing it, or wrongly."""
    elsewhere = {
        device.resource
        for devices in report.pods.values()
        for device in devices
        if device.node == _LOWEST and report.node_of_address(device.address) not in (_LOWEST, NO_NUMA)
    }
    if report.pci:
        return elsewhere
    # sysfs has no NUMA node for any PCI device, so no plugin can know that all of its devices are on node 0.
    return {one.resource for one in report.devices.counts if one.node == _LOWEST}


def _on_several(report: DeviceReport) -> set[ResourceName]:
    counts: dict[ResourceName, list[DeviceCount]] = {}
    for one in report.devices.counts:
        if one.node != NO_NUMA and one.total:
            counts.setdefault(one.resource, []).append(one)
    return {resource for resource, by_node in counts.items() if len(by_node) > 1}


_DEVICE_FAULTS: tuple[tuple[Callable[[DeviceReport], set[ResourceName]], str, str], ...] = (
    (
        lambda report: set() if report.devices.policy.aligns else _on_several(report),
        (
            "{} has devices on several NUMA nodes, and the kubelet takes any free one "
            "(topologyManagerPolicy none): VMs with kvplace.io/device-numa: required are refused"
        ),
        "set topologyManagerPolicy: best-effort; leave cpuManagerPolicy and memoryManagerPolicy at none",
    ),
    (
        lambda report: _on_several(report) if report.devices.policy.rejects else set(),
        (
            "{} has devices on several NUMA nodes, and the kubelet fails the pod of a VM if it cannot align "
            "them (topologyManagerPolicy restricted or single-numa-node)"
        ),
        "set topologyManagerPolicy: best-effort",
    ),
    (
        lambda report: {one.resource for one in report.devices.counts if one.node == NO_NUMA},
        "{} has devices without a NUMA node: they do not count when cores are chosen",
        (
            "let the firmware state the NUMA node of each PCI root, and the device plugin send it "
            "(sriov-network-device-plugin: excludeTopology: false)"
        ),
    ),
    (
        _sent_as_node_0,
        "the device plugin of {} sends NUMA node 0, which sysfs does not confirm",
        (
            "some plugins send 0 where the firmware states no NUMA node: correct the firmware or the plugin, "
            "or set kvplace.io/device-numa: off"
        ),
    ),
)
"""The resources of a node with a fault, the fault and its fix."""
