"""`kvplace certificates`: keeps the Secrets of an installation filled, and the webhooks trusting them.

Every check is complete and repeatable: it makes missing certificates, renews due ones, and changes nothing
else. Two keepers at once do no harm: each write names the version that it was decided on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from kvplace.certificates.authority import (
    KEY,
    Authority,
    Pair,
    Stored,
    Subject,
    current_authority,
    current_certificate,
)
from kvplace.core.errors import Conflict, Unavailable
from kvplace.kube.credentials import CredentialOptions
from kvplace.kube.secrets import ApiSecrets, Secret
from kvplace.kube.session import open_session
from kvplace.service.connections import Address
from kvplace.service.listening import listening
from kvplace.service.process import (
    CERTIFICATE_END,
    Readiness,
    health_application,
    in_background,
    log_as_json,
    run_until_signal,
)

_log = logging.getLogger(__name__)

CA_SECRET, SERVER_SECRET, CLIENT_SECRET = "kvplace-ca", "kvplace-serve-tls", "kvplace-scheduler-client"
SERVICES = ("kvplace", "kvplace-extender")
"""The Services that lead to `serve`."""


class CertificateStore(Protocol):
    """The cluster calls of the keeper."""

    async def read_secret(self, namespace: str, name: str) -> Secret | None:
        """Read a Secret; None when there is none."""

    async def write_secret(
        self, namespace: str, name: str, content: Mapping[str, bytes], before: Secret | None
    ) -> None:
        """Create a Secret, or replace its content where it is still `before`; raises Conflict."""

    async def trust_webhooks(self, authority: bytes) -> str:
        """Let the API server trust our webhooks by this CA; returns the remaining work, or nothing."""


def server_of(namespace: str) -> Subject:
    """Name the Services of an installation."""
    return Subject("kvplace-serve", tuple(f"{service}.{namespace}.svc" for service in SERVICES))


class Keeper:
    """Manages the certificates of one installation."""

    def __init__(
        self,
        store: CertificateStore,
        namespace: str,
        own_namespace: str,
        client_name: str,
        readiness: Readiness,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        check_every_s: float = 60.0,
        again_after_s: float = 2.0,
    ) -> None:
        """`own_namespace` is of the CA and its key, which nothing but the keeper reads.

        `client_name` is the scheduler that may call. `now` decides which renewals are due; `readiness` turns
        good once a check finds all in place.
        """
        self._store = store
        self._namespace = namespace
        self._own_namespace = own_namespace
        self._server, self._client = server_of(namespace), Subject(client_name)
        self._readiness = readiness
        self._now = now
        self._check_every_s = check_every_s
        self._again_after_s = again_after_s

    async def run(self) -> None:
        """Check again and again, until cancelled."""
        while True:
            pause = self._check_every_s
            try:
                self._readiness.obstacle = await self.check()
                if self._readiness.obstacle:
                    pause = self._again_after_s
            except (Conflict, Unavailable) as error:
                _log.warning("the certificates are checked again in %s s: %s", self._again_after_s, error)
                pause = self._again_after_s
            await asyncio.sleep(pause)

    async def check(self) -> str:
        """Make, renew and publish the due certificates, and name the remaining obstacle, if any.

        Webhooks may be applied later than this process. Raises Conflict when another writer was first.
        """
        now = self._now()
        authority = await self._keep_authority(now)
        await self._keep(SERVER_SECRET, self._server, authority, now)
        await self._keep(CLIENT_SECRET, self._client, authority, now)
        return await self._store.trust_webhooks(authority.bundle)

    async def _keep_authority(self, now: datetime) -> Authority:
        before = await self._store.read_secret(self._own_namespace, CA_SECRET)
        authority = current_authority(before.content if before else {}, now)
        await self._write(self._own_namespace, CA_SECRET, authority.signer, authority.document(), before)
        CERTIFICATE_END.labels("client-ca").set(authority.signer.certificate.not_valid_after_utc.timestamp())
        return authority

    async def _keep(self, name: str, subject: Subject, authority: Authority, now: datetime) -> None:
        before = await self._store.read_secret(self._namespace, name)
        pair = current_certificate(before.content if before else {}, subject, authority.signer, now)
        await self._write(self._namespace, name, pair, pair.document(authority.bundle), before)
        if subject is self._server:
            CERTIFICATE_END.labels("server").set(pair.certificate.not_valid_after_utc.timestamp())

    async def _write(
        self, namespace: str, name: str, pair: Pair, content: Mapping[str, bytes], before: Secret | None
    ) -> None:
        if before is not None and _same(before.content, content):
            return
        await self._store.write_secret(namespace, name, content, before)
        end = pair.certificate.not_valid_after_utc
        _log.info("wrote certificate %s/%s, which ends on %s", namespace, name, end.date())


def _same(stored: Stored, content: Stored) -> bool:
    """Whether a Secret has the content; a key that another program wrote may have another form."""
    found, wanted = Pair.read(stored), Pair.read(content)
    return (
        found is not None
        and wanted is not None
        and found.certificate == wanted.certificate
        and {**stored, KEY: b""} == {**content, KEY: b""}
    )


@dataclass(frozen=True, slots=True)
class CertificatesSettings:
    """Settings of the process."""

    namespace: str
    own_namespace: str
    client_name: str
    health_address: Address
    kubeconfig: Path | None = None
    log_level: str = "info"


def run(settings: CertificatesSettings) -> None:
    """Keep certificates until SIGTERM or SIGINT; raises Misconfigured if an operator must act."""
    log_as_json(settings.log_level)
    run_until_signal(_connected(settings))


@contextlib.asynccontextmanager
async def _connected(settings: CertificatesSettings) -> AsyncIterator[None]:
    kubeconfig = str(settings.kubeconfig) if settings.kubeconfig else None
    async with (
        await open_session(CredentialOptions(kubeconfig=kubeconfig)) as session,
        keeping(settings, ApiSecrets(session)),
    ):
        yield


@contextlib.asynccontextmanager
async def keeping(settings: CertificatesSettings, store: CertificateStore) -> AsyncIterator[Address]:
    """Keep certificates while the block runs; gives the address of health and metrics."""
    readiness = Readiness("no certificate has been checked yet")
    keeper = Keeper(store, settings.namespace, settings.own_namespace, settings.client_name, readiness)
    async with (
        listening("health", health_application("certificates", readiness), settings.health_address) as health,
        in_background(keeper.run()),
    ):
        yield health
