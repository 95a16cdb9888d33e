"""The difference of two documents, as operations."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.admission.json_patch import difference
from tests.admission.makers import apply_patch

scalars = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "a", "a/b", "~", "~1"])
documents = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["a", "b", "a/b", "~0", "", "-", "0"]), inner, max_size=4)
    ),
    max_leaves=20,
)


def exactly(value: Any) -> Any:
    """Tell 1 from true, which Python takes for equal."""
    if isinstance(value, dict):
        return {key: exactly(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [exactly(entry) for entry in value]
    return type(value), value


@given(documents, documents)
def test_applying_the_difference_turns_one_document_into_the_other(before: Any, after: Any) -> None:
    assert exactly(apply_patch(before, difference(before, after))) == exactly(after)


@given(documents)
def test_equal_documents_differ_by_nothing(document: Any) -> None:
    assert difference(document, document) == []


@pytest.mark.parametrize(
    ("before", "after", "operations"),
    [
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}, [("replace", "/a/c")]),
        ({"a": {}}, {"a": {"kvplace.io/request": "x"}}, [("add", "/a/kvplace.io~1request")]),
        ({"a": {"x~y": ""}}, {"a": {}}, [("remove", "/a/x~0y")]),
        ({"list": [{"n": 1}, {"n": 2}]}, {"list": [{"n": 1}, {"n": 2, "m": 3}]}, [("add", "/list/1/m")]),
        ({"list": [1]}, {"list": [1, 2, 3]}, [("add", "/list/-"), ("add", "/list/-")]),
        ({"list": [1, 2, 3]}, {"list": [1]}, [("remove", "/list/2"), ("remove", "/list/1")]),
        ({"a": None}, {"a": {}}, [("replace", "/a")]),
    ],
)
def test_only_what_changed_is_named(before: Any, after: Any, operations: list[tuple[str, str]]) -> None:
    assert [(entry["op"], entry["path"]) for entry in difference(before, after)] == operations
