"""When certificates end, read from their PEM files.

OpenSSL shows Python only certificates that it has verified. The few fields before the validity of an
X.509 certificate are skipped by their lengths (RFC 5280, 4.1).
"""

from __future__ import annotations

import base64
import re
from datetime import UTC, datetime

_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", re.DOTALL)
_VERSION, _UTC_TIME, _GENERALIZED_TIME = 0xA0, 0x17, 0x18


def certificate_end(pem: bytes) -> datetime | None:
    """Return when the first of the certificates in a file ends; None if none can be read."""
    return min(certificate_ends(pem), default=None)


def certificate_ends(pem: bytes) -> tuple[datetime, ...]:
    """Return when each of the certificates in a file ends that can be read."""
    return tuple(end for found in _PEM.findall(pem) if (end := _end_of(found)) is not None)


def _end_of(text: bytes) -> datetime | None:
    try:
        _, certificate, _ = _field(base64.b64decode(text))
        _, fields, _ = _field(certificate)
        if fields[0] == _VERSION:
            _, _, fields = _field(fields)
        for _ in ("serial number", "signature", "issuer"):
            _, _, fields = _field(fields)
        _, validity, _ = _field(fields)
        _, _, validity = _field(validity)
        kind, moment, _ = _field(validity)
        form = {_UTC_TIME: "%y%m%d%H%M%SZ", _GENERALIZED_TIME: "%Y%m%d%H%M%SZ"}[kind]
        return datetime.strptime(moment.decode("ascii"), form).replace(tzinfo=UTC)
    except (IndexError, KeyError, ValueError):
        return None


def _field(der: bytes) -> tuple[int, bytes, bytes]:
    """Split DER into the tag and the content of its first field, and what follows it."""
    length, start = der[1], 2
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(der[2:start], "big")
    if start + length > len(der):
        raise ValueError("a field is cut off")
    return der[0], der[start : start + length], der[start + length :]
