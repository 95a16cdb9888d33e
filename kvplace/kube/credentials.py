"""The address of the API server and the credentials for it.

A pod uses its service account, any other process a context of a kubeconfig. Tokens and client
certificates are read here; a token in a file is read again once a minute, since the kubelet replaces it.
Everything is loaded again when the API server answers 401, which covers rotated credentials.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import ssl
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kvplace.core.errors import Absent, Misconfigured
from kvplace.kube.kubeconfig import KubeContext, kubeconfig_files, proxy_of, read_context
from kvplace.kube.login_program import issued_credentials
from kvplace.kube.oidc import oidc_token

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where the kubelet mounts a pod's token and the CA of the API server."""
_AS = ("as", "as-uid", "as-groups", "as-user-extra")
"""Keys of a user of a kubeconfig that acts as another user."""
_IN_HEADERS = "!#$&'*+^`|"
"""Characters that the name of a header may have, besides letters, digits and all that `quote` keeps."""
TOKEN_AGE_S = 60.0
"""A token that was read so long ago is read again."""


@dataclass(frozen=True)
class CredentialOptions:
    """The configuration to use; by default kubectl's, or the pod's service account."""

    kubeconfig: str | None = None
    """One file, or several as KUBECONFIG lists them."""
    context: str | None = None
    """Name of a context; None for the current one."""
    token: str | None = None
    """Bearer token to use instead of the user in the kubeconfig."""
    user: str | None = None
    """Act as this user, with the right to impersonate it."""
    groups: tuple[str, ...] = ()
    """The groups of that user."""


@dataclass(frozen=True)
class Credentials:
    """One loaded configuration: address, TLS and a token that stays fresh."""

    server: str
    authorization: Callable[[], Awaitable[str | None]]
    """Returns the Authorization header; None when a client certificate is used instead."""
    namespace: str = "default"
    """The namespace of calls that name none."""
    tls: ssl.SSLContext | None = None
    """None for a server without TLS."""
    proxy: str | None = None
    server_hostname: str | None = None
    impersonation: tuple[tuple[str, str], ...] = ()
    """The headers that ask the API server to act as another user."""


async def load_credentials(options: CredentialOptions) -> Credentials:
    """Load the configuration; raises Misconfigured, or Absent where no cluster is configured."""
    loaded = await _load(options)
    if options.user is None:
        return loaded
    try:
        return replace(loaded, impersonation=_impersonation(options.user, options.groups))
    except ValueError as error:
        raise Misconfigured(f"--as and --as-group cannot be used: {error}") from None


async def _load(options: CredentialOptions) -> Credentials:
    files = kubeconfig_files(options.kubeconfig)
    if files is not None:
        return await _of_context(read_context(files, options.context), options.token)
    if options.context is not None:
        raise Misconfigured(
            f"there is no kubeconfig with a context {options.context!r}: name one with --kubeconfig"
        )
    return _of_pod(options.token)


def _of_pod(token: str | None) -> Credentials:
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT")
    if not host or not port:
        raise Absent(
            "no cluster is configured: there is no kubeconfig (KUBECONFIG or ~/.kube/config), and this "
            "process does not run in a pod (KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not "
            "set); name a kubeconfig with --kubeconfig"
        )
    ca = SERVICE_ACCOUNT / "ca.crt"
    try:
        tls = _as_kubectl_does(ssl.create_default_context(cafile=ca))
        reread = TokenFile(SERVICE_ACCOUNT / "token")
    except (OSError, ValueError) as error:
        raise Misconfigured(f"the service account below {SERVICE_ACCOUNT} cannot be used: {error}") from error
    address = f"[{host}]" if ":" in host else host
    return Credentials(
        f"https://{address}:{port}", _fixed(token) if token else reread, _namespace_of_pod(), tls
    )


def _namespace_of_pod() -> str:
    try:
        return (SERVICE_ACCOUNT / "namespace").read_text().strip() or "default"
    except (OSError, ValueError):
        return "default"


class TokenFile:
    """A token that a user replaces in its file, read again once a minute."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Read it; raises OSError, or ValueError for an empty file."""
        self._path = path
        self._clock = clock
        self._header = self._read()
        self._read_at = clock()

    async def __call__(self) -> str:
        if self._clock() - self._read_at >= TOKEN_AGE_S:
            self._read_at = self._clock()
            with contextlib.suppress(
                OSError, ValueError
            ):  # the old one may still be valid; a 401 would show it
                self._header = self._read()
        return self._header

    def _read(self) -> str:
        token = self._path.read_text().strip()
        if not token:
            raise ValueError(f"{self._path} is empty")
        return f"Bearer {_checked(token)}"


async def _of_context(context: KubeContext, token: str | None) -> Credentials:
    if token is None and "exec" in context.user:
        return await _of_login_program(context)
    if token is None and "auth-provider" in context.user:
        return await _of_auth_provider(context)
    user: Mapping[str, Any] = context.user if token is None else {"token": token}
    try:
        return _credentials(context, _authorization(user), user)
    except (OSError, ValueError, TypeError) as error:
        raise _unusable(context, error) from error


async def _of_login_program(context: KubeContext) -> Credentials:
    plugin = context.user["exec"]
    try:
        return _as_issued(context, await issued_credentials(plugin, context.cluster))
    except (OSError, ValueError, TypeError) as error:
        command = plugin.get("command") if isinstance(plugin, Mapping) else plugin
        reason = f"the program {command!r} that it logs in with gives no credentials: {_reason(error)}"
        raise _unusable(context, ValueError(reason)) from error


async def _of_auth_provider(context: KubeContext) -> Credentials:
    try:
        token = await oidc_token(context.user["auth-provider"], lambda authority: _tls(authority, {}))
        return _as_issued(context, {"token": token})
    except (OSError, ValueError, TypeError) as error:
        raise _unusable(context, error) from error


def _as_issued(context: KubeContext, issued: Mapping[str, str]) -> Credentials:
    """Combine what was issued to a user with the identity that the user acts as."""
    user = {**{key: value for key, value in context.user.items() if key in _AS}, **issued}
    return _credentials(context, _authorization(user), user)


def _unusable(context: KubeContext, error: Exception) -> Misconfigured:
    return Misconfigured(
        f"context {context.name!r} of kubeconfig {context.files} cannot be used: {_reason(error)}"
    )


def _reason(error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"{error.filename}: {reason}" if isinstance(error, OSError) and error.filename else reason


def _credentials(
    context: KubeContext, authorization: Callable[[], Awaitable[str | None]], user: Mapping[str, Any]
) -> Credentials:
    cluster = context.cluster
    server = cluster["server"].rstrip("/")
    return Credentials(
        server,
        authorization,
        context.namespace or "default",
        _tls(cluster, user) if server.startswith("https:") else None,
        proxy_of(cluster),
        _name_in_certificate(cluster),
        _impersonation_by(user),
    )


def _name_in_certificate(cluster: Mapping[str, Any]) -> str | None:
    name = cluster.get("tls-server-name")
    if name is not None and not isinstance(name, str):
        raise ValueError(f"its tls-server-name is {name!r}; it must be a name, in quotes")
    return name or None


def _impersonation_by(user: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Read whom a user of a kubeconfig acts as; raises ValueError rather than act as another user."""
    name, groups, extra = user.get("as"), user.get("as-groups") or [], user.get("as-user-extra") or {}
    if not name:
        if given := [key for key in _AS if user.get(key)]:
            raise ValueError(f"its {given[0]} needs as: it is impersonated together with a user")
        return ()
    if not _are_strings(groups):
        raise ValueError("its as-groups must be a list of strings")
    if not isinstance(extra, Mapping) or not all(map(_are_strings, extra.values())):
        raise ValueError("its as-user-extra must be lists of strings by name")
    uid = (("Impersonate-Uid", _in_one_line(str(user["as-uid"]))),) if user.get("as-uid") else ()
    of_extra = (
        (f"Impersonate-Extra-{quote(key, safe=_IN_HEADERS)}", _in_one_line(value))
        for key, values in extra.items()
        for value in values
    )
    return (*_impersonation(str(name), groups), *uid, *of_extra)


def _are_strings(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _impersonation(user: str, groups: Iterable[str]) -> tuple[tuple[str, str], ...]:
    named = ("Impersonate-User", user), *(("Impersonate-Group", group) for group in groups)
    return tuple((header, _in_one_line(value)) for header, value in named)


def _in_one_line(value: str) -> str:
    """Return the value of a header; raises ValueError for a value that would break it."""
    if any(ord(character) < ord(" ") or character == "\x7f" for character in value):
        raise ValueError(f"{value!r}, as which to act, contains a control character such as a line break")
    return value


def _authorization(user: Mapping[str, Any]) -> Callable[[], Awaitable[str | None]]:
    if user.get("tokenFile"):
        return TokenFile(Path(user["tokenFile"]))
    if user.get("token"):
        return _fixed(_checked(user["token"]))
    if user.get("username"):
        secret = f"{user['username']}:{user.get('password', '')}".encode()
        return _header(f"Basic {base64.b64encode(secret).decode()}")
    return _header(None)


def _checked(token: object) -> str:
    text = str(token)
    if not isinstance(token, str | int) or not text.isascii() or not text.isprintable():
        raise ValueError("its token contains an invalid character, such as a line break; copy it again")
    return text


def _fixed(token: str) -> Callable[[], Awaitable[str | None]]:
    return _header(f"Bearer {token}")


def _header(value: str | None) -> Callable[[], Awaitable[str | None]]:
    async def authorization() -> str | None:
        return value

    return authorization


def _as_kubectl_does(context: ssl.SSLContext) -> ssl.SSLContext:
    """Let it verify the same as kubectl: the chain, the time and the name.

    Since 3.13 Python demands key identifiers, too, which the CAs of many clusters do not have.
    """
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def _tls(cluster: Mapping[str, Any], user: Mapping[str, Any]) -> ssl.SSLContext:
    ca = _bytes(cluster, "certificate-authority")
    # Comments between certificates may be in any language; OpenSSL skips them, Python takes ASCII only.
    pem = None if ca is None else ca.decode("ascii", "ignore")
    if pem is not None and "-----BEGIN" not in pem:
        raise ValueError("its certificate-authority holds no certificate")
    context = _as_kubectl_does(ssl.create_default_context(cadata=pem))
    certificate, key = _bytes(user, "client-certificate"), _bytes(user, "client-key")
    if certificate is not None:
        # OpenSSL reads them from a file only; the key is in it for no longer than that takes.
        with tempfile.NamedTemporaryFile() as file:
            file.write(certificate + b"\n" + (key or b""))
            file.flush()
            # Without a passphrase OpenSSL would ask the terminal for one when the key is encrypted.
            context.load_cert_chain(file.name, password="")
    if cluster.get("insecure-skip-tls-verify"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _bytes(section: Mapping[str, Any], name: str) -> bytes | None:
    """Return a value that a kubeconfig has in base64 or as a file; raises OSError and ValueError."""
    if encoded := section.get(f"{name}-data"):
        try:
            return base64.b64decode(encoded, validate=True)
        except (binascii.Error, TypeError) as error:
            raise ValueError(f"{name}-data is not in base64 ({error})") from None
    path = section.get(name)
    return Path(path).read_bytes() if path else None
