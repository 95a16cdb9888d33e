"""A text in YAML or JSON means one thing, or is refused in one sentence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.errors import BadBody
from kvplace.documents.reading import read_document
from tests.core.junk import DEEP_OR_LONG, answer_or_sentence, texts


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nodes: &a [*a]", r"contains the alias \*a"),
        ("a: 1\na: 2\n", "duplicate key 'a'"),
        ('{"a": 1, "a": 2}', "'a'"),
        ("- a\n", "contains a list; it must be a mapping"),
        ("1: a\n'1': b\n", "duplicate key '1'"),
        ("? [a]\n: b\n", "is not valid YAML"),
        ("a: [", "is not valid YAML"),
        ("- " * 200, "is nested more than"),
        ("a: " + "9" * 6_000, "contains a number that cannot be read; quote it if"),
        ("a: 0x_", "contains a number that cannot be read"),
    ],
)
def test_a_text_that_cannot_mean_one_thing_is_refused(text: str, said: str) -> None:
    with pytest.raises(BadBody, match=said):
        read_document(text, "c.yaml")


def test_keys_and_dates_are_texts_as_in_json() -> None:
    text = "2026-01-01: 2026-01-02T03:04:05Z\nin: [{1.50: a, 07: b, null: c, yes: d, <<: e}]"
    assert read_document(text, "c.yaml") == {
        "2026-01-01": "2026-01-02T03:04:05Z",
        "in": [{"1.50": "a", "07": "b", "null": "c", "yes": "d", "<<": "e"}],
    }


@given(texts | st.sampled_from(DEEP_OR_LONG))
def test_any_text_is_read_or_refused_in_one_sentence(text: str) -> None:
    answer_or_sentence(lambda given: read_document(given, "c.yaml"), text, BadBody)
