"""Requests to the API server as values: the object, the content, and the form of the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import msgspec

from kvplace.kube.watches import ApiKind

JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"
"""Merges lists by their keys, for kinds that Kubernetes itself brings along."""
APPLY_PATCH = "application/apply-patch+yaml"
"""Server-side apply: makes the object, or sets the fields that it names. JSON is YAML, too."""
METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"
"""Accept header that asks for an object's metadata alone; spares both sides the rest."""
METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"
"""The same for a list."""
TABLE = "application/json;as=Table;g=meta.k8s.io;v=v1,application/json"
"""Accept header that asks for the columns which kubectl prints, and the metadata, of an object or a list."""

METHODS = {
    "get": "GET",
    "list": "GET",
    "watch": "GET",
    "create": "POST",
    "update": "PUT",
    "patch": "PATCH",
    "delete": "DELETE",
}
"""The method of HTTP for each verb of RBAC."""


@dataclass(frozen=True, slots=True)
class ApiCall:
    """One request, with the names of RBAC for its errors."""

    verb: str
    """The verb of RBAC, a key of METHODS."""
    resource: str
    """Resource with subresource, as in RBAC: `pods/binding`."""
    path: str
    name: str = ""
    query: Mapping[str, str] | None = None
    body: bytes | None = None
    accept: str = JSON
    patch_type: str = MERGE_PATCH

    @classmethod
    def on(
        cls,
        verb: str,
        kind: ApiKind,
        name: str,
        *subresource: str,
        namespace: str = "",
        query: Mapping[str, str] | None = None,
        document: object = None,
        accept: str = JSON,
        patch_type: str = MERGE_PATCH,
    ) -> Self:
        """Make a call about one object, or a subresource of it; `document` is sent as JSON."""
        names = (name, *subresource) if subresource or verb != "create" else ()
        return cls(
            verb,
            "/".join((kind.resource, *subresource)),
            kind.path(*names, namespace=namespace),
            f"{namespace}/{name}" if namespace and name else name,
            query,
            None if document is None else msgspec.json.encode(document),
            accept,
            patch_type,
        )
