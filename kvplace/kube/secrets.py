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
from kvplace.kube.api_errors import NotFound, decoded
from kvplace.kube.object_parts import Metadata
from kvplace.kube.session import APPLY_PATCH, Call, Session, path_of

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


_SECRET = msgspec.json.Decoder(_SecretObject)
_CONFIGURATION: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])


class ApiSecrets:
    """Secrets and webhook configurations of a cluster behind an API server."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def read_secret(self, namespace: str, name: str) -> Secret | None:
        """Read a Secret; None when there is none."""
        try:
            body = await self._session.request(
                Call("get", "secrets", _secret_path(namespace, name), name=name)
            )
        except NotFound:
            return None
        found = decoded(_SECRET, body, "secrets")
        return Secret(found.data or {}, found.metadata.resource_version)

    async def write_secret(
        self, namespace: str, name: str, content: Mapping[str, bytes], before: Secret | None
    ) -> None:
        """Create a Secret, or replace the content of the one that is as `before`.

        Raises Conflict when another client has created, changed or deleted it.
        """
        document = {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "kubernetes.io/tls",
            "metadata": {"name": name, "labels": {"app.kubernetes.io/part-of": "kvplace"}},
            "data": {key: base64.b64encode(value).decode() for key, value in content.items()},
        }
        if before is None:
            call = ("create", _secret_path(namespace))
        else:
            call = ("patch", _secret_path(namespace, name))
            document = {
                "metadata": {"resourceVersion": before.resource_version},
                "data": {
                    **{key: None for key in before.content if key not in content},
                    **{key: base64.b64encode(value).decode() for key, value in content.items()},
                },
            }
        verb, path = call
        query = {"fieldManager": FIELD_MANAGER}
        write = Call(verb, "secrets", path, name=name, query=query, body=msgspec.json.encode(document))
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
        path = path_of("apis", "admissionregistration.k8s.io", "v1", resource, name)
        try:
            body = await self._session.request(Call("get", resource, path, name=name))
        except NotFound:
            return f"{kind} {name} is not there yet"
        webhooks = decoded(_CONFIGURATION, body, resource).get("webhooks") or []
        bundle = {"caBundle": base64.b64encode(authority).decode()}
        if any(webhook["clientConfig"].get("caBundle") != bundle["caBundle"] for webhook in webhooks):
            document = {
                "apiVersion": "admissionregistration.k8s.io/v1",
                "kind": kind,
                "metadata": {"name": name},
                "webhooks": [{"name": webhook["name"], "clientConfig": bundle} for webhook in webhooks],
            }
            await self._session.request(
                Call(
                    "patch",
                    resource,
                    path,
                    name=name,
                    query={"fieldManager": FIELD_MANAGER, "force": "true"},
                    body=msgspec.json.encode(document),
                    patch_type=APPLY_PATCH,
                )
            )
            return f"{kind} {name} has only just got its CA"
        return ""


def _secret_path(namespace: str, *name: str) -> str:
    return path_of("api", "v1", "namespaces", namespace, "secrets", *name)
