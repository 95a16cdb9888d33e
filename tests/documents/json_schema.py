"""Checks a value against a JSON Schema, as far as kvplace's schemas use the language."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
}
_BOUNDS: dict[str, Callable[[Any, Any], bool]] = {
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "minLength": lambda value, bound: len(value) >= bound,
    "maxLength": lambda value, bound: len(value) <= bound,
    "minItems": lambda value, bound: len(value) >= bound,
    "maxItems": lambda value, bound: len(value) <= bound,
    "pattern": lambda value, bound: re.search(bound, value) is not None,
}
_ANNOTATIONS = {"$schema", "$defs", "title", "description", "default", "examples"}
_KNOWN = {*_BOUNDS, *_ANNOTATIONS, "$ref", "type", "enum", "items", "properties", "required"}


def violations(value: Any, schema: Mapping[str, Any], whole: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each rule that the value breaks; fails for rules that are not known here."""
    if "$ref" in schema:
        schema = whole["$defs"][schema["$ref"].removeprefix("#/$defs/")] | {
            key: rule for key, rule in schema.items() if key != "$ref"
        }
    assert schema.keys() <= _KNOWN | {"additionalProperties"}
    types = schema.get("type", [])
    kinds = [_TYPES[name] for name in ([types] if isinstance(types, str) else types)]
    if kinds and (isinstance(value, bool) or not any(isinstance(value, kind) for kind in kinds)):
        yield f"{value!r} is not of type {types}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{value!r} is not one of {schema['enum']}"
    for rule, holds in _BOUNDS.items():
        if rule in schema and not holds(value, schema[rule]):
            yield f"{value!r} breaks {rule} {schema[rule]}"
    for entry in value if isinstance(value, list) else ():
        yield from violations(entry, schema["items"], whole)
    if isinstance(value, dict):
        yield from (f"{key} is missing" for key in schema.get("required", []) if key not in value)
        for key, entry in value.items():
            inner = schema.get("properties", {}).get(key, schema["additionalProperties"])
            if inner is False:
                yield f"{key} is not known"
            else:
                yield from violations(entry, inner, whole)
