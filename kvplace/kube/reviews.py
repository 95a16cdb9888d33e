"""Asking the API server who a person is and what this person may do: TokenReview and SubjectAccessReview.

kvplace keeps no users and no roles of its own. The cluster's authentication and RBAC decide, at the time of
each question.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvplace.kube.api_errors import decoded
from kvplace.kube.session import Call, path_of


@dataclass(frozen=True, slots=True)
class Person:
    """A user as the cluster knows it: all that RBAC decides by."""

    name: str
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Right:
    """A verb on all objects of a kind, in the words of RBAC."""

    verb: str
    group: str
    resource: str

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}.{self.group}"


class _User(msgspec.Struct):
    username: str = ""
    uid: str = ""
    groups: list[str] | None = None
    extra: dict[str, list[str]] | None = None


class _TokenStatus(msgspec.Struct):
    authenticated: bool = False
    user: _User = msgspec.field(default_factory=_User)
    audiences: list[str] | None = None


class _TokenReview(msgspec.Struct):
    status: _TokenStatus = msgspec.field(default_factory=_TokenStatus)


class _AccessStatus(msgspec.Struct):
    allowed: bool = False


class _AccessReview(msgspec.Struct):
    status: _AccessStatus = msgspec.field(default_factory=_AccessStatus)


_TOKEN_REVIEW = msgspec.json.Decoder(_TokenReview)
_ACCESS_REVIEW = msgspec.json.Decoder(_AccessReview)


def token_review(token: str, audiences: Sequence[str]) -> Call:
    """Ask for the user of a token; without `audiences` it must be one for the API server itself."""
    spec: dict[str, Any] = {"token": token}
    if audiences:
        spec["audiences"] = list(audiences)
    return _review("authentication.k8s.io", "TokenReview", spec)


def read_token_review(body: bytes, audiences: Sequence[str]) -> Person | None:
    """Read the user of a token; None if it has none, or for none of the `audiences` that were asked for.

    An authenticator that does not know of audiences answers without any.
    """
    status = decoded(_TOKEN_REVIEW, body, "tokenreviews").status
    if not status.authenticated or not status.user.username:
        return None
    if audiences and not set(audiences) & set(status.audiences or ()):
        return None
    user = status.user
    return Person(
        user.username,
        user.uid,
        tuple(user.groups or ()),
        {key: tuple(values) for key, values in (user.extra or {}).items()},
    )


def access_review(person: Person, right: Right) -> Call:
    """Ask whether a user has a right in the whole cluster."""
    spec = {
        "user": person.name,
        "uid": person.uid,
        "groups": list(person.groups),
        "extra": {key: list(values) for key, values in person.extra.items()},
        "resourceAttributes": {"verb": right.verb, "group": right.group, "resource": right.resource},
    }
    return _review("authorization.k8s.io", "SubjectAccessReview", spec)


def read_access_review(body: bytes) -> bool:
    """Read whether it was allowed."""
    return decoded(_ACCESS_REVIEW, body, "subjectaccessreviews").status.allowed


def _review(group: str, kind: str, spec: Mapping[str, Any]) -> Call:
    resource = f"{kind.lower()}s"
    return Call(
        "create",
        f"{resource}.{group}",
        path_of("apis", group, "v1", resource),
        body=msgspec.json.encode({"apiVersion": f"{group}/v1", "kind": kind, "spec": spec}),
    )
