"""An invalid document gives one sentence: the document, the path of the key, its value, what it must be."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from kvplace.core.errors import BadBody
from kvplace.documents.cluster import ScenarioDocument
from kvplace.documents.model import DocumentModel, Text, numbered, read_model
from kvplace.documents.reading import read_document
from tests.core.invalid_input import DEEP_OR_LONG, answer_or_sentence, texts


class Part(DocumentModel):
    name: Text
    size: Annotated[int, Field(strict=True, gt=0, le=9)] = 1


class Whole(DocumentModel):
    parts: Annotated[tuple[Part, ...], Field(min_length=1, max_length=2)]
    weight: Annotated[float, Field(strict=True)] | None = None


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        (3, "d.yaml: the document is 3; it must be a mapping"),
        ({}, "d.yaml: parts is missing"),
        ({"parts": {}}, "d.yaml: parts is {}; it must be a list"),
        ({"parts": []}, "d.yaml: parts is []; it must not be empty"),
        ({"parts": [{"name": "a"}] * 3}, "; it must have at most 2 entries"),
        ({"parts": [{"nam": "a"}]}, "d.yaml: parts[0]: 'nam' is not known; did you mean 'name'?"),
        ({"parts": [{"name": "a"}], "wight": 1}, "d.yaml: 'wight' is not known; did you mean 'weight'?"),
        ({"parts": [{"name": "a"}, 5]}, "d.yaml: parts[1] is 5; it must be a mapping"),
        ({"parts": [{}]}, "d.yaml: parts[0].name is missing"),
        ({"parts": [{"name": 5}]}, "d.yaml: parts[0].name is 5; it must be a string"),
        ({"parts": [{"name": ""}]}, "d.yaml: parts[0].name is ''; it must not be empty"),
        ({"parts": [{"name": "x" * 300}]}, "...; it must have at most 256 characters"),
        (
            {"parts": [{"name": "a\nb"}]},
            "parts[0].name: 'a\\nb' has characters that cannot be printed",
        ),
        ({"parts": [{"name": "a", "size": 0}]}, "d.yaml: parts[0].size is 0; it must be greater than 0"),
        ({"parts": [{"name": "a", "size": 10}]}, "d.yaml: parts[0].size is 10; it must be at most 9"),
        ({"parts": [{"name": "a", "size": "1"}]}, "d.yaml: parts[0].size is '1'; it must be an integer"),
        ({"parts": [{"name": "a", "size": True}]}, "d.yaml: parts[0].size is true; it must be an integer"),
        ({"parts": [{"name": "a", "size": 1.0}]}, "d.yaml: parts[0].size is 1.0; it must be an integer"),
        ({"parts": [{"name": "a"}], "weight": "x"}, "d.yaml: weight is 'x'; it must be a number"),
        ({"parts": [{"name": "a"}], "weight": float("nan")}, "weight is nan; it must be a finite number"),
        (
            {"parts": [{"name": "a"}], "weight": None},
            "weight: null is not a value; leave the key out",
        ),
    ],
)
def test_each_kind_of_error_is_one_sentence(document: Any, sentence: str) -> None:
    with pytest.raises(BadBody) as error:
        read_model(Whole, document, "d.yaml")
    assert str(error.value).endswith(sentence)
    assert str(error.value).startswith("d.yaml: ")
    assert len(str(error.value)) < 200


def test_equal_things_are_numbered_and_a_single_one_keeps_its_name() -> None:
    assert numbered("web", None) == ["web"]
    assert numbered("web", 2) == ["web-01", "web-02"]
    assert numbered("web", 100)[0] == "web-001"


NESTED = [f'{{"nodes": {"[" * depth}{"]" * depth}}}' for depth in (50, 500, 900, 2000)]


@given(texts | st.sampled_from([*DEEP_OR_LONG, *NESTED, '{"nodes": ' + "9" * 900 + "}"]))
def test_any_text_is_a_scenario_or_refused_in_one_sentence(text: str) -> None:
    def read(text: str) -> ScenarioDocument:
        return read_model(ScenarioDocument, read_document(text, "s.yaml"), "s.yaml")

    answer_or_sentence(read, text, BadBody)
