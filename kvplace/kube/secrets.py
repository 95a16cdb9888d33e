"""Secrets with certificates, and the trust of the API server in webhooks.

Apart from `ApiCluster`: no component that serves has a right on Secrets.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvplace.core.errors import Conflict
from kvplace.kube.api_errors import NotFound
from kvplace.kube.calls import APPLY_PATCH, ApiCall
from kvplace.kube.object_parts import Metadata
from kvplace.kube.session import Session
from kvplace.kube.watches import ApiKind

FIELD_MANAGER = "kvplace-certificates"
CONFIGURATIONS = (
    ("mutatingwebhookconfigurations", "MutatingWebhookConfiguration", "vms.kvplace.io"),
    ("validatingwebhookconfigurations", "ValidatingWebhookConfiguration", "kvplace"),
)
"""Resource, kind and name of those in manifests/admission."""


@dataclass(frozen=True, slots=True)
class Secret:
    """A Secret as it was read."""

    content: Mapping[str, bytes] = field(repr=False)
    resource_version: str = ""


class _SecretObject(msgspec.Struct):
    metadata: Metadata
    data: dict[str, bytes] | None = None


_SECRETS = ApiKind("secrets")
_SECRET = msgspec.json.Decoder(_SecretObject)
_CONFIGURATION: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])


class ApiSecrets:
    """Secrets and webhook configurations of a cluster behind an API server."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def read_secret(self, namespace: str, name: str) -> Secret | None:
        """Read a Secret; None when there is none."""
        found = await self._session.read(_SECRETS, name, _SECRET, namespace=namespace)
        return None if found is None else Secret(found.data or {}, found.metadata.resource_version)

    async def write_secret(
        self, namespace: str, name: str, content: Mapping[str, bytes], before: Secret | None
    ) -> None:
        """Create a Secret, or replace the content of the one that is as `before`.

        Raises Conflict when another client has created, changed or deleted it.
        """
        encoded = {key: base64.b64encode(value).decode() for key, value in content.items()}
        if before is None:
            verb = "create"
            document: dict[str, Any] = {
                "apiVersion": "v1",
                "kind": "Secret",
                "type": "kubernetes.io/tls",
                "metadata": {"name": name, "labels": {"app.kubernetes.io/part-of": "kvplace"}},
                "data": encoded,
            }
        else:
            verb = "patch"
            removed = {key: None for key in before.content if key not in content}
            document = {
                "metadata": {"resourceVersion": before.resource_version},
                "data": {**removed, **encoded},
            }
        query = {"fieldManager": FIELD_MANAGER}
        write = ApiCall.on(verb, _SECRETS, name, namespace=namespace, query=query, document=document)
        try:
            await self._session.request(write)
        except NotFound as error:
            if before is None:
                raise  # there is no such namespace
            raise Conflict(f"Secret {namespace}/{name} is gone") from error

    async def trust_webhooks(self, authority: bytes) -> str:
        """Let the API server trust kvplace's webhooks by this CA; returns the remaining work, or nothing.

        Only the CA is written: everything else of a webhook belongs to its installer.
        """
        still = [await self._trust(*configuration, authority) for configuration in CONFIGURATIONS]
        return "; ".join(filter(None, still))

    async def _trust(self, resource: str, kind: str, name: str, authority: bytes) -> str:
        api = ApiKind(resource, "admissionregistration.k8s.io")
        found = await self._session.read(api, name, _CONFIGURATION)
        if found is None:
            return f"{kind} {name} is not there yet"
        webhooks = found.get("webhooks") or []
        bundle = {"caBundle": base64.b64encode(authority).decode()}
        if any(webhook["clientConfig"].get("caBundle") != bundle["caBundle"] for webhook in webhooks):
            document = {
                "apiVersion": "admissionregistration.k8s.io/v1",
                "kind": kind,
                "metadata": {"name": name},
                "webhooks": [{"name": webhook["name"], "clientConfig": bundle} for webhook in webhooks],
            }
            query = {"fieldManager": FIELD_MANAGER, "force": "true"}
            await self._session.request(
                ApiCall.on("patch", api, name, query=query, document=document, patch_type=APPLY_PATCH)
            )
            return f"{kind} {name} has only just got its CA"
        return ""
