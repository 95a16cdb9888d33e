"""The HTTP extender protocol of kube-scheduler, read tolerantly and answered strictly.

Types and key spelling: k8s.io/kube-scheduler/extender/v1, whose Go structs carry no JSON tags, so keys
are capitalised; Go decodes them in any case, and schedulers before 1.17 sent lower case, so we accept
any case too. An answer always has the right shape: filter never answers `{}`, which would reject
every node.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvplace.core.annotations import REQUEST
from kvplace.core.errors import BadBody

MAX_BODY = 8 * 1024 * 1024
"""Largest request body: 15,000 node names are 0.5 MB, and complete Node objects are not wanted."""


class OwnerReference(msgspec.Struct, frozen=True):
    """The part of an owner reference that names a VMI."""

    kind: str = ""
    name: str = ""
    uid: str = ""


class Metadata(msgspec.Struct, frozen=True):
    """The part of a pod's metadata that we read."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    annotations: dict[str, str] | None = None
    owners: list[OwnerReference] | None = msgspec.field(default=None, name="ownerReferences")


class WirePod(msgspec.Struct, frozen=True):
    """The part of a pod that we read; everything else of its 18 KB is skipped by the decoder."""

    metadata: Metadata = Metadata()

    @property
    def request(self) -> str:
        """Text of the annotation kvplace.io/request; empty when there is none."""
        return (self.metadata.annotations or {}).get(REQUEST, "")

    @property
    def vmi(self) -> OwnerReference | None:
        """The VMI that owns the pod."""
        for owner in self.metadata.owners or ():
            if owner.kind == "VirtualMachineInstance":
                return owner
        return None


class ExtenderArgs(msgspec.Struct, frozen=True):
    """The request of filter and prioritize.

    `nodes` holds the raw Node objects when kube-scheduler is configured with nodeCacheCapable: false;
    `names` are the nodes' names either way.
    """

    pod: WirePod
    names: list[str]
    nodes: dict[str, msgspec.Raw] | None = None


class FilterResult(msgspec.Struct, frozen=True):
    """The answer of filter; a node in neither list is dropped without a reason."""

    names: list[str] | None = msgspec.field(default=None, name="NodeNames")
    nodes: dict[str, list[msgspec.Raw]] | None = msgspec.field(default=None, name="Nodes")
    failed: dict[str, str] = msgspec.field(default_factory=dict, name="FailedNodes")
    unresolvable: dict[str, str] = msgspec.field(default_factory=dict, name="FailedAndUnresolvableNodes")
    error: str = msgspec.field(default="", name="Error")


class HostPriority(msgspec.Struct, frozen=True):
    """The score of one node, 0 to 10."""

    host: str = msgspec.field(name="Host")
    score: int = msgspec.field(name="Score")


class BindingArgs(msgspec.Struct, frozen=True):
    """The request of bind."""

    name: str
    namespace: str
    uid: str
    node: str


class BindingResult(msgspec.Struct, frozen=True):
    """The answer of bind; an empty error means bound."""

    error: str = msgspec.field(default="", name="Error")


class _NodeName(msgspec.Struct, frozen=True):
    metadata: Metadata = Metadata()


class _NodeList(msgspec.Struct, frozen=True):
    items: list[msgspec.Raw] | None = None


_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read_extender_args(body: bytes) -> ExtenderArgs:
    """Read a filter or prioritize request; raises BadBody that names the key."""
    keys = _keys(body)
    pod = _get(keys, "pod", WirePod | None)
    if pod is None:
        raise BadBody("Pod is missing or null; an extender request carries the pod")
    if not pod.metadata.uid:
        raise BadBody("Pod.metadata.uid is missing or empty; by it pods are told apart")
    names = _get(keys, "nodenames", list[str] | None)
    if names is not None:
        return ExtenderArgs(pod, names)
    listed = _get(keys, "nodes", _NodeList | None)
    if listed is None:
        raise BadBody("NodeNames and Nodes are both missing or null; one of them lists the nodes")
    nodes = {_decode(raw, _NodeName, "Nodes.items").metadata.name: raw for raw in listed.items or ()}
    if "" in nodes:
        raise BadBody("Nodes.items holds a node without a name")
    return ExtenderArgs(pod, list(nodes), nodes)


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
        values["podname"] or "", values["podnamespace"] or "", values["poduid"] or "", values["node"] or ""
    )


def _keys(body: bytes) -> Mapping[str, msgspec.Raw]:
    if len(body) > MAX_BODY:
        raise BadBody(f"the body has {len(body)} bytes, more than {MAX_BODY}; set nodeCacheCapable: true")
    try:
        fields = _fields.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadBody(f"the body is no JSON object: {error}") from None
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
