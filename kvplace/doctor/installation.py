"""The objects of an installation, read at one moment, and the findings of the checks on them.

The checks are pure functions of an `Installation`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum

from kvplace.core.quantity import counted, first_of
from kvplace.kube.node_filters import SchedulableNode
from kvplace.kube.object_client import Document, at, items_at
from kvplace.nodes.cluster_view import ClusterView

SERVE, SCHEDULER, AGENT, CERTIFICATES = "serve", "scheduler", "agent", "certificates"
"""Values of the label `app.kubernetes.io/component`."""
NAME_LABEL, COMPONENT_LABEL = "app.kubernetes.io/name", "app.kubernetes.io/component"

ADMITTED = "admitted"
APPLY_AGAIN = "apply the folder of your installation again: kubectl apply --server-side -k FOLDER"
"""The fix of everything that an installation brings."""


@dataclass(frozen=True)
class Installation:
    """The objects of an installation, and the cluster around it."""

    now: datetime
    client_version: str
    objects: Mapping[str, tuple[Document, ...]]
    """By resource; none for a kind that is not served."""
    nodes: tuple[SchedulableNode, ...] = ()
    view: ClusterView = field(default_factory=lambda: ClusterView({}, {}))
    server_version: str = ""
    """`gitVersion` of the API server."""
    denied: Mapping[str, str] = field(default_factory=dict)
    """The reason by resource that could not be read."""
    admission_answer: str = ""
    """The API server's answer to a trial pod that our webhook must refuse; `ADMITTED` if it was accepted."""
    rights: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The rights that an identity lacks, `verb resource`, by identity."""
    own_denials: tuple[str, ...] = ()
    """Resources of an installation that the caller may not create."""
    cleared: frozenset[str] = frozenset()
    """UIDs of pods and claims that matched only at the second reading: a change came between two lists."""

    def of(self, resource: str) -> tuple[Document, ...]:
        """Return the objects of a resource."""
        return self.objects.get(resource, ())

    def named(self, resource: str, name: str) -> Document | None:
        """Return the object of that name in any namespace."""
        return next((one for one in self.of(resource) if one["metadata"]["name"] == name), None)

    def component(self, resource: str, component: str) -> tuple[Document, ...]:
        """Return the objects of one of our programs."""
        return tuple(one for one in self.of(resource) if labels_of(one).get(COMPONENT_LABEL) == component)


def labels_of(document: Document) -> Mapping[str, str]:
    """Return the labels of an object."""
    return document["metadata"].get("labels") or {}


def object_name(document: Document, kind: str) -> str:
    """Name an object with its kind and namespace."""
    metadata = document["metadata"]
    namespace = metadata.get("namespace")
    return f"{kind} {namespace}/{metadata['name']}" if namespace else f"{kind} {metadata['name']}"


class Severity(Enum):
    """The severity of a finding."""

    WRONG = "wrong"
    """Something does not work, or will not work for the next VM."""
    WARNING = "warning"
    """It works, but needs attention."""
    UNCHECKED = "unchecked"
    """It could not be checked."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault."""

    level: Severity
    about: str
    """The object, `Kind name`."""
    problem: str
    """One sentence."""
    fix: str
    """The action, in the imperative."""


Checking = Callable[[Installation], Iterable[Finding]]


@dataclass(frozen=True, slots=True)
class Check:
    """One group of related checks."""

    name: str
    needs: tuple[str, ...]
    """The resources that must have been read for it."""
    run: Checking
    before: bool = False
    """Whether it also applies to a cluster without kvplace."""


def wrong(about: str, problem: str, fix: str) -> Finding:
    """Make a finding about something that does not work."""
    return Finding(Severity.WRONG, about, problem, fix)


def warning(about: str, problem: str, fix: str) -> Finding:
    """Make a finding about something that needs attention."""
    return Finding(Severity.WARNING, about, problem, fix)


def name_nodes(names: Collection[str]) -> str:
    """Name one node, or count several and name the first."""
    if len(names) == 1:
        return f"node {min(names)}"
    return f"{counted(len(names), 'node')} ({some(names, 5)})"


def some(names: Iterable[str], most: int = 3) -> str:
    """Name the first of many."""
    return first_of(sorted(names), most)


def pod_spec(document: Document) -> Document:
    """Return the spec of a pod, or the spec of the pods that an object makes."""
    return at(document, "spec", "template", "spec") or at(document, "spec") or {}


def image_of(document: Document) -> str:
    """Return the image of a program; empty where its object has no container."""
    containers = items_at(pod_spec(document), "containers")
    return str(containers[0].get("image", "")) if containers else ""


def config_maps_of(programs: Iterable[Document]) -> set[tuple[str, str]]:
    """Return the namespaces and names of the ConfigMaps that give programs their environment."""
    return {
        (one["metadata"].get("namespace", ""), name)
        for one in programs
        for container in items_at(pod_spec(one), "containers")
        for source in items_at(container, "envFrom")
        if (name := at(source, "configMapRef", "name"))
    }


def setting_of_serve(found: Installation, name: str) -> str:
    """Read a setting of `serve` from the ConfigMap that its Deployment names."""
    used = {name for _, name in config_maps_of(found.component("deployments", SERVE))}
    values = [
        str(at(one, "data", name))
        for one in found.of("configmaps")
        if one["metadata"]["name"] in used and at(one, "data", name)
    ]
    return values[0] if values else ""
