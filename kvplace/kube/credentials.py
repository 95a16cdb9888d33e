"""The address of the API server and the credentials for it.

In a pod they are its service account's, which are read here: the token again once a minute, since the kubelet
replaces it. kubeconfig files, exec plugins, OIDC and client certificates are left to the official client
(`kubernetes.aio.config`), which is imported only for them: it takes half a second and 35 MB. Everything is
loaded again when the API server answers 401, which covers what has been rotated.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvplace.core.errors import Misconfigured

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where the kubelet mounts a pod's token and the CA of the API server."""
TOKEN_AGE_S = 60.0
"""A token that was read so long ago is read again."""


@dataclass(frozen=True)
class CredentialOptions:
    """Which configuration to use; by default that of kubectl, or the pod's service account."""

    kubeconfig: str | None = None
    context: str | None = None
    token: str | None = None
    """Bearer token to use instead of the user in the kubeconfig."""


@dataclass(frozen=True)
class Credentials:
    """One loaded configuration: address, TLS and a token that stays fresh."""

    server: str
    authorization: Callable[[], Awaitable[str | None]]
    """Returns the Authorization header; None when a client certificate is used instead."""
    tls: ssl.SSLContext | None = None
    """None for a server without TLS."""
    proxy: str | None = None
    server_hostname: str | None = None


async def load_credentials(options: CredentialOptions) -> Credentials:
    """Load the configuration; raises Misconfigured that says what is missing and where."""
    path = options.kubeconfig or _default_kubeconfig()
    if path is not None:
        return await _of_kubeconfig(path, options)
    return _of_pod(options.token)


def _default_kubeconfig() -> str | None:
    named = os.environ.get("KUBECONFIG")
    if named:
        return named
    usual = Path("~/.kube/config").expanduser()
    return str(usual) if usual.exists() else None


def _of_pod(token: str | None) -> Credentials:
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{name}") for name in ("HOST", "PORT"))
    if not host or not port:
        raise Misconfigured(
            "no cluster is configured: no kubeconfig (KUBECONFIG or ~/.kube/config), and this is no pod"
            " (KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set)"
        )
    ca = SERVICE_ACCOUNT / "ca.crt"
    try:
        tls = ssl.create_default_context(cafile=ca)
        reread = ServiceAccountToken(SERVICE_ACCOUNT / "token")
    except (OSError, ValueError) as error:
        raise Misconfigured(f"the service account below {SERVICE_ACCOUNT} cannot be used: {error}") from error
    address = f"[{host}]" if ":" in host else host
    return Credentials(f"https://{address}:{port}", _fixed(token) if token else reread, tls)


class ServiceAccountToken:
    """The token of a service account, read again once a minute."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Read it; raises OSError, or ValueError for an empty file."""
        self._path = path
        self._clock = clock
        self._header = self._read()
        self._read_at = clock()

    async def __call__(self) -> str:
        if self._clock() - self._read_at >= TOKEN_AGE_S:
            self._read_at = self._clock()
            with contextlib.suppress(OSError, ValueError):  # the old one may still do; 401 tells
                self._header = self._read()
        return self._header

    def _read(self) -> str:
        token = self._path.read_text().strip()
        if not token:
            raise ValueError(f"{self._path} is empty")
        return f"Bearer {token}"


async def _of_kubeconfig(path: str, options: CredentialOptions) -> Credentials:
    from kubernetes.aio import client, config
    from yaml import YAMLError

    configuration = client.Configuration()
    try:
        await config.load_kube_config(
            config_file=path,
            context=options.context,
            client_configuration=configuration,
            persist_config=False,
        )
        return _of_configuration(configuration, options.token)
    except (
        config.ConfigException,
        YAMLError,
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
    ) as error:
        raise Misconfigured(f"kubeconfig {path} cannot be used: {error}") from error


def _of_configuration(configuration: Any, token: str | None) -> Credentials:
    """Take over a `kubernetes.aio.client.Configuration`."""

    async def authorization() -> str | None:
        header = await configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        return None if header is None else str(header)

    server = configuration.host.rstrip("/")
    return Credentials(
        server,
        authorization if token is None else _fixed(token),
        _tls(configuration, with_certificate=token is None) if server.startswith("https:") else None,
        configuration.proxy,
        configuration.tls_server_name,
    )


def _fixed(token: str) -> Callable[[], Awaitable[str]]:
    async def authorization() -> str:
        return f"Bearer {token}"

    return authorization


def _tls(configuration: Any, *, with_certificate: bool) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert, cadata=configuration.ca_cert_data)
    if with_certificate and configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, keyfile=configuration.key_file)
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
