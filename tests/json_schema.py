"""Checks a value against a JSON Schema: the schemas that kvplace prints, and the structural ones of KubeVirt.

It is strict: a field that the API server would prune is a violation, and a rule that is not known here fails.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
}
_RULES: dict[str, Callable[[Any, Any], bool]] = {
    "enum": lambda value, words: value in words,
    "pattern": lambda value, pattern: not isinstance(value, str) or bool(re.search(pattern, value)),
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "minLength": lambda value, bound: len(value) >= bound,
    "maxLength": lambda value, bound: len(value) <= bound,
    "minItems": lambda value, bound: len(value) >= bound,
    "maxItems": lambda value, bound: len(value) <= bound,
}
_WITHOUT_EFFECT = {"$schema", "$defs", "title", "description", "default", "examples", "format"}
_STRUCTURE = {"type", "nullable", "items", "properties", "required", "additionalProperties"}


def violations(
    value: Any, schema: Mapping[str, Any], path: str = "", whole: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """Yield a sentence for each rule that the value breaks."""
    whole = schema if whole is None else whole
    if "$ref" in schema:
        schema = whole["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    is_int_or_string = schema.get("x-kubernetes-int-or-string", False)
    unknown = schema.keys() - _RULES.keys() - _WITHOUT_EFFECT - _STRUCTURE
    assert {key for key in unknown if not key.startswith("x-kubernetes-")} <= (
        {"anyOf"} if is_int_or_string else set()
    )
    if value is None and schema.get("nullable"):
        return
    kinds = schema.get("type", [] if "enum" in schema else ["object"])
    if is_int_or_string:
        kinds = ["integer", "string"]
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_has_type(value, kind) for kind in kinds):
        yield f"{path} is {value!r}, not {' or '.join(kinds)}"
        return
    for rule, holds in _RULES.items():
        if rule in schema and not holds(value, schema[rule]):
            yield f"{path} is {value!r}, against {rule} {schema[rule]}"
    if isinstance(value, dict):
        yield from _object(value, schema, path, whole)
    if isinstance(value, list):
        for index, entry in enumerate(value):
            yield from violations(entry, schema["items"], f"{path}[{index}]", whole)


def _has_type(value: Any, kind: str) -> bool:
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _object(
    value: dict[str, Any], schema: Mapping[str, Any], path: str, whole: Mapping[str, Any]
) -> Iterator[str]:
    properties = schema.get("properties", {})
    others = schema.get("additionalProperties")
    for key in schema.get("required", []):
        if key not in value:
            yield f"{path}.{key} is missing"
    for key, entry in value.items():
        if (path, key) == ("", "metadata"):
            continue  # known to every API server, also without a schema
        if key in properties:
            yield from violations(entry, properties[key], f"{path}.{key}", whole)
        elif isinstance(others, dict):
            yield from violations(entry, others, f"{path}.{key}", whole)
        elif others is not True and not schema.get("x-kubernetes-preserve-unknown-fields"):
            yield f"{path}.{key} is not known to the schema"
