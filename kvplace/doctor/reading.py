"""Reads an installation: many small lists at the same time; a missing right is noted, not an error.

The releases of a cluster are read from Deployments and DaemonSets, which state them best. A user who may not
list these in the whole cluster sees the pods of kvplace, with the rights of `kvplace-viewer`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, TypeVar

from kvplace.core.errors import Forbidden, KvplaceError
from kvplace.core.well_known_names import OPTED_IN_LABEL, PLACED_LABEL
from kvplace.doctor.admission_checks import secrets_of
from kvplace.doctor.claim_checks import VMIS, suspects
from kvplace.doctor.cluster_checks import INSTALLED, KINDS, PLUGINS_CRD, RIGHTS, Right
from kvplace.doctor.examination import REVIEWS, TRIAL, VIEW
from kvplace.doctor.installation import (
    ADMITTED,
    AGENT,
    COMPONENT_LABEL,
    NAME_LABEL,
    SCHEDULER,
    SERVE,
    Installation,
    config_maps_of,
    labels_of,
)
from kvplace.doctor.program_checks import joined, releases_of
from kvplace.kube.api_errors import Denied, NotFound, Unauthenticated
from kvplace.kube.concurrency import together
from kvplace.kube.node_filters import SchedulableNode
from kvplace.kube.object_client import Document, ObjectClient, at, items_at
from kvplace.kube.watches import NODES, PODS, ApiKind, ListClient
from kvplace.kube.watches import VMIS as WATCHED_VMIS
from kvplace.nodes.cluster_reading import read_cluster
from kvplace.nodes.cluster_view import ClusterView

T = TypeVar("T")

_OURS = f"{NAME_LABEL}=kvplace"
_PART = "app.kubernetes.io/part-of=kvplace"
_ADMISSION = "admissionregistration.k8s.io"
_CONFIG_MAPS = ApiKind("configmaps")
_KUBEVIRTS = ApiKind("kubevirts", "kubevirt.io")
_LISTS: Mapping[str, tuple[ApiKind, str, str]] = {
    "mutatingwebhookconfigurations": (ApiKind("mutatingwebhookconfigurations", _ADMISSION), "", ""),
    "validatingwebhookconfigurations": (ApiKind("validatingwebhookconfigurations", _ADMISSION), "", ""),
    "validatingadmissionpolicies": (ApiKind("validatingadmissionpolicies", _ADMISSION), "", ""),
    "validatingadmissionpolicybindings": (ApiKind("validatingadmissionpolicybindings", _ADMISSION), "", ""),
    "deployments": (ApiKind("deployments", "apps"), _OURS, ""),
    "daemonsets": (ApiKind("daemonsets", "apps"), _OURS, ""),
    "pods": (PODS.api, _OURS, ""),
    "waiting pods": (PODS.api, f"{PLACED_LABEL}=true", "status.phase=Pending"),
    "failed pods": (PODS.api, f"{PLACED_LABEL}=true", "status.phase=Failed"),
    "configmaps": (_CONFIG_MAPS, _PART, ""),
    "certificates": (ApiKind("certificates", "cert-manager.io"), _PART, ""),
    "kubevirts": (_KUBEVIRTS, "", ""),
    "plugins": (ApiKind("plugins", "plugin.kubevirt.io"), "", ""),
    VMIS: (WATCHED_VMIS.api, f"{OPTED_IN_LABEL}=true", ""),
}
_CRDS = ApiKind("customresourcedefinitions", "apiextensions.k8s.io")
_SERVICES = ApiKind("services")
_LEASES = ApiKind("leases", "coordination.k8s.io")
_SECRETS = ApiKind("secrets")
_OWN_REVIEWS = ApiKind("selfsubjectaccessreviews", "authorization.k8s.io")
_REVIEWS = ApiKind("subjectaccessreviews", "authorization.k8s.io")
_WEBHOOK = "pod.kvplace.io"
_LACKS_RIGHT = "cannot create resource"
"""In the refusal of a user without the right; admission, such as PodSecurity, answers HTTP 403, too."""
_SECOND_READING_S = 5.0
_OWNERS = {SERVE: _LISTS["deployments"][0], AGENT: _LISTS["daemonsets"][0]}
_HOOK_SETTING = "SIDECAR_IMAGE"


async def read_installation(
    reader: ObjectClient,
    cluster: ListClient,
    *,
    namespace: str,
    client_version: str,
    now: Callable[[], datetime],
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Installation:
    """Read all that the checks check; a trial pod is refused in `namespace`.

    Pods and claims that do not match are checked again some seconds later.

    Raises Unauthenticated and Unavailable: then nothing can be reported.
    """
    reading = _Reading(reader)
    version = await reader.read_version()
    view, nodes, answer, denials, rights = await together(
        reading.guarded(VIEW, read_view(cluster), ClusterView({}, {})),
        reading.guarded("nodes", reader.read_list_as(SchedulableNode, NODES.api), ()),
        reading.guarded(TRIAL, reading.trial(namespace), ""),
        reading.own_denials(),
        reading.parts(),
    )
    found = Installation(
        now(), client_version, reading.objects, nodes, view, version, reading.denied, answer, rights, denials
    )
    doubtful = suspects(found)
    if not doubtful or VIEW in reading.denied:
        return found
    await pause(_SECOND_READING_S)
    again = _Reading(reader)
    view, _ = await together(
        again.guarded(VIEW, read_view(cluster), found.view), again.read_list(VMIS, *_LISTS[VMIS])
    )
    return replace(found, cleared=doubtful - suspects(replace(found, view=view, objects=again.objects)))


async def read_view(cluster: ListClient) -> ClusterView:
    """Read nodes, VMs and ledgers; nothing where our kinds are not installed, which another check states."""
    try:
        return await read_cluster(cluster)
    except NotFound:
        return ClusterView({}, {})


class _Reading:
    def __init__(self, reader: ObjectClient) -> None:
        self._reader = reader
        self.objects: dict[str, tuple[Document, ...]] = {}
        self.denied: dict[str, str] = {}

    async def parts(self) -> Mapping[str, tuple[str, ...]]:
        """Read the installation's objects and the objects that they name; return the missing rights."""
        await together(*(self.read_list(name, *how) for name, how in _LISTS.items()), self.read_crds())
        rights, _ = await together(self.guarded(REVIEWS, self.missing_rights(), {}), self.read_named())
        return rights

    async def guarded(self, what: str, reading: Awaitable[T], otherwise: T) -> T:
        """Await an answer; note a missing right."""
        try:
            return await reading
        except Unauthenticated:
            raise
        except Denied as error:
            self.denied[what] = f"you may not {error.verb} {error.resource}"
        except Forbidden as error:
            self.denied[what] = str(error)
        return otherwise

    async def read_list(self, name: str, kind: ApiKind, labels: str, fields: str) -> None:
        reading = self._reader.read_list(kind, labels=labels, fields=fields)
        self.objects[name] = await self.guarded(name, reading, ())

    async def read_crds(self) -> None:
        reading = self._read_all(_CRDS, [("", name) for name in (*KINDS, PLUGINS_CRD)])
        self.objects["customresourcedefinitions"] = await self.guarded(_CRDS.resource, reading, ())

    async def read_named(self) -> None:
        """Read the objects that others name: the Services of webhooks, the leases of schedulers."""
        services = {
            (str(service.get("namespace")), str(service.get("name")))
            for resource in ("mutatingwebhookconfigurations", "validatingwebhookconfigurations")
            for one in self.objects[resource]
            for webhook in items_at(one, "webhooks")
            if str(webhook.get("name", "")).endswith(".kvplace.io")
            and (service := at(webhook, "clientConfig", "service"))
        }
        leases = {(namespace, "kvplace-scheduler") for namespace in self._namespaces(SCHEDULER)}
        for kind, names in ((_SERVICES, services), (_LEASES, leases)):
            reading = self._read_all(kind, sorted(names))
            self.objects[kind.resource] = await self.guarded(kind.resource, reading, ())
        secrets = self._read_all(
            _SECRETS, sorted(secrets_of(self.objects["deployments"])), self._reader.read_metadata
        )
        self.objects[_SECRETS.resource] = await self.guarded(_SECRETS.resource, secrets, ())

    async def trial(self, namespace: str) -> str:
        """Offer the API server a pod that our webhook refuses, without storing it; return the answer."""
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"generateName": "kvplace-doctor-", "annotations": {"kvplace.io/doctor": "trial"}},
            "spec": {"containers": [{"name": "trial", "image": "none.invalid/trial"}]},
        }
        try:
            await self._reader.create(PODS.api, pod, namespace=namespace, dry_run=True)
        except Unauthenticated:
            raise
        except KvplaceError as error:
            if _WEBHOOK in str(error):
                return str(error)
            if isinstance(error, Denied) and _LACKS_RIGHT in error.said:
                raise
            said = error.said if isinstance(error, Denied) else error
            self.denied[TRIAL] = f"the API server refuses a pod in namespace {namespace}: {said}"
            return ""
        return ADMITTED

    async def missing_rights(self) -> Mapping[str, tuple[str, ...]]:
        """Ask which rights the service accounts of our programs lack."""
        identities = {
            f"system:serviceaccount:{one['metadata']['namespace']}:{account}": RIGHTS[component]
            for resource, component in (("deployments", SERVE), ("daemonsets", AGENT))
            for one in self.objects[resource]
            if _component(one) == component
            and (account := at(one, "spec", "template", "spec", "serviceAccountName"))
        }
        lacking = {name: await self._lacking(rights, name) for name, rights in identities.items()}
        return {
            name: tuple(f"{verb} {resource}" for verb, resource, _ in rights)
            for name, rights in lacking.items()
        }

    async def own_denials(self) -> tuple[str, ...]:
        """Ask which resources of an installation the caller may not create."""
        return tuple(resource for _, resource, _ in await self._lacking(INSTALLED))

    async def _lacking(self, rights: tuple[Right, ...], identity: str = "") -> list[Right]:
        """Ask which rights a service account lacks; the caller, if none is named."""
        allowed = await together(*(self._may(right, identity) for right in rights))
        return [right for right, may in zip(rights, allowed, strict=True) if not may]

    async def _may(self, right: Right, identity: str) -> bool:
        verb, resource, group = right
        resource, _, part = resource.partition("/")
        asked = {"verb": verb, "group": group, "resource": resource}
        spec: dict[str, Any] = {"resourceAttributes": asked | ({"subresource": part} if part else {})}
        kind, name = _OWN_REVIEWS, "SelfSubjectAccessReview"
        if identity:
            kind, name = _REVIEWS, "SubjectAccessReview"
            namespace = identity.split(":")[2]
            accounts = ("system:serviceaccounts", f"system:serviceaccounts:{namespace}")
            spec |= {"user": identity, "groups": [*accounts, "system:authenticated"]}
        review = {"apiVersion": f"{kind.group}/{kind.version}", "kind": name, "metadata": {}, "spec": spec}
        return at(await self._reader.create(kind, review), "status", "allowed") is True

    def _namespaces(self, component: str) -> set[str]:
        return {
            one["metadata"]["namespace"]
            for one in self.objects["deployments"]
            if _component(one) == component
        }

    async def _read_all(
        self,
        kind: ApiKind,
        names: list[tuple[str, str]],
        read: Callable[..., Awaitable[Document | None]] | None = None,
    ) -> tuple[Document, ...]:
        read = read or self._reader.read
        found = await together(*(read(kind, name, namespace=namespace) for namespace, name in names))
        return tuple(one for one in found if one is not None)


def _component(document: Document) -> str:
    return labels_of(document).get(COMPONENT_LABEL, "")


@dataclass(frozen=True)
class Releases:
    """The releases that were found, and the missing rights."""

    of: Mapping[str, str]
    """By program; several of one program with commas, an empty text for images that are named by digests."""
    denied: Mapping[str, Denied]
    """By program."""


async def read_releases(reader: ObjectClient) -> Releases:
    """Read the releases of our programs, of the API server and of KubeVirt."""
    version, serve, agent, kubevirts = await together(
        reader.read_version(),
        _allowed(_programs(reader, SERVE)),
        _allowed(_programs(reader, AGENT)),
        _allowed(reader.read_list(_KUBEVIRTS)),
    )
    hook = await _allowed(_hook_images(reader, _read(serve)))
    found = {**releases_of(_read(serve), _read(agent), _read(hook)), "Kubernetes": version}
    if of_kubevirt := [str(at(one, "status", "observedKubeVirtVersion") or "") for one in _read(kubevirts)]:
        found["KubeVirt"] = joined(of_kubevirt)
    read = {SERVE: serve, AGENT: agent, "hook": hook, "KubeVirt": kubevirts}
    return Releases(found, {name: one for name, one in read.items() if isinstance(one, Denied)})


def _read(answer: tuple[T, ...] | Denied) -> tuple[T, ...]:
    return () if isinstance(answer, Denied) else answer


async def _programs(reader: ObjectClient, component: str) -> tuple[Document, ...]:
    """Read the objects of a program that state its image; raises Denied where pods may not be read either."""
    labels = f"{NAME_LABEL}=kvplace,{COMPONENT_LABEL}={component}"
    try:
        return await reader.read_list(_OWNERS[component], labels=labels)
    except Denied:
        return await reader.read_list(PODS.api, labels=labels)


async def _hook_images(reader: ObjectClient, serve: tuple[Document, ...]) -> tuple[str, ...]:
    """Read the hook's image from the settings that `serve` names."""
    names = sorted(config_maps_of(serve))
    settings = await together(
        *(reader.read(_CONFIG_MAPS, name, namespace=namespace) for namespace, name in names)
    )
    images = (at(one, "data", _HOOK_SETTING) for one in settings if one is not None)
    return tuple(str(image) for image in images if image)


async def _allowed(reading: Awaitable[T]) -> T | Denied:
    try:
        return await reading
    except Denied as denied:
        return denied
