"""Which releases run in a cluster, as far as the caller may see it.

Deployments and DaemonSets state it best. A user who may not list them in the whole cluster sees the pods of
kvplace, with the rights of `kvplace-viewer`. Each part is read by itself: one that may not be read leaves the
others as they are, and is named.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvplace.doctor.installation import AGENT, COMPONENT_LABEL, NAME_LABEL, SERVE, at, items_at
from kvplace.doctor.program_checks import release_of
from kvplace.kube.api_errors import Denied
from kvplace.kube.concurrency import together
from kvplace.kube.object_client import ApiKind, Document

T = TypeVar("T")

_PODS = ApiKind("pods")
_CONFIG_MAPS = ApiKind("configmaps")
_KUBEVIRTS = ApiKind("kubevirts", "kubevirt.io")
_OWNERS = {SERVE: ApiKind("deployments", "apps"), AGENT: ApiKind("daemonsets", "apps")}
_HOOK, _HOOK_SETTING = "hook", "SIDECAR_IMAGE"


class ReleasesClient(Protocol):
    """The calls that read releases."""

    async def read_version(self) -> str:
        """Read the release of the API server."""
        ...

    async def read(self, kind: ApiKind, name: str, *, namespace: str = "") -> Document | None:
        """Read one object; None where there is none, or no such kind."""
        ...

    async def read_list(
        self, kind: ApiKind, *, namespace: str = "", labels: str = "", fields: str = ""
    ) -> tuple[Document, ...]:
        """Read all selected objects; none where the kind is not served."""
        ...


@dataclass(frozen=True)
class Releases:
    """The releases that were found, and the missing rights."""

    of: Mapping[str, str]
    """By program; several of one program with commas, an empty text for images that are named by digests."""
    denied: Mapping[str, Denied]
    """By program."""


async def read_releases(reader: ReleasesClient) -> Releases:
    """Read the releases of our programs, of the API server and of KubeVirt."""
    version, serve, agent, kubevirts = await together(
        reader.read_version(),
        _allowed(_programs(reader, SERVE)),
        _allowed(_programs(reader, AGENT)),
        _allowed(reader.read_list(_KUBEVIRTS)),
    )
    found: dict[str, str] = {}
    denied: dict[str, Denied] = {}
    for name, programs in ((SERVE, serve), (AGENT, agent)):
        if isinstance(programs, Denied):
            denied[name] = programs
        elif programs:
            found[name] = _joined(release_of(_image(one)) for one in programs)
    hook = await _allowed(_hook_images(reader, () if isinstance(serve, Denied) else serve))
    if isinstance(hook, Denied):
        denied[_HOOK] = hook
    elif hook:
        found[_HOOK] = _joined(map(release_of, hook))
    found["Kubernetes"] = version
    if isinstance(kubevirts, Denied):
        denied["KubeVirt"] = kubevirts
    elif kubevirts:
        found["KubeVirt"] = _joined(
            str(at(one, "status", "observedKubeVirtVersion") or "") for one in kubevirts
        )
    return Releases(found, denied)


async def _programs(reader: ReleasesClient, component: str) -> tuple[Document, ...]:
    """Read the objects of a program that state its image; raises Denied where pods may not be read either."""
    labels = f"{NAME_LABEL}=kvplace,{COMPONENT_LABEL}={component}"
    try:
        return await reader.read_list(_OWNERS[component], labels=labels)
    except Denied:
        return await reader.read_list(_PODS, labels=labels)


async def _hook_images(reader: ReleasesClient, serve: tuple[Document, ...]) -> tuple[str, ...]:
    """Read the hook's image from the settings that `serve` names."""
    named = {
        (one["metadata"]["namespace"], name)
        for one in serve
        for container in items_at(_pod_spec(one), "containers")
        for source in items_at(container, "envFrom")
        if (name := at(source, "configMapRef", "name"))
    }
    settings = await together(
        *(reader.read(_CONFIG_MAPS, name, namespace=namespace) for namespace, name in sorted(named))
    )
    images = (at(one, "data", _HOOK_SETTING) for one in settings if one is not None)
    return tuple(str(image) for image in images if image)


def _image(document: Document) -> str:
    containers = items_at(_pod_spec(document), "containers")
    return str(containers[0].get("image", "")) if containers else ""


def _pod_spec(document: Document) -> Document:
    """The spec of a pod, or that of the pods that an object makes."""
    return at(document, "spec", "template", "spec") or at(document, "spec") or {}


def _joined(releases: Iterable[str]) -> str:
    return ", ".join(sorted(set(filter(None, releases))))


async def _allowed(reading: Awaitable[T]) -> T | Denied:
    try:
        return await reading
    except Denied as denied:
        return denied
