"""The HTTP extender protocol of kube-scheduler: its requests and answers.

Types and keys are those of k8s.io/kube-scheduler/extender/v1. Its Go structs have no JSON tags, so keys are
capitalised; Go decodes them in any case, and schedulers before 1.17 sent lower case, so any case is
accepted. An answer always has the full shape: to kube-scheduler, `{}` as the answer of filter rejects
every node.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import msgspec

from kvplace.core.errors import BadBody
from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.objects import NodeObject, PodObject, pod_record
from kvplace.kube.records import PodRecord

MAX_BODY = 8 * 1024 * 1024
"""Largest request body: 15,000 node names are 0.5 MB; complete Node objects of so many are not."""


class ExtenderArgs(msgspec.Struct, frozen=True):
    """The request of filter and prioritize."""

    pod: PodRecord
    names: list[NodeName]
    nodes: dict[str, msgspec.Raw] | None = None
    """The Node objects, which kube-scheduler sends where it is configured with nodeCacheCapable: false."""


class FilterResult(msgspec.Struct, frozen=True):
    """The answer of filter; a node in neither list is dropped without a reason."""

    names: list[NodeName] | None = msgspec.field(default=None, name="NodeNames")
    nodes: dict[str, list[msgspec.Raw]] | None = msgspec.field(default=None, name="Nodes")
    failed: Mapping[NodeName, str] = msgspec.field(default_factory=dict, name="FailedNodes")
    unresolvable: Mapping[NodeName, str] = msgspec.field(
        default_factory=dict, name="FailedAndUnresolvableNodes"
    )
    error: str = msgspec.field(default="", name="Error")

    @classmethod
    def passing(cls, args: ExtenderArgs, names: list[NodeName]) -> Self:
        """Answer that these nodes can hold the pod, in the form in which kube-scheduler sent them."""
        if args.nodes is None:
            return cls(names=names)
        return cls(nodes={"items": [args.nodes[name] for name in names]})

    @classmethod
    def rejecting(
        cls,
        args: ExtenderArgs,
        failed: Mapping[NodeName, str],
        unresolvable: Mapping[NodeName, str],
    ) -> Self:
        """Answer that no node can hold the pod, and why; `unresolvable` even when others leave."""
        none = cls.passing(args, [])
        return msgspec.structs.replace(none, failed=failed, unresolvable=unresolvable)


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


class BindingResult(msgspec.Struct, frozen=True):
    """The answer of bind; an empty error means bound."""

    error: str = msgspec.field(default="", name="Error")


class _NodeList(msgspec.Struct, frozen=True):
    items: list[msgspec.Raw] | None = None


_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read_extender_args(body: bytes) -> ExtenderArgs:
    """Read a filter or prioritize request; raises BadBody that names the key."""
    keys = _keys(body)
    sent = _get(keys, "pod", PodObject | None)
    if sent is None:
        raise BadBody("Pod is missing or null; an extender request carries the pod")
    pod = pod_record(sent)
    if not pod.uid:
        raise BadBody("Pod.metadata.uid is missing or empty")
    names = _get(keys, "nodenames", list[NodeName] | None)
    if names is not None:
        return ExtenderArgs(pod, names)
    listed = _get(keys, "nodes", _NodeList | None)
    if listed is None:
        raise BadBody("NodeNames and Nodes are both missing or null; one of them lists the nodes")
    nodes = {_decode(raw, NodeObject, "Nodes.items").metadata.name: raw for raw in listed.items or ()}
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


def _keys(body: bytes) -> Mapping[str, msgspec.Raw]:
    if len(body) > MAX_BODY:
        raise BadBody(f"the body has {len(body)} bytes, more than {MAX_BODY}; set nodeCacheCapable: true")
    try:
        fields = _fields.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadBody(f"the body is not a JSON object: {error}") from None
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
