"""Sizes as libvirt writes them: a number, and a unit in an attribute."""

from __future__ import annotations

import re

from lxml import etree

from kvplace.core.errors import BadDomainXml
from kvplace.core.scalars import Bytes
from kvplace.domainxml.document import text_of

_UNIT = re.compile(r"b|bytes?|(?P<letter>[kmgtpe])(?P<ending>ib|b)?", re.IGNORECASE | re.ASCII)
_LETTERS = "kmgtpe"
_DEFAULT_UNIT = "KiB"


def bytes_of(amount: str, unit: str | None, what: str) -> Bytes:
    """Read a size; raises BadDomainXml with one sentence that starts with `what`."""
    unit = unit or _DEFAULT_UNIT
    match = _UNIT.fullmatch(unit)
    if match is None or not (amount.isascii() and amount.isdigit() and len(amount) <= 20):
        raise BadDomainXml(f"{what} is {amount[:40]!r} {unit[:10]!r}, not a size such as 4194304 KiB")
    letter, ending = match["letter"], match["ending"]
    if letter is None:
        return Bytes(int(amount))
    base = 1000 if ending in ("b", "B") else 1024
    return Bytes(int(amount) * base ** (_LETTERS.index(letter.lower()) + 1))


def text_bytes_of(element: etree._Element, what: str) -> Bytes:
    """Read the size that is an element's text; raises as `bytes_of`."""
    return bytes_of(text_of(element), element.get("unit"), what)
