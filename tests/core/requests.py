"""Requests by keyword: options and sizes side by side."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvplace.core.request import PinningOptions, Request

_NO_PAGES: Mapping[int, int] = MappingProxyType({})


def request_with(
    vcpus: int,
    *,
    memory: int = 0,
    huge_pages: Mapping[int, int] = _NO_PAGES,
    io_threads: int = 0,
    **options: Any,
) -> Request:
    """Make a request; `options` are fields of `PinningOptions`."""
    return Request(vcpus, PinningOptions(**options), memory, huge_pages, io_threads)
