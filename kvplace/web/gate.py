"""The right to the map: by the cluster's own RBAC, every user who may list the ledgers has it.

A ledger names the pods and VMs of all namespaces, and the map shows what ledgers show. So the right on them
is the right to the map, and a user with less sees nothing of it: a map of one namespace would still show
where others run. There are no users, roles or passwords of its own. The API server is asked for the user of a
token and what its owner may do, and both again after a minute.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvplace.kube.reviews import Person, Right
from kvplace.web.remembered import Remembered

LOOK = Right("list", "kvplace.io", "nodeledgers")
"""What a viewer must be allowed; the roles kvplace-viewer and `view` have it."""
AUDIENCE = "kvplace.io/map"
"""A token for this audience opens the map and is worth nothing to the API server."""

_REFUSAL_HOLDS_S = 5.0


class ReviewClient(Protocol):
    """The cluster calls of the gate."""

    async def review_token(self, token: str, audiences: Sequence[str] = ()) -> Person | None:
        """Ask for the user of a token, for some audiences or the API server; None if it has none."""
        ...

    async def review_access(self, person: Person, right: Right) -> bool:
        """Ask whether a user has a right in the whole cluster."""
        ...


@dataclass(frozen=True, slots=True)
class _Identity:
    """A person by all that RBAC decides by, as the key of what is remembered of him."""

    name: str
    uid: str
    groups: tuple[str, ...]
    extra: tuple[tuple[str, tuple[str, ...]], ...]

    @classmethod
    def of(cls, person: Person) -> _Identity:
        return cls(person.name, person.uid, person.groups, tuple(sorted(person.extra.items())))


class Gate:
    """Knows users by their tokens, and which of them may read the map."""

    def __init__(self, cluster: ReviewClient, holds_s: float = 60.0) -> None:
        """`holds_s` is how long a yes holds; a no holds for some seconds."""

        def seconds(answer: object) -> float:
            return holds_s if answer else min(holds_s, _REFUSAL_HOLDS_S)

        self._cluster = cluster
        self._people: Remembered[bytes, Person | None] = Remembered(seconds)
        self._rights: Remembered[_Identity, bool] = Remembered(seconds)

    async def person_of(self, token: str) -> Person | None:
        """Return the user of a token; None if it has none. Tokens are not kept, only their digests."""

        async def ask() -> Person | None:
            for audiences in ((AUDIENCE,), ()):
                person = await self._cluster.review_token(token, audiences)
                if person is not None:
                    return person
            return None

        return await self._people.get(hashlib.sha256(token.encode()).digest(), ask)

    async def may_look(self, person: Person) -> bool:
        """Return whether a person may see the map."""
        return await self._rights.get(_Identity.of(person), lambda: self._cluster.review_access(person, LOOK))
