"""The ResourceQuotas of a namespace: how much of what may still be created there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import msgspec

from kvplace.core.quantity import parse_quantity
from kvplace.kube.api_list_watch import Resource
from kvplace.kube.session import path_of


@dataclass(frozen=True, slots=True)
class Quota:
    """One quota without a scope: quantities by resource, for example `count/pods`."""

    name: str
    limits: Mapping[str, Fraction]
    used: Mapping[str, Fraction]

    def left(self, resource: str) -> Fraction | None:
        """Return how much is left of a resource; None where it is not limited."""
        if resource not in self.limits:
            return None
        return self.limits[resource] - self.used.get(resource, Fraction(0))


class _Meta(msgspec.Struct, frozen=True):
    name: str = ""


class _Status(msgspec.Struct, frozen=True):
    hard: dict[str, str] | None = None
    used: dict[str, str] | None = None


class _Spec(msgspec.Struct, frozen=True, rename="camel"):
    scopes: list[str] | None = None
    scope_selector: msgspec.Raw | None = None


class QuotaObject(msgspec.Struct, frozen=True):
    """A ResourceQuota."""

    metadata: _Meta
    spec: _Spec = _Spec()
    status: _Status = _Status()


def quota(stored: QuotaObject) -> Quota:
    """Read a quota; one that counts only some pods limits nothing that can be foretold."""
    if stored.spec.scopes or stored.spec.scope_selector is not None:
        return Quota(stored.metadata.name, {}, {})
    return Quota(stored.metadata.name, _quantities(stored.status.hard), _quantities(stored.status.used))


def _quantities(texts: Mapping[str, str] | None) -> dict[str, Fraction]:
    return {name: Fraction(parse_quantity(text)) for name, text in (texts or {}).items()}


QUOTA_RESOURCE = Resource.of(
    "resourcequotas", path_of("api", "v1", "resourcequotas"), msgspec.json.Decoder(QuotaObject), quota
)
