"""The HTTP extender protocol of kube-scheduler: its requests and answers.

Types and keys are those of k8s.io/kube-scheduler/extender/v1. Its Go structs have no JSON tags, so keys are
capitalised; Go decodes them in any case, and schedulers before 1.17 sent lower case, so any case is
accepted. An answer always has the full shape: to kube-scheduler, `{}` as the answer of filter rejects
every node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any, Self

import msgspec

from kvplace.core.errors import BadBody
from kvplace.core.scalars import NodeName, PodUid
from kvplace.core.well_known_names import about_pod
from kvplace.kube.api_errors import NOT_JSON
from kvplace.kube.object_records import PodRecord
from kvplace.kube.objects import PodObject, RawObject, pod_record

MAX_BODY = 8 * 1024 * 1024
"""Largest request body: 15,000 node names take 0.5 MB, but as many Node objects take more than this."""


MAX_NODES = 20_000
"""Most nodes of one call, four times the largest cluster that Kubernetes supports; each is checked."""


_LONGEST_REFUSAL = 1_000
"""Characters of a refusal in the log."""


class ExtenderArgs(msgspec.Struct, frozen=True):
    """The request of filter and prioritize."""

    pod: PodRecord
    names: list[NodeName]
    nodes: dict[str, msgspec.Raw] | None = None
    """The Node objects that kube-scheduler sends with nodeCacheCapable: false."""

    @property
    def about(self) -> dict[str, object]:
        """The fields of a log line about this call."""
        return about_pod(self.pod.uid, self.pod.namespace, self.pod.name, vmi=self.pod.vmi)

    def only(self, names: list[NodeName]) -> Self:
        """Return the same question about fewer nodes."""
        return msgspec.structs.replace(self, names=names)


class FilterResult(msgspec.Struct, frozen=True):
    """The answer of filter; a node in neither list is dropped without a reason.

    Nodes that kvplace refuses are "unresolvable" to kube-scheduler. Its own plugins have passed them with all
    pods there, so it would find no victim on them, and write an error for each (`preemptor`).
    """

    names: list[NodeName] | None = msgspec.field(default=None, name="NodeNames")
    nodes: dict[str, list[msgspec.Raw]] | None = msgspec.field(default=None, name="Nodes")
    unresolvable: Mapping[NodeName, str] = msgspec.field(
        default_factory=dict, name="FailedAndUnresolvableNodes"
    )
    error: str = msgspec.field(default="", name="Error")

    @property
    def refusal(self) -> str:
        """The reasons why no node is left, in one line; empty if a node is left."""
        if self.error or self.names or (self.nodes or {}).get("items"):
            return self.error
        return "; ".join(sorted(set(self.unresolvable.values())))[:_LONGEST_REFUSAL]

    @classmethod
    def passing(cls, args: ExtenderArgs, names: list[NodeName]) -> Self:
        """Answer that these nodes can hold the pod, in the form that kube-scheduler sent."""
        if args.nodes is None:
            return cls(names=names)
        return cls(nodes={"items": [args.nodes[name] for name in names]})

    @classmethod
    def rejecting(cls, args: ExtenderArgs, refusals: Mapping[NodeName, str]) -> Self:
        """Answer that no node can hold the pod, with the reason for each."""
        return msgspec.structs.replace(cls.passing(args, []), unresolvable=refusals)

    def refusing(self, refusals: Mapping[NodeName, str]) -> Self:
        """Return the same answer that also refuses other nodes."""
        return msgspec.structs.replace(self, unresolvable={**self.unresolvable, **refusals})


class HostPriority(msgspec.Struct, frozen=True):
    """The score of one node, 0 to 10."""

    host: NodeName = msgspec.field(name="Host")
    score: int = msgspec.field(name="Score")


class BindingArgs(msgspec.Struct, frozen=True):
    """The request of bind."""

    name: str
    namespace: str
    uid: PodUid
    node: NodeName

    @property
    def about(self) -> dict[str, object]:
        """The fields of a log line about this call."""
        return about_pod(self.uid, self.namespace, self.name, node=self.node)


class BindingResult(msgspec.Struct, frozen=True):
    """The answer of bind; an empty error means bound."""

    error: str = msgspec.field(default="", name="Error")


class NodeVictims(msgspec.Struct, frozen=True):
    """The pods of one node that are to be evicted, the most important one first."""

    uids: tuple[PodUid, ...]
    violations: int
    """Disruption budgets that this would violate."""


class PreemptionArgs(msgspec.Struct, frozen=True):
    """The request of preempt."""

    pod: PodRecord
    resources: Mapping[str, int]
    """The CPU requests that kube-scheduler counts for the pod, in thousandths."""
    depends_on_pods: bool
    """Whether other rules than amounts decide which pods must be evicted."""
    never: bool
    """Whether the pod must not evict others."""
    victims: dict[NodeName, NodeVictims]
    """By node, the pods that kube-scheduler would evict."""

    @property
    def about(self) -> dict[str, object]:
        """The fields of a log line about this call."""
        return about_pod(self.pod.uid, self.pod.namespace, self.pod.name, vmi=self.pod.vmi)


def preemption_answer(victims: Mapping[NodeName, NodeVictims]) -> dict[str, object]:
    """Write the answer of preempt: a node that is not in it is not a candidate any more."""
    answer = {
        node: {"Pods": [{"UID": uid} for uid in one.uids], "NumPDBViolations": one.violations}
        for node, one in victims.items()
    }
    return {"NodeNameToMetaVictims": answer}


_NULL = msgspec.Raw(b"null")
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read_extender_args(body: bytes) -> ExtenderArgs:
    """Read a filter or prioritize request; raises BadBody that names the key."""
    keys = _keys(body)
    sent = _get(keys, "pod", PodObject | None)
    if sent is None:
        raise BadBody("Pod is missing or null; an extender request carries the pod")
    pod = _pod(sent)
    if not pod.uid:
        raise BadBody("Pod.metadata.uid is missing or empty")
    names = _get(keys, "nodenames", list[NodeName] | None)
    if names is not None:
        _check_count(names)
        return ExtenderArgs(pod, names)
    listed = _get(keys, "nodes", dict[str, msgspec.Raw] | None)
    if listed is None:
        raise BadBody("NodeNames and Nodes are both missing or null; one of them lists the nodes")
    items = _decode(listed.get("items", _NULL), list[msgspec.Raw] | None, "Nodes.items") or []
    _check_count(items)
    nodes = {_decode(raw, RawObject, "Nodes.items").metadata.name: raw for raw in items}
    if "" in nodes:
        raise BadBody("Nodes.items contains a node without a name")
    return ExtenderArgs(pod, [NodeName(name) for name in nodes], nodes)


def read_binding_args(body: bytes) -> BindingArgs:
    """Read a bind request; raises BadBody that names the key."""
    keys = _keys(body)
    values = {key: _get(keys, key, str | None) for key in ("podname", "podnamespace", "poduid", "node")}
    missing = [key for key, value in values.items() if not value]
    if missing:
        raise BadBody(
            f"{', '.join(missing)} missing or empty; bind needs PodName, PodNamespace, PodUID and Node"
        )
    return BindingArgs(
        values["podname"], values["podnamespace"], PodUid(values["poduid"]), NodeName(values["node"])
    )


def _check_count(nodes: Sized) -> None:
    if len(nodes) > MAX_NODES:
        raise BadBody(f"the call lists {len(nodes)} nodes, more than {MAX_NODES}")


def read_preemption_args(body: bytes) -> PreemptionArgs:
    """Read a preempt request, with victims as UIDs or as whole pods; raises BadBody that names the key."""
    keys = _keys(body)
    sent = _get(keys, "pod", PodObject | None)
    if sent is None or not sent.metadata.uid:
        raise BadBody("Pod is missing, null or without metadata.uid; a preempt request carries the pod")
    victims: dict[NodeName, NodeVictims] = {}
    for form in ("nodenametometavictims", "nodenametovictims"):
        for node, raw in (_get(keys, form, dict[NodeName, msgspec.Raw] | None) or {}).items():
            victims.setdefault(node, _sent_victims(raw, f"{form}.{node}"))
    _check_count(victims)
    return PreemptionArgs(
        _pod(sent),
        sent.spec.resources,
        sent.spec.depends_on_pods,
        sent.spec.preemption_policy == "Never",
        victims,
    )


def _pod(sent: PodObject) -> PodRecord:
    try:
        return pod_record(sent)
    except NOT_JSON as error:  # labels are read only now
        raise BadBody(f"pod.metadata.labels is malformed: {error}") from None


def _sent_victims(raw: msgspec.Raw, where: str) -> NodeVictims:
    fields = _folded(_decode(raw, dict[str, msgspec.Raw] | None, where) or {})
    uids = []
    for pod in _get(fields, "pods", list[dict[str, msgspec.Raw]] | None) or ():
        each = _folded(pod)
        if "uid" not in each:
            each = _get(each, "metadata", dict[str, msgspec.Raw]) or {}
        uids.append(_get(each, "uid", PodUid) or PodUid(""))
    if "" in uids:
        raise BadBody(f"{where} names a victim without a UID")
    return NodeVictims(tuple(uids), _get(fields, "numpdbviolations", int | None) or 0)


def _keys(body: bytes) -> Mapping[str, msgspec.Raw]:
    if len(body) > MAX_BODY:
        raise BadBody(f"the body has {len(body)} bytes, more than {MAX_BODY}; set nodeCacheCapable: true")
    try:
        fields = _fields.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadBody(f"the body is not a JSON object: {error}") from None
    return _folded(fields)


def _folded(fields: Mapping[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
    folded: dict[str, msgspec.Raw] = {}
    for key, value in fields.items():
        folded.setdefault(key.lower(), value)
    return folded


def _get(keys: Mapping[str, msgspec.Raw], key: str, kind: Any) -> Any:
    raw = keys.get(key)
    return None if raw is None else _decode(raw, kind, key)


def _decode(raw: msgspec.Raw, kind: Any, where: str) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadBody(f"{where} is malformed: {error}") from None
