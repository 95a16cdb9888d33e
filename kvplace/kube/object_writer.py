"""Writes of commands that change or try out single objects of any kind."""

from __future__ import annotations

from typing import Any

import msgspec

from kvplace.kube.api_errors import decoded
from kvplace.kube.object_reader import ApiKind, Document, ObjectReader
from kvplace.kube.session import APPLY_PATCH, JSON, Call

_DOCUMENT: msgspec.json.Decoder[Document] = msgspec.json.Decoder(dict[str, Any])
_PATIENCE_S = 30.0
"""A write may wait for several webhooks, 10 seconds each."""


class ObjectWriter(ObjectReader):
    """Reads and writes objects over a session."""

    async def create(
        self, kind: ApiKind, document: Document, *, namespace: str = "", dry_run: bool = False
    ) -> Document:
        """Create an object and return it as stored; with `dry_run` nothing is stored."""
        query = {"dryRun": "All"} if dry_run else {}
        call = Call(
            "create",
            kind.resource,
            kind.path(namespace=namespace),
            name=str(document.get("metadata", {}).get("name", "")),
            query=query,
            body=msgspec.json.encode(document),
        )
        return decoded(_DOCUMENT, await self._session.request(call, timeout_s=_PATIENCE_S), kind.resource)

    async def apply(self, kind: ApiKind, document: Document, *, manager: str) -> Document:
        """Create or change an object by server-side apply; raises Conflict where others own the fields."""
        name = str(document["metadata"]["name"])
        call = Call(
            "patch",
            kind.resource,
            kind.path(name),
            name=name,
            query={"fieldManager": manager},
            body=msgspec.json.encode(document),
            patch_type=APPLY_PATCH,
        )
        return decoded(_DOCUMENT, await self._session.request(call, timeout_s=_PATIENCE_S), kind.resource)

    async def delete(self, kind: ApiKind, name: str, *, namespace: str = "") -> None:
        """Delete an object at once; raises Missing when it is gone."""
        call = Call(
            "delete",
            kind.resource,
            kind.path(name, namespace=namespace),
            name=name,
            query={"gracePeriodSeconds": "0"},
        )
        await self._session.request(call)

    async def read_log(self, namespace: str, pod: str, container: str, *, limit: int) -> bytes:
        """Read what a container has printed; raises TooLarge beyond `limit` bytes."""
        kind = ApiKind("pods")
        call = Call(
            "get",
            "pods/log",
            f"{kind.path(pod, namespace=namespace)}/log",
            name=f"{namespace}/{pod}",
            query={"container": container},
            accept=f"{JSON}, text/plain, */*",
        )
        return await self._session.request(call, limit=limit, timeout_s=_PATIENCE_S)
