"""Edits of a JSON document, written down as the JSON Patch (RFC 6902) that makes them.

Admission answers with a patch. The code that changes a document knows the change; finding that out again by
comparing two whole documents cost a quarter of an admission. The given document stays as it is: the objects
on the way to an edit are copied, the others are shared.

An edit inside a value that the patch adds changes that value, and needs no operation of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Operation = dict[str, Any]

_APPLIED_BY_KUBECTL = "kubectl.kubernetes.io/last-applied-configuration"


@dataclass(frozen=True, slots=True)
class Admitted:
    """An object as it is to be stored, and warnings for its author."""

    object: Mapping[str, Any]
    warnings: tuple[str, ...] = ()
    patch: Sequence[Operation] = ()
    """The JSON Patch that makes `object` of the object under review; empty when nothing changes."""


class _Edited:
    """The common part of objects and lists under edit."""

    def __init__(self, path: str, patch: list[Operation] | None) -> None:
        self._path = path
        self._patch = patch
        """Where operations are written; None inside a value that is in the patch already."""
        self._inner: dict[str | int, EditedObject | EditedList] = {}

    def _write(self, operation: str, key: str | int, value: Any = None) -> None:
        if self._patch is None:
            return
        written: Operation = {"op": operation, "path": self._at(key)}
        if operation != "remove":
            written["value"] = value
        self._patch.append(written)

    def _at(self, key: str | int) -> str:
        return f"{self._path}/{str(key).replace('~', '~0').replace('/', '~1')}"


class EditedObject(_Edited):
    """A JSON object under edit."""

    def __init__(self, values: dict[str, Any], path: str, patch: list[Operation] | None) -> None:
        """Edit `values` in place; begin with `edited`."""
        super().__init__(path, patch)
        self.values = values

    @classmethod
    def apart(cls, values: Mapping[str, Any]) -> EditedObject:
        """Begin to edit an object that is in no document yet, so that nothing is written down."""
        return cls(dict(values), "", None)

    def get(self, key: str) -> Any:
        """Return the value of a field as it is now; None when there is none."""
        return self.values.get(key)

    def put(self, key: str, value: Any) -> None:
        """Set a field; nothing is written down when it has this value already."""
        present = key in self.values
        if present and _equal(self.values[key], value):
            return
        self.values[key] = value
        self._inner.pop(key, None)
        self._write("replace" if present else "add", key, value)

    def drop(self, key: str) -> None:
        """Remove a field if it is there."""
        if key in self.values:
            del self.values[key]
            self._inner.pop(key, None)
            self._write("remove", key)

    def object(self, key: str) -> EditedObject:
        """Edit the object at a field, created when it is missing or null."""
        inner = self._inner.get(key)
        if not isinstance(inner, EditedObject):
            created = self.values.get(key) is None
            if created:
                self.put(key, {})
            else:
                self.values[key] = dict(self.values[key])
            patch = None if created else self._patch
            inner = self._inner[key] = EditedObject(self.values[key], self._at(key), patch)
        return inner

    def list(self, key: str) -> EditedList:
        """Edit the list at a field, created when it is missing or null."""
        inner = self._inner.get(key)
        if not isinstance(inner, EditedList):
            created = self.values.get(key) is None
            if created:
                self.put(key, [])
            else:
                self.values[key] = [*self.values[key]]
            patch = None if created else self._patch
            inner = self._inner[key] = EditedList(self.values[key], self._at(key), patch)
        return inner


class EditedList(_Edited):
    """A JSON list under edit."""

    def __init__(self, values: list[Any], path: str, patch: list[Operation] | None) -> None:
        """Edit `values` in place; begin with `edited`."""
        super().__init__(path, patch)
        self.values = values

    def append(self, value: Any) -> None:
        """Add an entry at the end."""
        self.values.append(value)
        self._write("add", "-", value)

    def replace(self, index: int, value: Any) -> None:
        """Put another entry in the place of one."""
        if not _equal(self.values[index], value):
            self.values[index] = value
            self._inner.pop(index, None)
            self._write("replace", index, value)

    def remove(self, index: int) -> Any:
        """Take an entry out of the list and return it; ask anew for the objects at the other indices."""
        removed = self.values.pop(index)
        self._inner.clear()
        self._write("remove", index)
        return removed

    def object(self, index: int) -> EditedObject:
        """Edit the object at an index."""
        inner = self._inner.get(index)
        if not isinstance(inner, EditedObject):
            self.values[index] = dict(self.values[index])
            inner = self._inner[index] = EditedObject(self.values[index], self._at(index), self._patch)
        return inner


def edited(document: Mapping[str, Any], patch: list[Operation]) -> EditedObject:
    """Begin to edit a document; the operations go to the end of `patch`."""
    return EditedObject(dict(document), "", patch)


def _equal(one: Any, other: Any) -> bool:
    """Whether two values are the same JSON; 1, 1.0 and true are equal in Python only."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def drop_managed_fields(metadata: EditedObject) -> None:
    """Remove the record from a new object, unless a user has applied that object."""
    entries = metadata.get("managedFields")
    if not isinstance(entries, list) or _APPLIED_BY_KUBECTL in (metadata.get("annotations") or {}):
        return
    if all(isinstance(entry, dict) and entry.get("operation") == "Update" for entry in entries):
        metadata.drop("managedFields")
