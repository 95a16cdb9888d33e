"""A misspelt key or word in any document gets an error that names it and suggests the right one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvplace.core.errors import BadBody
from kvplace.core.request_json import read_strict_request
from kvplace.documents import SCHEMA_NAMES, example_of
from kvplace.documents.cluster import ClusterDocument, ScenarioDocument
from kvplace.documents.model import DocumentModel, read_model
from kvplace.documents.reading import read_document
from kvplace.documents.request import RequestsDocument
from kvplace.documents.rollout import RolloutDocument
from kvplace.documents.serve import ServeDocument

MODELS: dict[str, type[DocumentModel]] = {
    "cluster": ClusterDocument,
    "requests": RequestsDocument,
    "rollout": RolloutDocument,
    "scenario": ScenarioDocument,
    "serve": ServeDocument,
}
FREE = ("template", "hugepages")
"""Keys whose values have keys of their own that are not ours."""
WORDS = {"one-numa", "one-l3", "require", "isolate", "any", "spread", "balance", "decide"}


def reader(name: str) -> Callable[[Any], object]:
    return (
        read_strict_request
        if name == "request"
        else lambda document: read_model(MODELS[name], document, name)
    )


def paths(value: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of every value in a document."""
    listed = enumerate(value) if isinstance(value, list) else ()
    for key, entry in value.items() if isinstance(value, dict) else listed:
        yield (*at, key)
        if key not in FREE:
            yield from paths(entry, (*at, key))


def inside(document: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        document = document[key]
    return document


@pytest.mark.parametrize("name", SCHEMA_NAMES)
def test_every_misspelt_key_is_named_with_the_one_that_is_meant(name: str) -> None:
    document = read_document(example_of(name), name)
    keys = [path for path in paths(document) if isinstance(path[-1], str)]
    assert len(keys) >= 5
    for *above, key in keys:
        changed = copy.deepcopy(document)
        parent = inside(changed, tuple(above))
        parent[f"{key}x"] = parent.pop(key)
        with pytest.raises(BadBody) as error:
            reader(name)(changed)
        assert f"'{key}x' is not known; did you mean '{key}'?" in str(error.value)


@pytest.mark.parametrize("name", ["request", "requests", "scenario", "serve"])
def test_every_misspelt_word_is_named_with_the_one_that_is_meant(name: str) -> None:
    document = read_document(example_of(name), name)
    words = [path for path in paths(document) if str(inside(document, path)) in WORDS]
    assert words
    for *above, key in words:
        changed = copy.deepcopy(document)
        parent = inside(changed, tuple(above))
        word = parent[key]
        parent[key] = word.upper().replace("-", "_")
        with pytest.raises(BadBody) as error:
            reader(name)(changed)
        assert f"did you mean '{word}'?" in str(error.value)
