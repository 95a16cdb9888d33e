"""Secrets in memory, with the versions by which writers notice each other."""

from __future__ import annotations

from collections.abc import Mapping

from kvplace.certificates.keeper import CA_SECRET
from kvplace.core.errors import Conflict
from kvplace.kube.secrets import Secret


class StoredSecrets:
    """The secrets that the keeper sees of a cluster."""

    def __init__(self) -> None:
        self.secrets: dict[str, Secret] = {}
        self.trusted: bytes = b""
        self.has_webhooks = True
        self.writes: list[str] = []

    async def read_secret(self, namespace: str, name: str) -> Secret | None:
        return self.secrets.get(f"{namespace}/{name}")

    async def write_secret(
        self, namespace: str, name: str, content: Mapping[str, bytes], before: Secret | None
    ) -> None:
        key = f"{namespace}/{name}"
        if self.secrets.get(key) != before:
            raise Conflict(key)
        self.writes.append(name)
        self.secrets[key] = Secret(dict(content), str(len(self.writes)))

    async def trust_webhooks(self, authority: bytes) -> str:
        if not self.has_webhooks:
            return "no webhook is there yet"
        was, self.trusted = self.trusted, authority
        return "" if was == authority else "only just told"

    def content(self, name: str) -> Mapping[str, bytes]:
        return self.secrets[_key(name)].content

    def put(self, name: str, content: Mapping[str, bytes]) -> None:
        self.secrets[_key(name)] = Secret(dict(content), "by hand")


def _key(name: str) -> str:
    """The CA is in a namespace of its own."""
    return f"{'kvplace-certificates' if name == CA_SECRET else 'kvplace-system'}/{name}"
