"""All documents that people write, by name: the JSON Schema of each, and an example."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from kvplace.core.strict_json import known_keys
from kvplace.documents import cluster, request, requests, rollout, scenario, serve
from kvplace.documents.model import json_schema

_Schema: TypeAlias = Callable[[], dict[str, Any]]

_DOCUMENTS: Mapping[str, tuple[_Schema, str]] = {
    "cluster": (partial(json_schema, cluster.ClusterDocument), cluster.EXAMPLE),
    "request": (request.request_schema, request.EXAMPLE),
    "requests": (partial(json_schema, requests.RequestsDocument), requests.EXAMPLE),
    "rollout": (partial(json_schema, rollout.RolloutDocument), rollout.EXAMPLE),
    "scenario": (partial(json_schema, scenario.ScenarioDocument), scenario.EXAMPLE),
    "serve": (partial(json_schema, serve.ServeDocument), serve.EXAMPLE),
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
