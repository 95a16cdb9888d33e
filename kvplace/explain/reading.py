"""Reads the input of an explanation: the VM, its pods and events, and all nodes of the cluster."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypeVar

from kvplace.core.claim_changes import is_for_migration
from kvplace.core.cluster.node_choice import Strategy
from kvplace.core.errors import Absent, BadBody, Forbidden, KvplaceError
from kvplace.core.node_topology import Enforcement
from kvplace.core.quantity import first_of
from kvplace.core.request_json import PodRequest
from kvplace.core.scalars import NodeName, PodUid
from kvplace.core.strict_json import did_you_mean, shown
from kvplace.core.well_known_names import PINNED
from kvplace.explain.explanation import Explanation, Fitting, Seat, VmEvent, fit
from kvplace.explain.notes import (
    note_on_interfaces,
    note_on_move,
    note_on_reservation,
    notes_on_containers,
    notes_on_document,
    notes_on_held,
    notes_on_vmi,
    notes_on_waiting,
    state_of,
)
from kvplace.kube.concurrency import together
from kvplace.kube.node_filters import PodDemands, SchedulableNode, demands_of, obstacle
from kvplace.kube.object_client import Document, ObjectClient, condition
from kvplace.kube.reported_vms import VMS, reported_vmi
from kvplace.kube.watches import PODS, VMIS, ApiKind, ListClient
from kvplace.nodes.cluster_reading import read_cluster
from kvplace.nodes.cluster_view import ClusterView, NodeView, VmState, VmView, with_devices_of_claims
from kvplace.nodes.dra_devices import read_dra_devices
from kvplace.nodes.node_machine import NOT_KNOWN, NodeMachine
from kvplace.nodes.planning_cluster import read_schedulable_nodes

T = TypeVar("T")

EVENTS = ApiKind("events")
_SHOWN_EVENTS = 12
_NAMED = 3
_RUNS_THERE = "the VM runs there, and a live migration goes to another node"
_GONE = NodeView(NodeName(""), NOT_KNOWN, exists=False)

Stated = Callable[[Document, str], PodRequest | None]
"""Reads the request of an object, in a namespace."""


class TargetKind(Enum):
    """The kinds that can be explained, by their names in the API."""

    VM = "VirtualMachine"
    VMI = "VirtualMachineInstance"
    POD = "Pod"


_KINDS = {TargetKind.VM: VMS.api, TargetKind.VMI: VMIS.api, TargetKind.POD: PODS.api}
_WITH = {kind: (kind,) for kind in TargetKind} | {TargetKind.VM: (TargetKind.VM, TargetKind.VMI)}
"""The kinds of the objects of one name that are read together."""
_WORDS = {
    **dict.fromkeys(("vm", "vms", "virtualmachine", "virtualmachines"), TargetKind.VM),
    **dict.fromkeys(("vmi", "vmis", "virtualmachineinstance", "virtualmachineinstances"), TargetKind.VMI),
    **dict.fromkeys(("pod", "pods", "po"), TargetKind.POD),
}


_NAME = r"[A-Za-z0-9]([-.A-Za-z0-9]*[A-Za-z0-9])?"
"""Names of the API server, and names in capitals, which get a suggestion."""
_SHORT = {"VirtualMachine": "vm", "VirtualMachineInstance": "vmi", "Pod": "pod"}


@dataclass(frozen=True, slots=True)
class ExplainedObject:
    """The object in question."""

    kind: TargetKind
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind.value} {self.namespace}/{self.name}"


def read_target(text: str, namespace: str) -> ExplainedObject:
    """Read `vm/NAME`, `vmi/NAME`, `pod/NAME`, or the NAME of a VM; raises BadBody."""
    word, slash, name = text.partition("/")
    kind = _WORDS.get(word.lower().split(".")[0]) if slash else TargetKind.VM
    name = name if slash else word
    if kind is None or not re.fullmatch(_NAME, name):
        raise BadBody(
            f"{shown(text)} names nothing that can be explained; write vm/NAME, vmi/NAME or pod/NAME"
        )
    return ExplainedObject(kind, namespace, name)


def choose_document(documents: Iterable[Document], text: str, what: str) -> Document:
    """Choose the VM, VMI or pod of a file: the only one, or the object that `text` names; raises BadBody."""
    found: dict[str, list[Document]] = {}
    for document in documents:
        kind = document.get("kind")
        if isinstance(kind, str) and kind in _SHORT:
            metadata = document.get("metadata") or {}
            if not isinstance(metadata, dict):
                raise BadBody(f"{what}: metadata is {shown(metadata)}; it must be a mapping")
            name = f"{_SHORT[kind]}/{metadata.get('name') or '(no name)'}"
            found.setdefault(name, []).append(document)
    if text:
        target = read_target(text, "")
        name = f"{_SHORT[target.kind.value]}/{target.name}"
        if name not in found:
            raise BadBody(f"{what} does not contain {name}; it contains {', '.join(found) or 'no VM'}")
        found = {name: found[name]}
    if len(found) > 1:
        raise BadBody(f"{what} contains {len(found)} VMs: {', '.join(found)}; name one of them beside -f")
    if not found:
        raise BadBody(f"{what} contains no VirtualMachine, VirtualMachineInstance or Pod")
    ((name, alike),) = found.items()
    if len(alike) > 1:
        raise BadBody(f"{what} contains {name} {len(alike)} times; give a file with one of them")
    return alike[0]


async def explain_target(
    reader: ObjectClient, cluster: ListClient, target: ExplainedObject, stated: Stated, strategy: Strategy
) -> Explanation:
    """Explain a VM, VMI or pod of the cluster; raises Absent when there is none of that name."""
    kinds = tuple(_KINDS[kind] for kind in _WITH[target.kind])
    read = await together(*(reader.read(kind, target.name, namespace=target.namespace) for kind in kinds))
    documents = [document for document in read if document is not None]
    view, nodes, events = await together(
        read_cluster(cluster), _read_nodes(reader), _read_events(reader, target)
    )
    vms = _vms_of(view, target)
    if not documents and not vms:
        raise Absent(f"there is no {target}{await _elsewhere(reader, kinds[0], view, target)}")
    names = {vm.pod.name for vm in vms} - {target.name}
    pods = await together(*(reader.read(PODS.api, name, namespace=target.namespace) for name in names))
    raw_pods = {
        pod["metadata"]["uid"]: pod for pod in (*pods, *documents) if pod and pod.get("kind") == "Pod"
    }
    for more in await together(*(_events_of(reader, "Pod", target.namespace, name) for name in names)):
        events += more
    newest = tuple(sorted(set(events), key=lambda event: event.when)[-_SHOWN_EVENTS:])
    explained = _Explaining(view, nodes, target, newest, strategy)
    if vms:
        vms, unread = await _with_resource_claims(cluster, view, vms)
        vmi = next((one for one in documents if one.get("kind") == TargetKind.VMI.value), None)
        found = explained.of_pods(vms, raw_pods, vmi)
        return replace(found, notes=(*found.notes, *unread))
    return explained.of_document(documents[-1], stated)


async def explain_document(
    reader: ObjectClient,
    cluster: ListClient,
    document: Document,
    namespace: str,
    stated: Stated,
    strategy: Strategy,
) -> Explanation:
    """Explain a VM, VMI or pod that a person has written and perhaps not created."""
    stated(document, namespace)  # a mistake in the document is reported before a cluster is asked
    view, nodes = await together(read_cluster(cluster), _read_nodes(reader))
    metadata = document.get("metadata") or {}
    target = ExplainedObject(
        TargetKind(document["kind"]),
        metadata.get("namespace") or namespace,
        metadata.get("name") or "unnamed",
    )
    written = {key: value for key, value in document.items() if key != "status"}
    return _Explaining(view, nodes, target, (), strategy).of_document(written, stated)


class _Explaining:
    """Everything that was read."""

    def __init__(
        self,
        view: ClusterView,
        nodes: Mapping[NodeName, SchedulableNode],
        target: ExplainedObject,
        events: tuple[VmEvent, ...],
        strategy: Strategy,
    ) -> None:
        self._view = view
        self._nodes = nodes
        self._target = target
        self._events = events
        self._strategy = strategy

    def of_pods(
        self, vms: tuple[VmView, ...], raw: Mapping[str, Document], vmi: Document | None
    ) -> Explanation:
        """Explain a VM by its pods; its instance shows whether its guest runs, as in `get vms`."""
        if vmi is not None:
            known = reported_vmi(vmi)
            vms = tuple(replace(vm, kubevirt=known) if vm.is_vmi else vm for vm in vms)
        waiting = [vm for vm in vms if not vm.node]
        seated = [vm for vm in vms if vm.node]
        staying = [vm for vm in seated if vm.state is not VmState.ENDING]
        fitting = None
        if waiting and (request := waiting[0].request) is not None:
            spec = raw.get(waiting[0].pod.uid, {}).get("spec") or {}
            demands = demands_of(spec, f"Pod {waiting[0].pod.name}: spec")
            leaving = frozenset(vm.node for vm in staying)
            fitting = self._fitting(request, demands, leaving, waiting[0].pod.uid)
        first = (staying or waiting or seated)[0]
        return self._explanation(
            first.state.value,
            first.request,
            self._notes_on_pods(waiting, seated, raw, vmi),
            fitting=fitting,
            seats=tuple(
                Seat(
                    vm,
                    self._view.nodes.get(vm.node, _GONE),
                    _since(raw.get(vm.pod.uid, {}), PINNED),
                    is_ready=vm.node in self._nodes and self._nodes[vm.node].is_ready,
                )
                for vm in seated
            ),
        )

    def of_document(self, document: Document, stated: Stated) -> Explanation:
        """Explain an object without a pod that opted in."""
        request = stated(document, self._target.namespace)
        spec = document.get("spec") or {}
        is_vm = document.get("kind") != TargetKind.POD.value
        if document.get("kind") == TargetKind.VM.value:
            spec = (spec.get("template") or {}).get("spec") or {}
        notes = tuple(notes_on_document(document, asks=request is not None))
        state = state_of(document)
        if request is None:
            return self._explanation(state, None, notes)
        demands = demands_of(spec, f"{self._target}: spec", is_vm=is_vm)
        return self._explanation(state, request, notes, fitting=self._fitting(request, demands))

    def _fitting(
        self,
        request: PodRequest,
        demands: PodDemands,
        leaving: Container[NodeName] = (),
        pod: PodUid | None = None,
    ) -> Fitting:
        """Ask every node of the cluster.

        `leaving` are the present nodes of a VM that is to migrate. Claims and reservations of its `pod` do
        not keep it away.
        """
        obstacles = {
            name: _RUNS_THERE if name in leaving else obstacle(node, demands)
            for name, node in self._nodes.items()
        }
        there = {  # of a deleted node its ledger may be left
            name: node if pod is None else node.without(pod)
            for name, node in self._view.nodes.items()
            if name in obstacles
        }
        return fit(ClusterView(there, self._view.vms), request.request, obstacles, self._strategy)

    def _notes_on_pods(
        self,
        waiting: Sequence[VmView],
        seated: Sequence[VmView],
        raw: Mapping[str, Document],
        vmi: Document | None,
    ) -> Iterator[str]:
        if vmi is not None:
            yield from notes_on_vmi(vmi)
            for vm in (*waiting, *seated):
                if vm.request is not None and not vm.pod.resource_claims:
                    short = note_on_interfaces(vmi, sum(vm.request.request.devices.values()))
                    yield from (short,) if short else ()
        for vm in waiting:
            if any(other.state is not VmState.ENDING for other in seated):
                yield f"pod {vm.pod.name}, the target of its live migration, has no node yet"
            elif seated:
                yield f"its former pod {seated[0].pod.name} has not ended yet"
            yield from self._notes_on_waiting(vm)
            yield from notes_on_waiting(raw.get(vm.pod.uid, {}))
        for vm in seated:
            pod = raw.get(vm.pod.uid, {})
            if vm.is_held:
                yield from notes_on_held(pod)
            elif vm.state is not VmState.ENDING:
                yield from notes_on_containers(pod)
            node = self._view.nodes.get(vm.pod.node)
            described = None if node is None else node.described
            if described is not None and described.enforcement is Enforcement.DRA:
                yield "dra-driver-cpu sets its cpuset (enforcement dra): it gets no other cores while it runs"

    def _notes_on_waiting(self, vm: VmView) -> Iterator[str]:
        claims = {
            name: node.ledger.claims[vm.pod.uid]
            for name, node in self._view.nodes.items()
            if vm.pod.uid in node.ledger.claims
        }
        for name, claim in claims.items():
            if claim.reserved is not None:
                yield note_on_reservation(name, claim, claim.reserved)
                yield from self._notes_on_moves(name)
        claimed = [name for name, claim in claims.items() if claim.reserved is None]
        if claimed:
            yield f"its cores are claimed on {', '.join(claimed)} already; the binding is under way"
        if vm.request is None:
            yield "its annotation kvplace.io/request cannot be read; delete the pod to have it created again"
        held = [
            name
            for name, node in self._view.nodes.items()
            if any(
                uid not in self._view.vms and not is_for_migration(claim)
                for uid, claim in node.ledger.claims.items()
            )
        ]
        if held:
            nodes = first_of(held, _NAMED)
            yield f"cores on {nodes} are held for pods that were not found; ask `kvplace doctor`"

    def _notes_on_moves(self, node: NodeName) -> Iterator[str]:
        """Name the VM that migrates from a node to make room: its target is reserved, or has its pod."""
        leaving = {vm.pod.vmi_uid: vm for vm in self._view.vms.values() if vm.node == node and vm.pod.vmi_uid}
        moves = {
            uid: (target, claim.reserved.migration)
            for target, there in self._view.nodes.items()
            for uid, claim in there.ledger.claims.items()
            if claim.reserved is not None and claim.reserved.migration
        }
        moves |= {
            PodUid(vm.pod.vmi_uid): (vm.node, vm.pod.migration)
            for vm in self._view.vms.values()
            if vm.pod.migration and vm.node not in ("", node)
        }
        for uid, (target, migration) in moves.items():
            if (vm := leaving.get(uid)) is not None:
                yield note_on_move(f"{vm.namespace}/{vm.pod.vm}", target, migration)

    def _explanation(
        self, state: str, request: PodRequest | None, notes: Iterable[str], **more: Any
    ) -> Explanation:
        target = self._target
        return Explanation(
            target.kind.value,
            target.namespace,
            target.name,
            state,
            request,
            tuple(notes),
            events=self._events,
            **more,
        )


async def _with_resource_claims(
    cluster: ListClient, view: ClusterView, vms: tuple[VmView, ...]
) -> tuple[tuple[VmView, ...], tuple[str, ...]]:
    """Add the devices of resource claims, or return a note that states why they cannot be read."""
    if not any(vm.pod.resource_claims and vm.node for vm in vms):
        return vms, ()
    try:
        devices = await read_dra_devices(cluster)
    except KvplaceError as error:
        return vms, (f"the devices of its ResourceClaims cannot be read: {error}",)
    found = []
    for vm in vms:
        node = view.nodes.get(vm.node)
        if node is not None and isinstance(node.machine, NodeMachine):
            of_pod = devices.of_pod(vm.pod, node.machine.topology, node.machine.devices)
            found.append(with_devices_of_claims(vm, node, of_pod))
        else:
            found.append(vm)
    return tuple(found), ()


def _vms_of(view: ClusterView, target: ExplainedObject) -> tuple[VmView, ...]:
    """Find the pods in question that have not ended."""
    over = (VmState.ENDED, VmState.FAILED)
    return tuple(
        vm
        for vm in view.named(target.namespace, target.name)
        if vm.state not in over
        and target.name == (vm.pod.name if target.kind is TargetKind.POD else vm.pod.vmi)
    )


async def _elsewhere(reader: ObjectClient, kind: ApiKind, view: ClusterView, target: ExplainedObject) -> str:
    """State where an object of this name is, or which one was likely meant."""
    try:
        found = await reader.read_list(kind, fields=f"metadata.name={target.name}")
    except Forbidden:  # the user may search one namespace only
        found = ()
    if namespaces := sorted(one["metadata"]["namespace"] for one in found):
        return f", but one of this name in {first_of(namespaces, _NAMED)}: choose its namespace with -n"
    if target.kind is TargetKind.VMI and await reader.read(VMS.api, target.name, namespace=target.namespace):
        return (
            ": the VirtualMachine of this name does not run; see "
            f"`kubectl kvplace explain vm/{target.name} -n {target.namespace}`"
        )
    names = {
        vm.pod.name if target.kind is TargetKind.POD else vm.pod.vmi
        for vm in view.vms.values()
        if vm.namespace == target.namespace
    }
    near = did_you_mean(target.name, sorted(filter(None, names)))
    return near or "; `kubectl kvplace get vms -A` lists the VMs that opted in"


async def _read_nodes(reader: ObjectClient) -> dict[NodeName, SchedulableNode]:
    return {NodeName(node.metadata.name): node for node in await read_schedulable_nodes(reader)}


async def _read_events(reader: ObjectClient, target: ExplainedObject) -> tuple[VmEvent, ...]:
    kinds = _WITH[target.kind]
    found = await together(*(_events_of(reader, kind.value, target.namespace, target.name) for kind in kinds))
    return tuple(event for events in found for event in events)


async def _events_of(reader: ObjectClient, kind: str, namespace: str, name: str) -> tuple[VmEvent, ...]:
    selected = f"involvedObject.kind={kind},involvedObject.name={name}"
    found = await reader.read_list(EVENTS, namespace=namespace, fields=selected)
    return tuple(_event(document) for document in found)


def _event(document: Document) -> VmEvent:
    series, involved = document.get("series") or {}, document["involvedObject"]
    when = (
        series.get("lastObservedTime")
        or document.get("lastTimestamp")
        or document.get("eventTime")
        or document["metadata"].get("creationTimestamp")
        or ""
    )
    return VmEvent(
        _seconds(when),
        f"{involved.get('kind')}/{involved.get('name')}",
        document.get("reason") or "",
        " ".join((document.get("message") or "").split()),
        series.get("count") or document.get("count") or 1,
    )


def _seconds(moment: str) -> str:
    """Cut a moment of the API to whole seconds, so that moments with and without fractions compare."""
    return moment[:19] + "Z" if len(moment) > 19 else moment


def _since(pod: Document, kind: str) -> str:
    return condition(pod, kind).get("lastTransitionTime") or ""
