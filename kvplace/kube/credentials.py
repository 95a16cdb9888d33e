"""The address of the API server and the credentials for it, read by the official client.

kubeconfig files, in-cluster service accounts, exec plugins, OIDC and client certificates are all left to
`kubernetes.aio.config`; its import takes half a second and is done only when a cluster is used.
Everything is loaded again when the API server answers 401, which covers what has been rotated; the library
reads a service account's token again once a minute.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvplace.core.errors import Misconfigured


@dataclass(frozen=True)
class CredentialOptions:
    """Which configuration to use; by default that of kubectl, or the pod's service account."""

    kubeconfig: str | None = None
    context: str | None = None
    token: str | None = None
    """Bearer token to use instead of the user in the kubeconfig."""


class Credentials:
    """One loaded configuration: address, TLS and a token that stays fresh."""

    def __init__(self, configuration: Any, token: str | None) -> None:
        """Wrap a `kubernetes.aio.client.Configuration`."""
        self._configuration = configuration
        self._token = token
        self.server: str = configuration.host.rstrip("/")
        self.proxy: str | None = configuration.proxy
        self.server_hostname: str | None = configuration.tls_server_name
        self.tls = (
            _tls(configuration, with_certificate=token is None) if self.server.startswith("https:") else None
        )

    async def authorization(self) -> str | None:
        """Return the Authorization header; None when a client certificate is used instead."""
        if self._token is not None:
            return f"Bearer {self._token}"
        header = await self._configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        return None if header is None else str(header)


async def load_credentials(options: CredentialOptions) -> Credentials:
    """Load the configuration; raises Misconfigured that says what is missing and where."""
    from kubernetes.aio import client, config
    from yaml import YAMLError

    configuration = client.Configuration()
    path = options.kubeconfig or _default_kubeconfig()
    try:
        if path is not None:
            await config.load_kube_config(
                config_file=path,
                context=options.context,
                client_configuration=configuration,
                persist_config=False,
            )
        else:
            config.load_incluster_config(client_configuration=configuration)
        return Credentials(configuration, options.token)
    except (
        config.ConfigException,
        YAMLError,
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
    ) as error:
        if path is None:
            raise Misconfigured(
                f"no cluster is configured: no kubeconfig (KUBECONFIG or ~/.kube/config), and {error}"
            ) from error
        raise Misconfigured(f"kubeconfig {path} cannot be used: {error}") from error


def _default_kubeconfig() -> str | None:
    named = os.environ.get("KUBECONFIG")
    if named:
        return named
    usual = Path("~/.kube/config").expanduser()
    return str(usual) if usual.exists() else None


def _tls(configuration: Any, *, with_certificate: bool) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert, cadata=configuration.ca_cert_data)
    if with_certificate and configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, keyfile=configuration.key_file)
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
