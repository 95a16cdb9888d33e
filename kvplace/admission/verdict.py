"""The result of admitting an object; a refusal is a raised KvplaceError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvplace.admission.edits import Operation


@dataclass(frozen=True, slots=True)
class Admitted:
    """An object as it is to be stored, and warnings for its author."""

    object: Mapping[str, Any]
    warnings: tuple[str, ...] = ()
    patch: Sequence[Operation] = ()
    """The JSON Patch that makes `object` of the object under review; empty when nothing changes."""
