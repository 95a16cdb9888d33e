"""Documents that people write in YAML or JSON: read within limits, checked by models with a JSON Schema.

Here are all of them by name. A model is imported when its document is asked for: pydantic is slow to load.
"""

from __future__ import annotations

from typing import Any

from kvplace.core.strict_json import known_keys

SCHEMA_NAMES = ("cluster", "request", "requests", "rollout", "scenario", "serve")


def schema_of(name: str) -> dict[str, Any]:
    """Give the JSON Schema of a document; raises BadBody for an unknown name."""
    return _schema_and_example(name)[0]


def example_of(name: str) -> str:
    """Give an example of a document, which its command accepts; raises BadBody for an unknown name."""
    return _schema_and_example(name)[1]


def _schema_and_example(name: str) -> tuple[dict[str, Any], str]:
    from kvplace.documents import cluster, request, rollout, serve
    from kvplace.documents.model import json_schema

    known_keys({name: None}, SCHEMA_NAMES)
    match name:
        case "cluster":
            return json_schema(cluster.ClusterDocument), cluster.CLUSTER_EXAMPLE
        case "request":
            return request.request_schema(), request.REQUEST_EXAMPLE
        case "requests":
            return json_schema(request.RequestsDocument), request.REQUESTS_EXAMPLE
        case "rollout":
            return json_schema(rollout.RolloutDocument), rollout.ROLLOUT_EXAMPLE
        case "scenario":
            return json_schema(cluster.ScenarioDocument), cluster.SCENARIO_EXAMPLE
        case _:
            return json_schema(serve.ServeDocument), serve.SERVE_EXAMPLE
