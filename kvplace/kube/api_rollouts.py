"""The calls of a rollout to an API server: VMs applied, watched and deleted, documents kept, quotas read.

VMs are written with server-side apply, so an application with a lost answer can be repeated; it costs the
API server no more than a creation. The document of a rollout is a ConfigMap; its creation makes a
name taken.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias, TypeVar

import msgspec

from kvplace.core.quantity import parse_quantity
from kvplace.core.well_known_names import ROLLOUT_LABEL
from kvplace.kube.api_errors import NotFound, decoded
from kvplace.kube.api_list_watch import ApiListWatch, Resource
from kvplace.kube.list_watch import follow
from kvplace.kube.object_parts import ApiObject, Metadata, StoredObject
from kvplace.kube.reported_vms import (
    LAUNCHER_RESOURCE,
    LAUNCHERS,
    VM_RESOURCE,
    VM_RESOURCES,
    VMI_RESOURCE,
)
from kvplace.kube.session import APPLY_PATCH, METADATA_ONLY, Call, Session, path_of
from kvplace.kube.watches import EVERYTHING, Kind, Selector, WatchEvent

K = TypeVar("K")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Quota:
    """One quota without a scope: quantities by resource, for example `count/pods`."""

    name: str
    limits: Mapping[str, Fraction]
    used: Mapping[str, Fraction]

    def left(self, resource: str) -> Fraction | None:
        """Return how much is left of a resource; None where it is not limited."""
        if resource not in self.limits:
            return None
        return self.limits[resource] - self.used.get(resource, Fraction(0))


_QuotaObject: TypeAlias = StoredObject[dict[str, Any], dict[str, dict[str, str] | None]]


def _quota(stored: _QuotaObject) -> Quota:
    """Read a quota; a quota with scopes counts only some pods, so its effect cannot be predicted."""
    status = stored.status or {}
    if stored.spec.get("scopes") or stored.spec.get("scopeSelector") is not None:
        return Quota(stored.metadata.name, {}, {})
    return Quota(stored.metadata.name, _quantities(status.get("hard")), _quantities(status.get("used")))


def _quantities(texts: Mapping[str, str] | None) -> dict[str, Fraction]:
    return {name: Fraction(parse_quantity(text)) for name, text in (texts or {}).items()}


_QUOTA_RESOURCE = Resource.of(
    "resourcequotas", path_of("api", "v1", "resourcequotas"), msgspec.json.Decoder(_QuotaObject), _quota
)
FIELD_MANAGER = "kvplace-rollout"
DOCUMENT_KEY = "rollout.json"
RESOURCE_OF: Mapping[str, Resource[Any]] = {
    "VirtualMachine": VM_RESOURCE,
    "VirtualMachineInstance": VMI_RESOURCE,
}
"""Where each kind of VM is served."""

_RESOURCES: Mapping[Kind[Any, Any], Resource[Any]] = {
    **VM_RESOURCES,
    LAUNCHERS: LAUNCHER_RESOURCE,
}


class _ConfigMap(ApiObject, frozen=True):
    metadata: Metadata
    data: dict[str, str] | None = None


def _document(stored: _ConfigMap) -> tuple[str, str]:
    return (stored.metadata.labels or {}).get(ROLLOUT_LABEL, ""), (stored.data or {}).get(DOCUMENT_KEY, "")


_CONFIG_MAP = msgspec.json.Decoder(_ConfigMap)
_CONFIG_MAPS = Resource.of("configmaps", path_of("api", "v1", "configmaps"), _CONFIG_MAP, _document)


class ApiRollouts:
    """A cluster behind an API server, as a rollout needs it; the session stays its owner's."""

    def __init__(self, session: Session, *, page_size: int = 500) -> None:
        self._session = session
        self._page_size = page_size

    def watch(self, kind: Kind[K, R], selector: Selector = EVERYTHING) -> AsyncIterator[WatchEvent[R]]:
        """Follow the selected objects of a kind, as `WatchClient` states."""
        session = self._session
        selector.check(kind)
        source: ApiListWatch[R] = ApiListWatch(session, _RESOURCES[kind], selector, page_size=self._page_size)
        return follow(source, pause=session.pause, closed=lambda: session.closed)

    async def read_all(self, kind: Kind[K, R], selector: Selector = EVERYTHING) -> tuple[R, ...]:
        """Read all selected objects of a kind once."""
        selector.check(kind)
        return await self._read_all(_RESOURCES[kind], selector)

    async def apply_vm(self, vm: Mapping[str, Any], *, dry_run: bool = False) -> None:
        """Apply a VirtualMachine or VirtualMachineInstance; a dry run stores nothing.

        Raises Conflict when another client has written one of its fields, and the errors of admission.
        """
        name, namespace = vm["metadata"]["name"], vm["metadata"]["namespace"]
        resource = RESOURCE_OF[vm["kind"]]
        await self._session.request(
            Call(
                "patch",
                resource.name,
                f"{resource.path_in(namespace)}{path_of(name)}",
                name=f"{namespace}/{name}",
                query={"fieldManager": FIELD_MANAGER, **({"dryRun": "All"} if dry_run else {})},
                body=msgspec.json.encode(vm),
                accept=METADATA_ONLY,
                patch_type=APPLY_PATCH,
            )
        )

    async def delete_vm(self, kind: str, namespace: str, name: str, uid: str) -> None:
        """Delete a VM if it is still this one; one that is gone is not an error."""
        resource = RESOURCE_OF[kind]
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        await self._delete(resource.name, f"{resource.path_in(namespace)}{path_of(name)}", name, options)

    async def read_documents(self, namespace: str, rollout: str = "") -> Mapping[str, str]:
        """Read the documents of a namespace's rollouts by their names, or of one that is named."""
        if not rollout:
            found = await self._read_all(_CONFIG_MAPS, Selector(namespace=namespace))
            return {name: text for name, text in found if name and text}
        call = Call("get", "configmaps", _config_map(namespace, rollout), name=rollout)
        try:
            body = await self._session.request(call)
        except NotFound:
            return {}
        name, text = _document(decoded(_CONFIG_MAP, body, "configmaps"))
        return {name: text} if name == rollout else {}

    async def store_document(self, namespace: str, rollout: str, text: str) -> None:
        """Store the document of a new rollout; raises Conflict when there is one of that name."""
        labels = {ROLLOUT_LABEL: rollout, "app.kubernetes.io/managed-by": "kvplace"}
        document = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": document_name(rollout), "namespace": namespace, "labels": labels},
            "data": {DOCUMENT_KEY: text},
        }
        await self._session.request(
            Call(
                "create",
                "configmaps",
                _CONFIG_MAPS.path_in(namespace),
                name=document_name(rollout),
                query={"fieldManager": FIELD_MANAGER},
                body=msgspec.json.encode(document),
                accept=METADATA_ONLY,
            )
        )

    async def delete_document(self, namespace: str, rollout: str) -> None:
        """Delete the document of a rollout; one that is gone is not an error."""
        await self._delete("configmaps", _config_map(namespace, rollout), rollout, {})

    async def read_quotas(self, namespace: str) -> tuple[Quota, ...]:
        """Read the ResourceQuotas of a namespace."""
        return await self._read_all(_QUOTA_RESOURCE, Selector(namespace=namespace))

    async def _read_all(self, resource: Resource[R], selector: Selector) -> tuple[R, ...]:
        return await ApiListWatch(self._session, resource, selector, page_size=self._page_size).read_all()

    async def _delete(self, resource: str, path: str, name: str, options: Mapping[str, Any]) -> None:
        try:
            await self._session.request(
                Call("delete", resource, path, name=name, body=msgspec.json.encode(options))
            )
        except NotFound:
            return


def document_name(rollout: str) -> str:
    """Name the ConfigMap of a rollout."""
    return f"kvplace-rollout-{rollout}"


def _config_map(namespace: str, rollout: str) -> str:
    return f"{_CONFIG_MAPS.path_in(namespace)}{path_of(document_name(rollout))}"
