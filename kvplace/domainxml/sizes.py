"""Sizes as libvirt writes them: a number, and a unit in an attribute."""

from __future__ import annotations

from lxml import etree

from kvplace.core.errors import BadDomainXml
from kvplace.core.scalars import Bytes

_UNITS = {
    "b": 1, "bytes": 1, "KB": 10**3, "k": 2**10, "KiB": 2**10, "MB": 10**6, "M": 2**20, "MiB": 2**20,
    "GB": 10**9, "G": 2**30, "GiB": 2**30, "TB": 10**12, "T": 2**40, "TiB": 2**40,
}  # fmt: skip


def bytes_of(amount: str, unit: str, what: str) -> Bytes:
    """Read a size; raises BadDomainXml with one sentence that starts with `what`."""
    if not (amount.isascii() and amount.isdigit() and len(amount) <= 20 and unit in _UNITS):
        raise BadDomainXml(f"{what} is {amount[:40]!r} {unit[:10]!r}, not a size such as 4194304 KiB")
    return Bytes(int(amount) * _UNITS[unit])


def text_bytes_of(element: etree._Element, what: str) -> Bytes:
    """Read the size that is an element's text; raises as `bytes_of`."""
    return bytes_of((element.text or "").strip(), element.get("unit", "KiB"), what)
