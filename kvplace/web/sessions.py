"""Sessions of people who signed in with a token: a signed cookie states who they are, and until when.

The token itself is checked once and kept nowhere: whoever steals the cookie can check the map, and
nothing else, until it ends. Every replica can read the cookies of the others, because all derive the key from
the private key of the certificate that they share. Rights are not in the cookie: they are asked for anew.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import math
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvplace.core.errors import Refused
from kvplace.kube.reviews import Person

LONGEST_S = 8 * 3600.0
"""A session ends with its token, and after so long at the latest."""
MAX_COOKIE = 3800
"""Browsers drop cookies above 4096 bytes, name and attributes included."""
_MAX_UNPACKED = 64 << 10
_VERSION = 1
_SECRET_HOLDS_S = 10.0


@dataclass(frozen=True, slots=True)
class Session:
    """A user who has signed in."""

    person: Person
    ends: float
    """Unix time."""


class _Content(msgspec.Struct, array_like=True):
    version: int
    ends: float
    name: str
    uid: str
    groups: list[str]
    extra: dict[str, list[str]]


_CONTENT = msgspec.json.Decoder(_Content)


class Sessions:
    """Writes and reads the cookies."""

    def __init__(self, secret: Path, clock: Callable[[], float] = time.time) -> None:
        """`secret` is a file that the replicas share and no other client has; `clock` gives Unix time."""
        self._secret = secret
        self._clock = clock
        self._key, self._read_at = b"", float("-inf")

    def open(self, person: Person, token: str) -> tuple[Session, str]:
        """Begin a session for the owner of a token; returns it and its cookie.

        Raises Refused for a user with more groups than fit into a cookie.
        """
        session = Session(person, min(token_end(token), self._clock() + LONGEST_S))
        extra = {key: list(values) for key, values in person.extra.items()}
        content = _Content(_VERSION, session.ends, person.name, person.uid, list(person.groups), extra)
        packed = zlib.compress(msgspec.json.encode(content), 9)
        cookie = _text(packed) + "." + _text(self._sign(packed))
        if len(cookie) > MAX_COOKIE:
            raise Refused(
                f"{person.name} is in so many groups ({len(person.groups)}) that they do not fit into a "
                "cookie; use the token of a service account, or an authenticating proxy"
            )
        return session, cookie

    def read(self, cookie: str) -> Session | None:
        """Return the session of a cookie; None if it has ended, or was not written by this installation."""
        packed_text, _, signature = cookie.partition(".")
        try:
            packed = _bytes(packed_text)
            if not hmac.compare_digest(self._sign(packed), _bytes(signature)):
                return None
            content = _CONTENT.decode(zlib.decompressobj().decompress(packed, _MAX_UNPACKED))
        except (ValueError, zlib.error, msgspec.MsgspecError):
            return None
        if content.version != _VERSION or content.ends <= self._clock():
            return None
        extra = {key: tuple(values) for key, values in content.extra.items()}
        return Session(Person(content.name, content.uid, tuple(content.groups), extra), content.ends)

    def seconds_left(self, session: Session) -> float:
        return session.ends - self._clock()

    def _sign(self, packed: bytes) -> bytes:
        # The certificate may be renewed while we run; other replicas then sign with its new key, too.
        if self._clock() - self._read_at >= _SECRET_HOLDS_S:
            self._key = hmac.digest(self._secret.read_bytes(), b"kvplace web session 1", hashlib.sha256)
            self._read_at = self._clock()
        return hmac.digest(self._key, packed, hashlib.sha256)


def token_end(token: str) -> float:
    """Read when a JWT ends, which the API server has verified by now; infinity for other tokens."""
    parts = token.split(".")
    if len(parts) != 3:
        return float("inf")
    try:
        claims: Any = json.loads(_bytes(parts[1]))
        end = float(claims["exp"])
        return end if math.isfinite(end) else float("inf")
    except (ValueError, KeyError, TypeError, RecursionError):
        return float("inf")


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode("ascii")


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None
