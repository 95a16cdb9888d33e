"""Kubernetes objects in files, as `kubectl apply -f` takes them: YAML documents, JSON, and Lists."""

from __future__ import annotations

from collections.abc import Iterator

from kvplace.core.errors import BadBody
from kvplace.core.strict_json import Json, kind_of
from kvplace.documents.reading import read_text, read_values, source_name


def read_manifests(source: str) -> tuple[tuple[str, Json], ...]:
    """Read the objects of a file, or of stdin for `-`, in their order; each with its place for errors.

    A List counts as the objects in it. Raises BadBody for what is not a mapping.
    """
    what = source_name(source)
    return manifests_in(read_text(source, what), what)


def manifests_in(text: str, what: str) -> tuple[tuple[str, Json], ...]:
    """Read the objects of a text; errors and places call it `what`."""
    found = read_values(text, what)
    several = len(found) > 1
    return tuple(
        manifest
        for number, value in enumerate(found, 1)
        for manifest in _objects_of(value, f"{what}: document {number}" if several else what)
    )


def _objects_of(value: object, where: str) -> Iterator[tuple[str, Json]]:
    if not isinstance(value, dict):
        raise BadBody(
            f"{where} contains {kind_of(value)}; it must be a Kubernetes object, a mapping with a kind"
        )
    kind, items = value.get("kind"), value.get("items")
    if isinstance(kind, str) and kind.endswith("List") and isinstance(items, list):
        for index, item in enumerate(items):
            yield from _objects_of(item, f"{where}: items[{index}]")
    else:
        yield where, value
