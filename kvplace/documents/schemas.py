"""The JSON Schemas of all documents that people write, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kvplace.core.strict_json import known_keys
from kvplace.documents.cluster import ClusterDocument
from kvplace.documents.model import json_schema
from kvplace.documents.request import request_schema
from kvplace.documents.requests import RequestsDocument
from kvplace.documents.rollout import RolloutDocument
from kvplace.documents.scenario import ScenarioDocument
from kvplace.documents.serve import ServeDocument

_SCHEMAS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "cluster": partial(json_schema, ClusterDocument),
    "request": request_schema,
    "requests": partial(json_schema, RequestsDocument),
    "rollout": partial(json_schema, RolloutDocument),
    "scenario": partial(json_schema, ScenarioDocument),
    "serve": partial(json_schema, ServeDocument),
}

SCHEMA_NAMES = tuple(_SCHEMAS)


def schema_of(name: str) -> dict[str, Any]:
    """Give the JSON Schema of a document; raises BadBody for an unknown name."""
    known_keys({name: None}, SCHEMA_NAMES)
    return _SCHEMAS[name]()
