"""Names that kvplace puts on objects and reads from its environment: docs/reference/ lists these alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from kvplace.core import well_known_names as keys
from tests.docs.reading import PROJECT, SOURCES, first_cells, in_code_marks, page, section

OBJECTS, CONFIGURATION = page("reference/objects.md"), page("reference/configuration.md")
EXPLAINED_ON_ANNOTATIONS = {*keys.ASKING, *keys.RESULTS, keys.EXPLAIN, keys.EXPLANATION}
ON_NO_OBJECT = {
    "kvplace.io/doctor": "on pods that are tried out and never stored",
    "kvplace.io/agent": "who reports the agent's events",
}
_NAME = re.compile(r"kvplace\.io/[A-Za-z][A-Za-z-]+")


def strings(source: Path) -> Iterator[str]:
    """Give the strings of a module that are not docstrings."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def names_on_objects() -> set[str]:
    in_code = {text for source in SOURCES for text in strings(source) if _NAME.fullmatch(text)}
    manifests = sorted((PROJECT / "manifests").rglob("*.yaml"))
    in_manifests = {name for path in manifests for name in _NAME.findall(path.read_text())}
    return in_code | in_manifests


def variables_read(source: Path) -> Iterator[str]:
    """Give the variables that a module reads, itself or by an option of click."""
    for node in ast.walk(ast.parse(source.read_text())):
        match node:
            case ast.Call(
                func=ast.Attribute(value=read, attr="get"), args=[ast.Constant(value=str(name)), *_]
            ) if ast.unparse(read).endswith("environ"):
                yield name
            case ast.Subscript(value=read, slice=ast.Constant(value=str(name)), ctx=ast.Load()) if (
                ast.unparse(read).endswith("environ")
            ):
                yield name
            case ast.keyword(arg="envvar", value=ast.Constant(value=str(name))):
                yield name


def test_labels_annotations_conditions_and_resources_are_listed_and_no_others() -> None:
    rows = [line.split("|") for line in section(OBJECTS, "Objects in the cluster").splitlines()]
    listed = {
        name for row in rows if len(row) == 6 for name in in_code_marks(row[2]) if _NAME.fullmatch(name)
    }
    assert listed == names_on_objects() - EXPLAINED_ON_ANNOTATIONS - ON_NO_OBJECT.keys()


def test_variables_of_the_environment_are_listed_and_no_others() -> None:
    of_the_hook = {
        name
        for name in first_cells(section(CONFIGURATION, "`kvplace-hook`"))
        if re.fullmatch(r"[A-Z_]+", name)
    }
    listed = of_the_hook | first_cells(section(CONFIGURATION, "Environment variables"))
    assert listed == {name for source in SOURCES for name in variables_read(source)}
