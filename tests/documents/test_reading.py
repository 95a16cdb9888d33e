"""A text in YAML or JSON means one thing, or is refused in one sentence."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.errors import BadBody
from kvplace.documents.reading import manifests_in, read_document
from tests.core.invalid_input import DEEP_OR_LONG, answer_or_sentence, texts


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nodes: &a [*a]", r"contains the alias \*a inside of its own anchor"),
        ("a: *b", "is not valid YAML: found undefined alias at line 1, column 4"),
        ("a: {<<: e}", "expected a mapping or list of mappings for merging"),
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
    text = "2026-01-01: 2026-01-02T03:04:05Z\nin: [{1.50: a, 07: b, null: c, yes: d, '<<': e}]"
    assert read_document(text, "c.yaml") == {
        "2026-01-01": "2026-01-02T03:04:05Z",
        "in": [{"1.50": "a", "07": "b", "null": "c", "yes": "d", "<<": "e"}],
    }


def test_aliases_and_merge_keys_have_the_same_meaning_as_for_kubectl() -> None:
    text = "base: &base {1: a, cpu: {cores: 2}}\nin: [*base, {<<: *base, 1: b}, {<<: [{x: 1}, {x: 2, y: 3}]}]"
    base = {"1": "a", "cpu": {"cores": 2}}
    assert read_document(text, "c.yaml") == {"base": base, "in": [base, {**base, "1": "b"}, {"x": 1, "y": 3}]}
    assert read_document("a: &five 5\n*five : b\n", "c.yaml") == {"a": 5, "5": "b"}


def multiplied(first: str, next_one: str, times: int) -> str:
    """Write lines that each repeat the line before ten times; `next_one` takes the aliases."""
    aliases = [", ".join([f"*a{number}"] * 10) for number in range(times)]
    lines = [f"a{number}: &a{number} {next_one % alias}" for number, alias in enumerate(aliases, 1)]
    return "\n".join([f"a0: &a0 {first}", *lines])


@pytest.mark.parametrize(
    "text",
    [
        multiplied("lol", "[%s]", 9),
        multiplied("lol", "[%s]", 60),
        multiplied("{a: 1}", "{<<: [%s]}", 60),
        f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 200)}]",
    ],
)
def test_a_text_that_is_huge_once_its_aliases_are_written_out_is_refused_and_never_written_out(
    text: str,
) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(BadBody, match=r"^c.yaml is larger than 16777216 bytes once its aliases are"):
            read_document(text, "c.yaml")
        assert tracemalloc.get_traced_memory()[1] < 4 * 1024 * 1024
    finally:
        tracemalloc.stop()


def test_aliases_cannot_hide_how_deep_a_text_is() -> None:
    text = "a0: &a0 [1]\n" + "".join(f"a{number}: &a{number} [*a{number - 1}]\n" for number in range(1, 120))
    with pytest.raises(BadBody, match="is nested more than 100 levels deep"):
        read_document(text, "c.yaml")


@given(texts | st.sampled_from(DEEP_OR_LONG))
def test_any_text_is_read_or_refused_in_one_sentence(text: str) -> None:
    answer_or_sentence(lambda given: read_document(given, "c.yaml"), text, BadBody)


SERVICE = {"kind": "Service"}
VM = {"kind": "VirtualMachine", "metadata": {"name": "db"}}


def test_a_file_may_have_several_documents_and_empty_ones_do_not_count() -> None:
    text = f"# two\n---\n{json.dumps(SERVICE)}\n---\n\n--- # nothing\n---\n{json.dumps(VM)}\n"
    assert manifests_in(text, "all.yaml") == (
        ("all.yaml: document 1", SERVICE),
        ("all.yaml: document 2", VM),
    )


def test_a_single_document_goes_by_the_name_of_its_file() -> None:
    assert manifests_in(json.dumps(VM), "vm.json") == (("vm.json", VM),)


@pytest.mark.parametrize("kind", ["List", "VirtualMachineList"])
def test_a_list_counts_as_the_objects_in_it(kind: str) -> None:
    inner = {"kind": "List", "items": [VM]}
    text = json.dumps({"kind": kind, "items": [SERVICE, inner]})
    assert manifests_in(text, "all") == (("all: items[0]", SERVICE), ("all: items[1]: items[0]", VM))


@pytest.mark.parametrize(
    ("text", "is_a"), [("[1]", "a list"), ("just words", "a string"), ("--- 5", "a number")]
)
def test_a_document_that_is_not_an_object_is_refused_with_its_place(text: str, is_a: str) -> None:
    with pytest.raises(BadBody, match=rf"^all contains {is_a}; it must be a Kubernetes object"):
        manifests_in(text, "all")
