"""Manifests are read as `kubectl apply -f` reads them."""

from __future__ import annotations

import json

import pytest

from kvplace.core.errors import BadBody
from kvplace.documents.reading import manifests_in

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
def test_what_is_not_an_object_is_refused_with_its_place(text: str, is_a: str) -> None:
    with pytest.raises(BadBody, match=rf"^all contains {is_a}; it must be a Kubernetes object"):
        manifests_in(text, "all")
