"""The JSON Schemas that `kvplace schema` prints agree with what kvplace reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvplace.core.errors import BadBody
from kvplace.core.request_json import REQUEST_KEYS, read_strict_request
from kvplace.documents import SCHEMA_NAMES, example_of, schema_of
from kvplace.documents.cluster import ClusterDocument, ScenarioDocument
from kvplace.documents.model import DocumentModel, read_model
from kvplace.documents.reading import read_document
from kvplace.documents.request import RequestsDocument
from kvplace.documents.rollout import RolloutDocument
from kvplace.documents.serve import ServeDocument
from tests.json_schema import violations

REQUEST: dict[str, Any] = {
    "vcpus": 2, "cpuSet": "one-l3", "policy": "share", "smt": "prefer", "emulatorThreads": "isolate",
    "numaMemory": "off", "guestNuma": "off", "onFailure": "float", "memory": "4Gi", "hugepages": {"1Gi": 2},
    "ioThreads": 1, "deviceNuma": "socket", "devices": {"intel.com/vf": 1},
}  # fmt: skip
NODES: list[Any] = [
    {
        "name": "a", "count": 2, "machine": "epyc-7502p", "topologyPolicy": "single-numa-node",
        "devices": [{"resource": "intel.com/vf", "numaNode": 0, "count": 8}],
    },
    {"name": "b", "topology": "b.json", "running": [{"id": "vm", "request": REQUEST, "cpus": "2-3"}]},
]  # fmt: skip
SCENARIO: dict[str, Any] = {
    "nodes": NODES, "mix": [{"share": 2.5, "request": REQUEST}], "requests": 10, "load": 0.5,
    "strategies": ["pack", "spread"], "seeds": [1, -2], "moves": 1,
}  # fmt: skip
TRACE: dict[str, Any] = {
    "nodes": NODES,
    "vms": [{"id": "vm", "request": REQUEST, "arrives": 1, "lifetime": 0.5, "count": 3}],
}
EXPRESSION = {"key": "zone", "operator": "In", "values": ["a"]}
TERMS = {"nodeSelectorTerms": [{"matchExpressions": [EXPRESSION], "matchFields": [EXPRESSION]}]}
DEMANDS: dict[str, Any] = {
    "nodeSelector": {"zone": "a"},
    "tolerations": [{"key": "dedicated", "operator": "Equal", "value": "db", "effect": "NoSchedule"}],
    "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": TERMS}},
}
REQUESTS: dict[str, Any] = {"requests": [{"id": "vm", "count": 2} | DEMANDS | REQUEST]}
SERVE: dict[str, Any] = {
    "kubeconfig": "/k", "tlsCert": "/c", "tlsKey": "/y", "clientCa": "/a", "sidecarImage": "hook:1",
    "sidecar": "plugin", "clientNames": ["one"], "admissionClientCa": "/b", "admissionClientNames": ["two"],
    "admissionClientNamespaces": ["three"],
    "schedulerName": "one", "otherSchedulers": ["two", "three"], "kubevirtController": "four",
    "strategy": "spread", "mode": "advise", "nominateFromNodes": 1000, "makeRoom": "automatic",
    "extenderAddress": "[::]:1", "admissionAddress": "0.0.0.0:2", "healthAddress": "0.0.0.0:3",
    "logLevel": "debug",
}  # fmt: skip
ROLLOUT: dict[str, Any] = {
    "name": "shop", "namespace": "test", "waves": [1, "10%"], "maxInFlight": 20, "maxFailures": 3,
    "until": "running", "timeout": "15m",
    "vms": [
        {"name": "web", "count": 3, "template": "web.yaml"},
        {"names": ["a", "b"], "template": {"kind": "VirtualMachine"}},
    ],
}  # fmt: skip
WHOLE: list[tuple[str, type[DocumentModel], dict[str, Any]]] = [
    ("cluster", ClusterDocument, {"nodes": NODES}),
    ("scenario", ScenarioDocument, SCENARIO),
    ("scenario", ScenarioDocument, TRACE),
    ("requests", RequestsDocument, REQUESTS),
    ("serve", ServeDocument, SERVE),
    ("rollout", RolloutDocument, ROLLOUT),
    ("rollout", RolloutDocument, read_document(example_of("rollout"), "the example")),
]


@pytest.mark.parametrize(("name", "model", "document"), WHOLE)
def test_a_document_with_every_key_is_valid_by_the_reader_and_by_its_schema(
    name: str, model: type[DocumentModel], document: dict[str, Any]
) -> None:
    read_model(model, document, "")
    assert list(violations(document, schema_of(name))) == []


def test_every_property_of_a_schema_is_in_one_of_the_whole_documents() -> None:
    for name in {name for name, _, _ in WHOLE}:
        schema = schema_of(name)
        parts = [schema, *schema.get("$defs", {}).values()]
        known = {key for part in parts for key in part.get("properties", ())}
        text = json.dumps([document for other, _, document in WHOLE if other == name])
        assert [key for key in known if f'"{key}":' not in text] == []


def changed(value: Any) -> Iterator[Any]:
    """Yield a document with each one of its values replaced by others, or left out."""
    yield from (0, 1, -1, 1.5, 1 << 64, True, None, "", "x", "4Gi", "0-3", "any", [], {}, [1, 2], {"a": 1})
    if isinstance(value, dict):
        for key in value:
            yield {other: entry for other, entry in value.items() if other != key}
            yield from (value | {key: entry} for entry in changed(value[key]))
    elif isinstance(value, list):
        for number, entry in enumerate(value):
            yield from ([*value[:number], other, *value[number + 1 :]] for other in changed(entry))


@pytest.mark.parametrize(("name", "model", "document"), WHOLE)
def test_a_document_that_the_reader_accepts_is_valid_by_the_schema(
    name: str, model: type[DocumentModel], document: dict[str, Any]
) -> None:
    schema, accepted = schema_of(name), 0
    for other in changed(document):
        try:
            read_model(model, other, "")
        except BadBody:
            continue
        accepted += 1
        assert list(violations(other, schema)) == []
    assert accepted > 25


def test_the_schema_of_a_request_has_its_keys_words_and_bounds() -> None:
    schema = schema_of("request")
    assert set(schema["properties"]) == set(REQUEST_KEYS)
    for key, rules in schema["properties"].items():
        for word in rules.get("enum", ()):
            assert read_strict_request({"vcpus": 2, key: word}) is not None
        if "maximum" in rules:
            assert read_strict_request({"vcpus": 2} | {key: rules["maximum"]}) is not None
            with pytest.raises(BadBody):
                read_strict_request({"vcpus": 2} | {key: rules["maximum"] + 1})


@pytest.mark.parametrize("name", SCHEMA_NAMES)
def test_every_example_satisfies_its_schema(name: str) -> None:
    assert list(violations(read_document(example_of(name), name), schema_of(name))) == []


def test_every_schema_forbids_unknown_keys_and_offers_no_null() -> None:
    for name in SCHEMA_NAMES:
        schema = schema_of(name)
        assert "null" not in json.dumps(schema)
        for part in [schema, *schema.get("$defs", {}).values()]:
            assert "enum" in part or part["additionalProperties"] is False


def test_an_unknown_schema_is_refused_with_a_suggestion() -> None:
    with pytest.raises(BadBody, match="'scenari' is not known; did you mean 'scenario'"):
        schema_of("scenari")
