"""Parts that objects of the API have in common, as JSON spells them; each kind names the fields that matter.

A full pod or node has hundreds of fields. msgspec skips each field that a class here does not name.
"""

from __future__ import annotations

import msgspec

from kvplace.kube.object_records import Condition

ABSENT = msgspec.Raw(b"")
"""A field that an object does not have."""


class ApiObject(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Base of everything here: keys in camelCase, and not tracked by the garbage collector."""


class Metadata(ApiObject, frozen=True):
    """The metadata of an object; `objects` has that of pods, nodes and our own kinds, which caches hold."""

    name: str = ""
    namespace: str = ""
    labels: dict[str, str] | None = None
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None


class ConditionObject(ApiObject, frozen=True):
    """An entry of `status.conditions`."""

    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""

    @property
    def record(self) -> Condition:
        """The condition as records have it."""
        return Condition.read(self.type, self.status, self.reason, self.message)
