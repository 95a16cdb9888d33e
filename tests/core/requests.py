"""Requests by keyword: options and sizes side by side."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvplace.core.request import PinningOptions, Request
from kvplace.core.scalars import Bytes, ResourceName

_NO_PAGES: Mapping[Bytes, int] = MappingProxyType({})
_NO_DEVICES: Mapping[ResourceName, int] = MappingProxyType({})


def request_with(
    vcpus: int,
    *,
    memory: int = 0,
    huge_pages: Mapping[Bytes, int] = _NO_PAGES,
    io_threads: int = 0,
    devices: Mapping[ResourceName, int] = _NO_DEVICES,
    **options: Any,
) -> Request:
    """Make a request; `options` are fields of `PinningOptions`."""
    return Request(vcpus, PinningOptions(**options), Bytes(memory), huge_pages, io_threads, devices)
