"""Edits of a document and the JSON Patch that they are written down as."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.admission.edits import EditedList, EditedObject, Operation, edited
from tests.admission.reviewed_objects import Json, apply_patch

KEYS = ("a", "b", "a/b", "~0", "", "-", "0")
scalars = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "a", 1.0, "~1"])
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=12,
)
documents = st.dictionaries(st.sampled_from(KEYS), values, max_size=5)


def exactly(value: Any) -> Any:
    """Distinguish 1 from true, which Python takes for equal."""
    if isinstance(value, dict):
        return {key: exactly(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [exactly(entry) for entry in value]
    return type(value), value


def _edit_somewhere(chance: Any, at: EditedObject | EditedList) -> None:
    """Make one edit, at the top or further in, of the kinds that a place allows."""
    if isinstance(at, EditedList):
        objects = [index for index, entry in enumerate(at.values) if isinstance(entry, dict)]
        if objects and chance.draw(st.booleans()):
            _edit_somewhere(chance, at.object(chance.draw(st.sampled_from(objects))))
        elif at.values and chance.draw(st.booleans()):
            at.replace(chance.draw(st.integers(0, len(at.values) - 1)), chance.draw(values))
        elif at.values and chance.draw(st.booleans()):
            at.remove(chance.draw(st.integers(0, len(at.values) - 1)))
        else:
            at.append(chance.draw(values))
        return
    key = chance.draw(st.sampled_from(KEYS))
    kinds: list[Callable[[], None]] = [lambda: at.put(key, chance.draw(values)), lambda: at.drop(key)]
    if at.get(key) is None or isinstance(at.get(key), dict):
        kinds.append(lambda: _edit_somewhere(chance, at.object(key)))
    if at.get(key) is None or isinstance(at.get(key), list):
        kinds.append(lambda: _edit_somewhere(chance, at.list(key)))
    chance.draw(st.sampled_from(kinds))()


@given(documents, st.integers(0, 8), st.data())
def test_the_patch_of_any_edits_makes_the_edited_document_and_the_given_one_stays(
    document: Json, count: int, chance: Any
) -> None:
    before = copy.deepcopy(document)
    patch: list[Operation] = []
    after = edited(document, patch)
    for _ in range(count):
        _edit_somewhere(chance, after)
    assert exactly(document) == exactly(before)
    assert exactly(apply_patch(document, patch)) == exactly(after.values)


@pytest.mark.parametrize(
    ("before", "edit", "operations"),
    [
        ({"a": 1}, lambda at: at.put("a", 1), []),
        ({"a": 1}, lambda at: at.put("a", True), [("replace", "/a")]),
        ({"a": {"b": 1}}, lambda at: at.put("a", {"b": 1}), []),
        ({}, lambda at: at.drop("a"), []),
        ({"a": {"x~y": ""}}, lambda at: at.object("a").drop("x~y"), [("remove", "/a/x~0y")]),
        ({"a": {}}, lambda at: at.object("a").put("k.io/r", "x"), [("add", "/a/k.io~1r")]),
        ({"a": None}, lambda at: at.object("a").put("b", 1), [("replace", "/a")]),
        ({"l": [{"n": 1}]}, lambda at: at.list("l").object(0).put("n", 2), [("replace", "/l/0/n")]),
        ({"l": [1]}, lambda at: at.list("l").append(2), [("add", "/l/-")]),
    ],
    ids=lambda value: "edit" if callable(value) else str(value),
)
def test_only_changes_are_named(
    before: Json, edit: Callable[[EditedObject], None], operations: list[tuple[str, str]]
) -> None:
    patch: list[Operation] = []
    edit(edited(before, patch))
    assert [(entry["op"], entry["path"]) for entry in patch] == operations


def test_a_field_of_an_added_value_needs_no_operation_of_its_own() -> None:
    patch: list[Operation] = []
    after = edited({}, patch)
    labels = after.object("metadata").object("labels")
    labels.put("one", "1")
    after.object("metadata").object("labels").put("two", "2")
    after.object("metadata").list("list").append("x")
    added = {"labels": {"one": "1", "two": "2"}, "list": ["x"]}
    assert patch == [{"op": "add", "path": "/metadata", "value": added}]
