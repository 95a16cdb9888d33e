"""`kvplace schema` prints the JSON Schema of each document that people write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from kvplace.documents import SCHEMA_NAMES
from tests.cli.calls import Caller
from tests.json_schema import violations


def test_without_a_name_the_documents_are_listed(kvplace: Caller) -> None:
    called = kvplace("schema")
    assert (called.code, called.err) == (0, "")
    assert [line.split()[0] for line in called.out.splitlines()] == list(SCHEMA_NAMES)


@pytest.mark.parametrize("name", SCHEMA_NAMES)
def test_json_and_yaml_hold_the_same_schema(kvplace: Caller, name: str) -> None:
    as_json, as_yaml = kvplace("schema", name), kvplace("schema", name, "-o", "yaml")
    document = json.loads(as_json.out)
    assert yaml.safe_load(as_yaml.out) == document
    assert document["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert document["type"] == "object"
    assert not as_json.err + as_yaml.err


def test_the_example_scenario_is_valid_by_the_printed_schema_and_one_with_a_typo_is_not(
    kvplace: Caller,
) -> None:
    schema = json.loads(kvplace("schema", "scenario").out)
    example = yaml.safe_load(kvplace("simulate", "--example").out)
    assert not list(violations(example, schema))
    example["nodes"][0]["machin"] = example["nodes"][0].pop("machine")
    assert list(violations(example, schema))


def test_the_reference_names_every_document() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    section = page.partition("## Documents")[2]
    assert [name for name in SCHEMA_NAMES if f"`{name}`" not in section] == []


def test_an_unknown_name_is_an_error_with_a_suggestion(kvplace: Caller) -> None:
    called = kvplace("schema", "clutser")
    assert (called.code, called.out) == (2, "")
    assert called.err == "kvplace: schema 'clutser' is not known; did you mean 'cluster'?\n"
