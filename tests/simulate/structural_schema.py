"""Checks a document against the structural schema of a CRD, strictly: a field that is pruned is an error.

Covers what KubeVirt's CRDs use: types, properties, required, items, additional properties, enumerations,
patterns, int-or-string, nullable and preserved unknown fields.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
}


def violations(value: Any, schema: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield a sentence for each place where the document is not what the schema says."""
    if value is None:
        if not schema.get("nullable"):
            yield f"{path} is null"
        return
    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(value, bool) or not isinstance(value, int | str):
            yield f"{path} is {value!r}, neither a number nor a text"
        elif isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
            yield f"{path} is {value!r}, which does not match {schema['pattern']}"
        return
    kind = schema.get("type", "object")
    if not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean"):
        yield f"{path} is {value!r}, not {kind}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path} is {value!r}, not one of {schema['enum']}"
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        yield f"{path} is {value!r}, which does not match {schema['pattern']}"
    if isinstance(value, dict):
        yield from _object(value, schema, path)
    if isinstance(value, list):
        for index, entry in enumerate(value):
            yield from violations(entry, schema["items"], f"{path}[{index}]")


def _object(value: dict[str, Any], schema: Mapping[str, Any], path: str) -> Iterator[str]:
    properties = schema.get("properties", {})
    for key in schema.get("required", []):
        if key not in value:
            yield f"{path}.{key} is missing"
    for key, entry in value.items():
        if (path, key) == ("", "metadata"):
            continue  # known to every API server, whatever the schema says
        if key in properties:
            yield from violations(entry, properties[key], f"{path}.{key}")
        elif isinstance(schema.get("additionalProperties"), dict):
            yield from violations(entry, schema["additionalProperties"], f"{path}.{key}")
        elif not (path == "" and key == "metadata") and not schema.get(
            "x-kubernetes-preserve-unknown-fields"
        ):
            yield f"{path}.{key} is not known to the schema"
