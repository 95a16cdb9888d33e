"""The clients that may call a listener, by the names in their verified certificates.

A client certificate of the right CA is not enough where that CA signs for others, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from typing import Any

_log = logging.getLogger(__name__)


def may_call(transport: asyncio.Transport, allowed: Collection[str], listener: str) -> bool:
    """Return whether the client of a connection has one of the allowed names; without any, all have.

    Its certificate must have been verified in this handshake, not in that of a session which it resumes.
    """
    if not allowed:
        return True
    tls = transport.get_extra_info("ssl_object")
    if tls is not None and tls.session_reused:
        _log.warning("%s refuses a client that resumes a TLS session", listener)
        return False
    names = names_of(tls.getpeercert()) if tls is not None else frozenset()
    if names.isdisjoint(allowed):
        _log.warning(
            "%s refuses a client with the certificate of %s; only %s may call it",
            listener,
            ", ".join(sorted(names)) or "nobody",
            ", ".join(sorted(allowed)),
        )
        return False
    return True


def names_of(certificate: Mapping[str, Any] | None) -> frozenset[str]:
    """List the names in a verified certificate: common name, DNS names, and URIs, as SPIFFE uses them."""
    if not certificate:
        return frozenset()
    common = {value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"}
    others = {value for kind, value in certificate.get("subjectAltName", ()) if kind in ("DNS", "URI")}
    return frozenset(common | others)
