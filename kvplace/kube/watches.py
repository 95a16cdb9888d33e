"""Where kinds of objects are served, the kinds that can be watched, selectors, and the events of a watch.

The names are kube-rs's: a watch begins with `Init`, reports the whole list with `InitApply`, and
ends that with `InitDone`; then come `Apply` and `Delete`. A list may begin again at any time. `Alive` and
`Interrupted` state between them whether the reported records can still be true.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeAlias, TypeVar
from urllib.parse import quote

from kvplace.core.errors import KvplaceError
from kvplace.core.label_terms import LabelTerms
from kvplace.core.node_topology import GROUP, VERSION
from kvplace.core.scalars import NodeName, PodUid
from kvplace.core.well_known_names import EDITED_LABEL, PLACED_LABEL
from kvplace.kube.object_records import (
    AgentPod,
    DeviceClassRecord,
    LedgerRecord,
    NodeRecord,
    PodRecord,
    ResourceClaimName,
    ResourceClaimRecord,
    SliceRecord,
    TopologyRecord,
    VmiRecord,
)

K = TypeVar("K")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

KUBEVIRT = "kubevirt.io"
_DRA = "resource.k8s.io"
NAME_FIELD = "metadata.name"
NAMESPACE_FIELD = "metadata.namespace"
NODE_FIELD = "spec.nodeName"


@dataclass(frozen=True, slots=True)
class ApiKind:
    """Where the objects of a kind are served."""

    resource: str
    """As in RBAC."""
    group: str = ""
    """Empty for the core group."""
    version: str = "v1"

    def path(self, *names: str, namespace: str = "") -> str:
        """Return the path of all objects, or of the one of that name; no name can change the path."""
        root = ("apis", self.group) if self.group else ("api",)
        inside = ("namespaces", namespace) if namespace else ()
        segments = (*root, self.version, *inside, self.resource, *names)
        return "/" + "/".join(quote(segment, safe="") for segment in segments)


@dataclass(frozen=True, eq=False)
class Kind(Generic[K, R]):
    """A kind of object that can be watched, in one form of its records; two forms share their `api`."""

    api: ApiKind
    key: Callable[[R], K]
    """The key of its records."""
    fields: Mapping[str, Callable[[R], str]]
    """The fields that the API server selects this kind by."""

    @property
    def name(self) -> str:
        """The resource, as in RBAC."""
        return self.api.resource

    def __repr__(self) -> str:
        return f"Kind({self.name})"


PODS: Kind[PodUid, PodRecord] = Kind(
    ApiKind("pods"),
    lambda record: record.uid,
    {
        NAME_FIELD: lambda record: record.name,
        NAMESPACE_FIELD: lambda record: record.namespace,
        NODE_FIELD: lambda record: record.node,
    },
)
NODES: Kind[NodeName, NodeRecord] = Kind(
    ApiKind("nodes"), lambda record: record.name, {NAME_FIELD: lambda record: record.name}
)
NODE_STATUSES: Kind[NodeName, NodeRecord] = Kind(NODES.api, NODES.key, NODES.fields)
"""Nodes with their status, for people; to decide, nothing needs it."""
TOPOLOGIES: Kind[NodeName, TopologyRecord] = Kind(
    ApiKind("nodetopologies", GROUP, VERSION),
    lambda record: record.node,
    {NAME_FIELD: lambda record: record.node},
)
VMIS: Kind[str, VmiRecord] = Kind(
    ApiKind("virtualmachineinstances", KUBEVIRT),
    lambda record: record.uid,
    {NAME_FIELD: lambda record: record.name, NAMESPACE_FIELD: lambda record: record.namespace},
)
LEDGERS: Kind[NodeName, LedgerRecord] = Kind(
    ApiKind("nodeledgers", GROUP, VERSION),
    lambda record: record.node,
    {NAME_FIELD: lambda record: record.node},
)
AGENT_PODS: Kind[PodUid, AgentPod] = Kind(
    PODS.api, lambda record: record.uid, {NODE_FIELD: lambda record: record.node}
)
"""For lists of nodes: an agent that is gone cannot report that itself."""

SLICES: Kind[str, SliceRecord] = Kind(ApiKind("resourceslices", _DRA), lambda record: record.name, {})
RESOURCE_CLAIMS: Kind[ResourceClaimName, ResourceClaimRecord] = Kind(
    ApiKind("resourceclaims", _DRA), lambda record: (record.namespace, record.name), {}
)
DEVICE_CLASSES: Kind[str, DeviceClassRecord] = Kind(
    ApiKind("deviceclasses", _DRA), lambda record: record.name, {}
)


@dataclass(frozen=True)
class Selector:
    """Selects the objects of a kind that have all of these labels and fields."""

    labels: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)
    namespace: str = ""
    """Only objects of this namespace, with a right in that namespace alone; empty for all."""
    label_terms: LabelTerms = ()
    """Further conditions on labels, from a command line."""

    def check(self, kind: Kind[K, R]) -> None:
        """Raise ValueError for a field that the API server does not select this kind by."""
        for name in (*self.fields, *([NAMESPACE_FIELD] if self.namespace else ())):
            if name not in kind.fields:
                known = ", ".join(kind.fields)
                raise ValueError(f"{kind.name} cannot be selected by field {name}, only by {known}")

    def selects(self, kind: Kind[K, R], record: R, labels: Mapping[str, str]) -> bool:
        """Return whether a watch with this selector reports an object."""
        for name, value in self.labels.items():
            if labels.get(name) != value:
                return False
        for name, value in self.fields.items():
            if kind.fields[name](record) != value:
                return False
        if self.namespace and kind.fields[NAMESPACE_FIELD](record) != self.namespace:
            return False
        return not self.label_terms or all(term.holds(labels) for term in self.label_terms)


EVERYTHING = Selector()
PLACED_PODS = Selector(labels={PLACED_LABEL: "true"})
"""Pods that opted in: pod admission labels them."""
AGENTS = Selector(labels={"app.kubernetes.io/name": "kvplace", "app.kubernetes.io/component": "agent"})
"""The pods of agents, by the labels that manifests/agent gives them."""
EDITED_VMIS = Selector(labels={EDITED_LABEL: "true"})
"""VMIs with a request that was edited while they ran: admission labels them."""


@dataclass(frozen=True, slots=True)
class Init:
    """A complete list begins; keep the old one until InitDone."""


@dataclass(frozen=True, slots=True)
class InitApply(Generic[R_co]):
    """One record of the list that Init began."""

    record: R_co


@dataclass(frozen=True, slots=True)
class InitDone:
    """The list is complete; an object that is not in it is gone."""


@dataclass(frozen=True, slots=True)
class Apply(Generic[R_co]):
    """A record is new or has changed."""

    record: R_co


@dataclass(frozen=True, slots=True)
class Delete(Generic[R_co]):
    """An object is gone, or not selected any more; carries its last known record."""

    record: R_co


@dataclass(frozen=True, slots=True)
class Alive:
    """Nothing has changed, but the API server has spoken: it opened the watch, or sent a bookmark."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The watch or its list has failed and is tried again; the records may grow old meanwhile."""

    failure: KvplaceError


WatchEvent: TypeAlias = Init | InitApply[R] | InitDone | Apply[R] | Delete[R] | Alive | Interrupted


class ListClient(Protocol):
    """A cluster with objects that can be listed."""

    async def read_all(self, kind: Kind[K, R], selector: Selector = EVERYTHING) -> tuple[R, ...]:
        """Read all selected objects of a kind once."""
        ...


class WatchClient(ListClient, Protocol):
    """A cluster that can be watched, too."""

    def watch(self, kind: Kind[K, R], selector: Selector = EVERYTHING) -> AsyncIterator[WatchEvent[R]]:
        """Follow the selected objects of a kind until the cluster is closed.

        Begins with Init, and begins again whenever the past is lost. Never raises for a server that is down,
        busy or has forgotten the past: it tries again with growing pauses. Interrupted by Corrupt states that
        the past has changed, as after a restore of etcd; the records that follow are of the new one.
        """
        ...
