"""OIDC tokens of kubeconfigs (`auth-provider`).

A token that has not expired is used as it is. The official client renews another one. It is given what
verifies the issuer's certificate: without it that client sends the refresh token to any server, and with a
CA it fails. It is imported only here: it takes half a second and 35 MB, and kvplace's images leave it out.
Nothing is stored in the kubeconfig, unlike with kubectl: an issuer that replaces refresh tokens demands a new
login then.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any

log = logging.getLogger(__name__)

_TO_RENEW = ("client-id", "idp-issuer-url", "refresh-token")
_CA = "idp-certificate-authority"
_LEAST_LEFT_S = 10.0
"""A token that expires sooner is renewed, as kubectl does."""
_RENEWAL_S = 30.0
"""An issuer that takes longer has not renewed the token."""


async def oidc_token(provider: Any, trusting: Callable[[Mapping[str, Any]], ssl.SSLContext]) -> str:
    """Return the token of a user's `auth-provider`, renewed where it has expired.

    `trusting` makes a TLS context from a `certificate-authority`, or its `-data`. Raises OSError, TypeError
    or ValueError for a wrong entry or answer.
    """
    name = provider.get("name") if isinstance(provider, Mapping) else None
    settings = provider.get("config") if isinstance(provider, Mapping) else None
    if isinstance(name, str) and name != "oidc":
        raise ValueError(f"its auth-provider is {name!r}; it must be oidc, as for kubectl")
    if not isinstance(name, str) or not isinstance(settings, Mapping):
        raise TypeError("its auth-provider must be a mapping with name and config")
    given = {key: value for key, value in settings.items() if value}
    if not all(isinstance(value, str) for value in given.values()):
        raise TypeError("the settings of its auth-provider must be strings, in quotes")
    token = given.get("id-token")
    if token is None or _expires(token) < time.time() + _LEAST_LEFT_S:
        return await _renewed(given, trusting)
    return str(token)


def _expires(token: str) -> float:
    try:
        _, claims, _ = token.split(".")
        return float(json.loads(base64.urlsafe_b64decode(claims + "==")).get("exp", float("inf")))
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        raise ValueError("its id-token is not a JSON Web Token; log in again") from None


async def _renewed(
    settings: Mapping[str, str], trusting: Callable[[Mapping[str, Any]], ssl.SSLContext]
) -> str:
    if not all(key in settings for key in _TO_RENEW):
        raise ValueError(
            "its auth-provider has no valid id-token, and to renew it needs client-id, idp-issuer-url and "
            "refresh-token; log in again"
        )
    identity, issuer, refresh_token = (settings[key] for key in _TO_RENEW)
    if not issuer.startswith("https://"):
        raise ValueError(f"its idp-issuer-url must begin with https://, not {issuer!r}")
    try:
        from kubernetes.aio.config.config_exception import ConfigException
        from kubernetes.aio.config.openid import OpenIDRequestor
    except ModuleNotFoundError:
        raise ValueError(
            "its user's OIDC token (`auth-provider`) must be renewed, and only the Python package kubernetes "
            "does that, which is not installed here (kvplace's images leave it out): let kubectl renew it, "
            "or use a kubeconfig with a token or a client certificate"
        ) from None
    import aiohttp

    authority = {key.removeprefix("idp-"): settings[key] for key in (_CA, f"{_CA}-data") if key in settings}
    try:
        trusted = trusting(authority)
    except (ssl.SSLError, ValueError) as error:
        raise ValueError(f"the CA of its issuer ({_CA}) cannot be used: {error}") from None
    requests = OpenIDRequestor(identity, settings.get("client-secret", ""), issuer, trusted)
    try:
        async with asyncio.timeout(_RENEWAL_S):
            answer = await requests.refresh_token(refresh_token)
        if isinstance(answer, dict) and isinstance(token := answer.get("id_token"), str) and token:
            if answer.get("refresh_token", refresh_token) != refresh_token:
                log.warning("%s has replaced the refresh token; log in again when its token expires", issuer)
            return token
        reason = "its answer has no id_token"
    except TimeoutError:
        reason = f"no answer within {_RENEWAL_S:g} s"
    except KeyError as error:
        reason = f"its answer has no {error}"
    except (ConfigException, aiohttp.ClientError, OSError, ValueError, TypeError) as error:
        reason = str(error) or type(error).__name__
    raise ValueError(
        f"{issuer} does not renew its token: {reason}; log in again, or check idp-issuer-url and {_CA}"
    )
