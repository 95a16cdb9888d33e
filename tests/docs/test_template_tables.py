"""The tables of vm-templates/README.md state what the templates state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from kvplace.core.well_known_names import ASKING
from kvplace.simulate.demo_vms import read_templates, size_of
from tests.docs.reading import PROJECT

FOLDER = PROJECT / "vm-templates"
ROWS = {
    cells[0].partition("]")[0].strip("[`"): cells[1:]
    for line in (FOLDER / "README.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| [")
    for cells in [[cell.strip() for cell in line.strip("|\n ").split("|")]]
}
TEMPLATES = read_templates()
INSTANCETYPES = {
    document["metadata"]["name"]: document
    for document in yaml.safe_load_all((FOLDER / "instancetypes" / "instancetypes.yaml").read_text())
}


def words(annotations: Mapping[str, str]) -> str:
    """Write what a template asks of kvplace as the tables do."""
    return "<br>".join(f"`{key}: {value}`" for key, value in annotations.items() if key in ASKING)


def size(vcpus: int, spec: Mapping[str, Any]) -> str:
    pages = spec.get("hugepages")
    return f"{vcpus} vCPUs, {spec['guest']}" + (f" in pages of {pages['pageSize']}" if pages else "")


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_row_of_a_template_gives_its_size_and_its_annotations(name: str) -> None:
    template = TEMPLATES[name]["spec"]["template"]
    vcpus = size_of({"metadata": {"name": name}, "spec": template["spec"]}).vcpus
    _, stated, asked = ROWS[name]
    assert stated == size(vcpus, template["spec"]["domain"]["memory"])
    assert asked == words(template["metadata"]["annotations"])


@pytest.mark.parametrize("name", INSTANCETYPES)
def test_the_row_of_an_instancetype_gives_its_size_and_its_annotations(name: str) -> None:
    spec = INSTANCETYPES[name]["spec"]
    _, stated, asked = ROWS[name]
    assert stated == size(spec["cpu"]["guest"], spec["memory"])
    assert asked == words(spec["annotations"])


def test_every_row_belongs_to_a_template_or_an_instancetype() -> None:
    assert ROWS.keys() == TEMPLATES.keys() | INSTANCETYPES.keys()
