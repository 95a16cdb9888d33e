"""All documents that people write, by name: the JSON Schema of each, and an example."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from kvplace.core.strict_json import known_keys
from kvplace.documents.cluster import CLUSTER_EXAMPLE, SCENARIO_EXAMPLE, ClusterDocument, ScenarioDocument
from kvplace.documents.model import json_schema
from kvplace.documents.request import REQUEST_EXAMPLE, REQUESTS_EXAMPLE, RequestsDocument, request_schema
from kvplace.documents.rollout import ROLLOUT_EXAMPLE, RolloutDocument
from kvplace.documents.serve import SERVE_EXAMPLE, ServeDocument

_Schema: TypeAlias = Callable[[], dict[str, Any]]

_DOCUMENTS: Mapping[str, tuple[_Schema, str]] = {
    "cluster": (partial(json_schema, ClusterDocument), CLUSTER_EXAMPLE),
    "request": (request_schema, REQUEST_EXAMPLE),
    "requests": (partial(json_schema, RequestsDocument), REQUESTS_EXAMPLE),
    "rollout": (partial(json_schema, RolloutDocument), ROLLOUT_EXAMPLE),
    "scenario": (partial(json_schema, ScenarioDocument), SCENARIO_EXAMPLE),
    "serve": (partial(json_schema, ServeDocument), SERVE_EXAMPLE),
}

SCHEMA_NAMES = tuple(_DOCUMENTS)


def schema_of(name: str) -> dict[str, Any]:
    """Give the JSON Schema of a document; raises BadBody for an unknown name."""
    return _document(name)[0]()


def example_of(name: str) -> str:
    """Give an example of a document, which its command accepts; raises BadBody for an unknown name."""
    return _document(name)[1]


def _document(name: str) -> tuple[_Schema, str]:
    known_keys({name: None}, SCHEMA_NAMES)
    return _DOCUMENTS[name]
