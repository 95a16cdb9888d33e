"""The VM templates of `vm-templates/`: at the top of the project, and inside the installed package."""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from kvplace.core.errors import Misconfigured

_FOLDER = "vm-templates"


def read_templates() -> dict[str, dict[str, Any]]:
    """Read every template by its name, in the order of the names.

    Raises Misconfigured when this installation has none.
    """
    from kvplace.documents.reading import read_document

    return {
        entry.name.removesuffix(".yaml"): read_document(entry.read_text(encoding="utf-8"), entry.name)
        for entry in sorted(_folder().iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith(".yaml")
    }


def _folder() -> Traversable:
    inside = files("kvplace.simulate") / _FOLDER
    if inside.is_dir():
        return inside
    beside = Path(__file__).resolve().parents[2] / _FOLDER
    if beside.is_dir():
        return beside
    raise Misconfigured(f"this installation of kvplace has no {_FOLDER}; reinstall it")
