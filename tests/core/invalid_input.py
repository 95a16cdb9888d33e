"""Invalid values for every reader. A reader ends with an answer or with one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import strategies as st

T = TypeVar("T")

json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
"""Anything that JSON, as Python reads it, can state."""

texts = st.text(max_size=40) | json_values.map(json.dumps)
"""Anything at all: mostly no JSON, or JSON of another shape."""

DEEP_OR_LONG = ("[" * 100_000, '{"a":' * 20_000, "9" * 5000, '{"version":1,"memory":1e999}')
"""Texts that made JSON readers crash somewhere."""


def disturbed(document: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """The document with some of its values, or values inside them, replaced by anything, or left out."""
    return st.fixed_dictionaries(
        {},
        optional={
            key: st.just(value)
            | json_values
            | (disturbed(value) if isinstance(value, dict) else st.nothing())
            | (
                st.tuples(json_values, *map(st.just, value)).map(list)
                if isinstance(value, list)
                else st.nothing()
            )
            for key, value in document.items()
        },
    ).map(lambda changed: document | changed)


def answer_or_sentence(
    read: Callable[..., T], argument: object, error: type[Exception]
) -> tuple[T | None, str]:
    """Call a reader: what it answers, or what it reports against it; any other error fails the test."""
    try:
        return read(argument), ""
    except error as said:
        sentence = str(said)
    assert sentence
    assert "\n" not in sentence
    return None, sentence
