"""Single objects and lists of any kind, as JSON or as a type: for commands that check or change a cluster.

Long-running processes watch records (`watches`); this is for the many kinds that only a person asks about.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, TypeVar

import msgspec

from kvplace.kube.api_errors import NotFound, decoded
from kvplace.kube.api_records import ApiListWatch, RecordReader
from kvplace.kube.calls import APPLY_PATCH, JSON, METADATA_ONLY, ApiCall
from kvplace.kube.session import Session
from kvplace.kube.watches import NODES, PODS, ApiKind, Selector

Document: TypeAlias = Mapping[str, Any]
T = TypeVar("T")

_PAGE_SIZE = 500
_PATIENCE_S = 30.0
"""A write may wait for several webhooks, 10 seconds each."""
_DOCUMENT: msgspec.json.Decoder[Document] = msgspec.json.Decoder(dict[str, Any])


class ObjectClient:
    """Reads and writes objects over a session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def read(self, kind: ApiKind, name: str, *, namespace: str = "") -> Document | None:
        """Read one object; None where there is none, or no such kind."""
        return await self._session.read(kind, name, _DOCUMENT, namespace=namespace)

    async def read_metadata(self, kind: ApiKind, name: str, *, namespace: str = "") -> Document | None:
        """Read the metadata of one object, so that a Secret's content never leaves the API server."""
        return await self._session.read(kind, name, _DOCUMENT, namespace=namespace, accept=METADATA_ONLY)

    async def read_version(self) -> str:
        """Read the release of the API server, `v1.36.3`."""
        body = await self._session.request(ApiCall("get", "version", "/version"))
        return str(decoded(_DOCUMENT, body, "version").get("gitVersion", ""))

    async def read_kubelet_configuration(self, node: str) -> Document:
        """Ask the kubelet of a node, through the API server, for the configuration that it runs with."""
        path = NODES.api.path(node, "proxy", "configz")
        body = await self._session.request(ApiCall("get", "nodes/proxy", path, name=node))
        found = decoded(_DOCUMENT, body, "nodes/proxy").get("kubeletconfig")
        return found if isinstance(found, dict) else {}

    async def read_list(
        self, kind: ApiKind, *, namespace: str = "", labels: str = "", fields: str = ""
    ) -> tuple[Document, ...]:
        """Read all selected objects; none where the kind is not served. The selectors are as kubectl's."""
        return await self.read_list_as(
            dict[str, Any], kind, namespace=namespace, labels=labels, fields=fields
        )

    async def read_list_as(
        self, form: type[T], kind: ApiKind, *, namespace: str = "", labels: str = "", fields: str = ""
    ) -> tuple[T, ...]:
        """The same, each object as a type that names the fields that matter."""
        return await self._read_list_as(
            form, kind, namespace, {"labelSelector": labels, "fieldSelector": fields}
        )

    async def read_cached_list_as(self, form: type[T], kind: ApiKind, fields: str) -> tuple[T, ...]:
        """The same from the API server's memory, which may lag behind a little."""
        return await self._read_list_as(form, kind, "", {"fieldSelector": fields, "resourceVersion": "0"})

    async def _read_list_as(
        self, form: type[T], kind: ApiKind, namespace: str, selection: Mapping[str, str]
    ) -> tuple[T, ...]:
        listed: ApiListWatch[T] = ApiListWatch(
            self._session,
            kind,
            RecordReader(msgspec.json.Decoder(form).decode),
            Selector(namespace=namespace),
            page_size=_PAGE_SIZE,
            selection={key: value for key, value in selection.items() if value},
        )
        try:
            return await listed.read_all()
        except NotFound:
            return ()

    async def create(
        self, kind: ApiKind, document: Document, *, namespace: str = "", dry_run: bool = False
    ) -> Document:
        """Create an object and return it as stored; with `dry_run` nothing is stored."""
        name = str(document.get("metadata", {}).get("name", ""))
        query = {"dryRun": "All"} if dry_run else {}
        call = ApiCall.on("create", kind, name, namespace=namespace, query=query, document=document)
        return decoded(_DOCUMENT, await self._session.request(call, timeout_s=_PATIENCE_S), kind.resource)

    async def apply(self, kind: ApiKind, document: Document, *, manager: str) -> Document:
        """Create or change an object by server-side apply; raises Conflict where others own the fields."""
        name, query = str(document["metadata"]["name"]), {"fieldManager": manager}
        call = ApiCall.on("patch", kind, name, query=query, document=document, patch_type=APPLY_PATCH)
        return decoded(_DOCUMENT, await self._session.request(call, timeout_s=_PATIENCE_S), kind.resource)

    async def delete(self, kind: ApiKind, name: str, *, namespace: str = "") -> None:
        """Delete an object at once; raises NotFound when it is gone."""
        query = {"gracePeriodSeconds": "0"}
        await self._session.request(ApiCall.on("delete", kind, name, namespace=namespace, query=query))

    async def read_log(self, namespace: str, pod: str, container: str, *, limit: int) -> bytes:
        """Read the log of a container; raises UnusableAnswer beyond `limit` bytes."""
        query, accept = {"container": container}, f"{JSON}, text/plain, */*"
        call = ApiCall.on("get", PODS.api, pod, "log", namespace=namespace, query=query, accept=accept)
        return await self._session.request(call, limit=limit, timeout_s=_PATIENCE_S)


def at(document: object, *path: str) -> Any:
    """Follow keys into an object; None where one of them is missing."""
    found: Any = document
    for key in path:
        if not isinstance(found, Mapping):
            return None
        found = found.get(key)
    return found


def items_at(document: object, *path: str) -> tuple[Mapping[str, Any], ...]:
    """Follow keys to a list of objects; empty where there is none."""
    found = at(document, *path)
    return tuple(one for one in found if isinstance(one, Mapping)) if isinstance(found, list | tuple) else ()


def condition(document: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Return a condition of an object's status; empty where it has none."""
    return next((one for one in items_at(document, "status", "conditions") if one.get("type") == kind), {})
