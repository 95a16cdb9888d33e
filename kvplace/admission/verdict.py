"""The answer to one admission question when it is not a no; a no is a raised KvplaceError."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Admitted:
    """An object as it is to be stored, and what its author should hear."""

    object: Mapping[str, Any]
    warnings: tuple[str, ...] = ()
