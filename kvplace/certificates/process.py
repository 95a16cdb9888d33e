"""`kvplace certificates`: the keeper and its health, until SIGTERM."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from kvplace.certificates.keeper import CertificateStore, Keeper, Names
from kvplace.kube.credentials import CredentialOptions
from kvplace.kube.secrets import ApiSecrets
from kvplace.kube.session import open_session
from kvplace.service.health import Readiness, health_application
from kvplace.service.json_log import log_as_json
from kvplace.service.listening import listening
from kvplace.service.process import in_background, run_until_signal
from kvplace.service.settings import Address


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
    """Keep certificates until SIGTERM or SIGINT; raises Misconfigured for what an operator must change."""
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
    names = Names.of(settings.namespace, settings.own_namespace, settings.client_name)
    async with (
        listening("health", health_application("certificates", readiness), settings.health_address) as health,
        in_background(Keeper(store, names, readiness).run()),
    ):
        yield health
