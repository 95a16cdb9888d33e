"""The difference of two JSON documents as a JSON Patch (RFC 6902).

Admission decides on whole objects; the API server expects a patch. The package `jsonpatch` makes the same
patches in six times the time, and webhooks are called for every new pod.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Operation = dict[str, Any]


def difference(before: Any, after: Any) -> list[Operation]:
    """List the operations in the order in which they must be applied; none when both are equal.

    Entries of a list are compared by position: an appended entry becomes `add`, a missing one at the end
    becomes `remove`.
    """
    return list(_difference(before, after, ""))


def _difference(before: Any, after: Any, path: str) -> Iterator[Operation]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        yield from _of_objects(before, after, path)
    elif isinstance(before, list) and isinstance(after, list):
        yield from _of_lists(before, after, path)
    # 1, 1.0 and true are equal in Python and three values in JSON.
    elif type(before) is not type(after) or before != after:
        yield {"op": "replace", "path": path, "value": after}


def _of_objects(before: Mapping[str, Any], after: Mapping[str, Any], path: str) -> Iterator[Operation]:
    for key in before:
        if key not in after:
            yield {"op": "remove", "path": f"{path}/{_escaped(key)}"}
    for key, value in after.items():
        place = f"{path}/{_escaped(key)}"
        if key in before:
            yield from _difference(before[key], value, place)
        else:
            yield {"op": "add", "path": place, "value": value}


def _of_lists(before: list[Any], after: list[Any], path: str) -> Iterator[Operation]:
    shared = min(len(before), len(after))
    for index in range(shared):
        yield from _difference(before[index], after[index], f"{path}/{index}")
    for index in reversed(range(shared, len(before))):
        yield {"op": "remove", "path": f"{path}/{index}"}
    for value in after[shared:]:
        yield {"op": "add", "path": f"{path}/-", "value": value}


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
