"""The user of a request, from an authenticating proxy, a bearer token, or the cookie of a session.

A listener has one way in. Behind a proxy only the proxy can connect, by its certificate, and its headers
state who is asking, in the form that Kubernetes itself uses (`X-Remote-User`). Without one these headers are
ignored, and people bring a token: in the `Authorization` header, or once, in the form of `login`.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from aiohttp import web

from kvplace.kube.reviews import Person
from kvplace.web.gate import LOOK, Gate
from kvplace.web.metrics import REFUSED
from kvplace.web.sessions import Session, Sessions

COOKIE = "__Host-kvplace"
"""Browsers take this prefix over TLS only, for this host only, and for all of its paths."""
MAX_TOKEN = 16 << 10
_USER, _UID, _GROUP, _EXTRA = "X-Remote-User", "X-Remote-Uid", "X-Remote-Group", "x-remote-extra-"


class TurnedAway(Exception):
    """A user without the right to the map, or an unknown one."""

    def __init__(self, status: int, sentence: str) -> None:
        """`status` is 401 where signing in may help, else 403."""
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True, slots=True)
class Viewer:
    """A user with the right to the map."""

    person: Person
    session: Session | None = None
    """The session that the request came with, if any."""


class Visitors:
    """Decides about every request."""

    def __init__(self, gate: Gate, sessions: Sessions | None) -> None:
        """Without `sessions` a proxy states who is asking."""
        self._gate = gate
        self._sessions = sessions

    @property
    def sign_in(self) -> bool:
        """Whether people sign in here."""
        return self._sessions is not None

    async def viewer_of(self, request: web.Request) -> Viewer:
        """Return the user of a request; raises TurnedAway for a user without the right to the map."""
        viewer = await self._known(request)
        await self._check(viewer.person)
        return viewer

    async def still_may(self, viewer: Viewer) -> bool:
        """Return whether a user still has the right to the map, for pages that stay open."""
        if viewer.session is not None and self.seconds_left(viewer.session) <= 0:
            return False
        return await self._gate.may_look(viewer.person)

    async def sign_in_with(self, token: str) -> tuple[Session, str]:
        """Begin a session for the owner of a token; returns it and its cookie.

        Raises TurnedAway for a user without the right to the map.
        """
        assert self._sessions is not None
        person = await self._owner(token)
        await self._check(person)
        return self._sessions.open(person, token)

    def seconds_left(self, session: Session) -> float:
        assert self._sessions is not None
        return self._sessions.seconds_left(session)

    async def _known(self, request: web.Request) -> Viewer:
        if self._sessions is None:
            return Viewer(_of_proxy(request))
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        if kind:
            if kind.lower() != "bearer":
                raise _unauthenticated(
                    f"the Authorization header is of type {kind[:20]!r}; send `Bearer TOKEN`"
                )
            return Viewer(await self._owner(token.strip()))
        cookie = request.cookies.get(COOKIE)
        if cookie is None:
            raise _unauthenticated("sign in first")
        session = self._sessions.read(cookie)
        if session is None:
            raise _unauthenticated("the session has ended; sign in again")
        return Viewer(session.person, session)

    async def _owner(self, token: str) -> Person:
        if not token:
            raise _unauthenticated("the token is empty")
        if len(token) > MAX_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
            raise _unauthenticated(
                "this is not a token: paste one line, such as `kubectl create token` prints"
            )
        person = await self._gate.person_of(token)
        if person is None:
            raise _unauthenticated(
                "the cluster does not accept this token; it has ended, or is another cluster's"
            )
        return person

    async def _check(self, person: Person) -> None:
        if not await self._gate.may_look(person):
            REFUSED.labels("forbidden").inc()
            raise TurnedAway(
                403,
                f"{person.name} may not {LOOK.verb} {LOOK.resource} in this cluster, which the map needs; "
                "an administrator can grant it with the ClusterRole kvplace-viewer",
            )


def is_from_elsewhere(request: web.Request) -> bool:
    """Return whether a browser sends a form on behalf of another site."""
    site = request.headers.get("Sec-Fetch-Site")
    if site is not None:
        return site not in ("same-origin", "none")
    origin = request.headers.get("Origin")
    return origin is not None and urlsplit(origin).netloc != request.host


def _of_proxy(request: web.Request) -> Person:
    name = request.headers.get(_USER, "")
    if not name:
        raise _unauthenticated(f"the proxy does not name the user: the header {_USER} is missing")
    extra: dict[str, tuple[str, ...]] = {}
    for header in set(request.headers):
        if header.lower().startswith(_EXTRA):
            key = unquote(header[len(_EXTRA) :]).lower()
            extra[key] = tuple(request.headers.getall(header))
    return Person(name, request.headers.get(_UID, ""), tuple(request.headers.getall(_GROUP, [])), extra)


def _unauthenticated(sentence: str) -> TurnedAway:
    REFUSED.labels("unauthenticated").inc()
    return TurnedAway(401, sentence)
