"""The calls of a rollout to an API server: VMs applied, watched and deleted, documents kept, quotas read.

VMs are written with server-side apply, so an application with a lost answer can be repeated; it costs the
API server no more than a creation. The document of a rollout is a ConfigMap; its creation makes a
name taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

import msgspec

from kvplace.core.quantity import parse_quantity
from kvplace.core.well_known_names import ROLLOUT_LABEL
from kvplace.kube.api_records import ApiRecords, RecordReader
from kvplace.kube.calls import APPLY_PATCH
from kvplace.kube.object_parts import ApiObject, Metadata, StoredObject
from kvplace.kube.reported_vms import (
    LAUNCHER_READER,
    LAUNCHERS,
    VM_READERS,
    VMI_PHASES,
    VMS,
)
from kvplace.kube.session import Session
from kvplace.kube.watches import ApiKind, Kind, Selector


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


_QUOTAS = ApiKind("resourcequotas")
_QUOTA = RecordReader.of(msgspec.json.Decoder(_QuotaObject), _quota)
FIELD_MANAGER = "kvplace-rollout"
DOCUMENT_KEY = "rollout.json"
KIND_OF: Mapping[str, ApiKind] = {"VirtualMachine": VMS.api, "VirtualMachineInstance": VMI_PHASES.api}
"""Where each kind of VM is served."""
_READERS: Mapping[Kind[Any, Any], RecordReader[Any]] = {**VM_READERS, LAUNCHERS: LAUNCHER_READER}


class _ConfigMap(ApiObject, frozen=True):
    metadata: Metadata
    data: dict[str, str] | None = None


def _document(stored: _ConfigMap) -> tuple[str, str]:
    return (stored.metadata.labels or {}).get(ROLLOUT_LABEL, ""), (stored.data or {}).get(DOCUMENT_KEY, "")


_CONFIG_MAP = msgspec.json.Decoder(_ConfigMap)
_CONFIG_MAPS = ApiKind("configmaps")
_DOCUMENTS = RecordReader.of(_CONFIG_MAP, _document)


class ApiRollouts(ApiRecords):
    """A cluster behind an API server, as a rollout needs it; the session stays its owner's."""

    def __init__(self, session: Session, *, page_size: int = 500) -> None:
        super().__init__(session, _READERS, writer=FIELD_MANAGER, page_size=page_size)

    async def apply_vm(self, vm: Mapping[str, Any], *, dry_run: bool = False) -> None:
        """Apply a VirtualMachine or VirtualMachineInstance; a dry run stores nothing.

        Raises Conflict when another client has written one of its fields, and the errors of admission.
        """
        metadata = vm["metadata"]
        await self._write(
            "patch",
            KIND_OF[vm["kind"]],
            metadata["name"],
            vm,
            namespace=metadata["namespace"],
            patch_type=APPLY_PATCH,
            dry_run=dry_run,
        )

    async def delete_vm(self, kind: str, namespace: str, name: str, uid: str) -> None:
        """Delete a VM if it is still this one; one that is gone is not an error."""
        await self._delete(KIND_OF[kind], name, namespace=namespace, still={"uid": uid})

    async def read_documents(self, namespace: str, rollout: str = "") -> Mapping[str, str]:
        """Read the documents of a namespace's rollouts by their names, or of one that is named."""
        if not rollout:
            there = Selector(namespace=namespace)
            found = await self._listed(_CONFIG_MAPS, _DOCUMENTS, there).read_all()
            return {name: text for name, text in found if name and text}
        stored = await self._session.read(
            _CONFIG_MAPS, document_name(rollout), _CONFIG_MAP, namespace=namespace
        )
        name, text = ("", "") if stored is None else _document(stored)
        return {name: text} if name == rollout else {}

    async def store_document(self, namespace: str, rollout: str, text: str) -> None:
        """Store the document of a new rollout; raises Conflict when there is one of that name."""
        labels = {ROLLOUT_LABEL: rollout, "app.kubernetes.io/managed-by": "kvplace"}
        name = document_name(rollout)
        document = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": name, "namespace": namespace, "labels": labels},
            "data": {DOCUMENT_KEY: text},
        }
        await self._write("create", _CONFIG_MAPS, name, document, namespace=namespace)

    async def delete_document(self, namespace: str, rollout: str) -> None:
        """Delete the document of a rollout; one that is gone is not an error."""
        await self._delete(_CONFIG_MAPS, document_name(rollout), namespace=namespace)

    async def read_quotas(self, namespace: str) -> tuple[Quota, ...]:
        """Read the ResourceQuotas of a namespace."""
        return await self._listed(_QUOTAS, _QUOTA, Selector(namespace=namespace)).read_all()


def document_name(rollout: str) -> str:
    """Name the ConfigMap of a rollout."""
    return f"kvplace-rollout-{rollout}"
