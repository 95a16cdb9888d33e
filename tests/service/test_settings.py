"""Settings that every long-running process has."""

from __future__ import annotations

import re

import pytest

from kvplace.core.errors import Misconfigured
from kvplace.service.settings import Address


@pytest.mark.parametrize(
    ("text", "address"),
    [("0.0.0.0:8443", Address("0.0.0.0", 8443)), ("[::1]:0", Address("::1", 0)), (":80", Address("", 80))],
)
def test_an_address_is_read_and_written_alike(text: str, address: Address) -> None:
    assert Address.parse(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    ["8443", "host:", "host:99999", "host:x", "host:²", "", "fd00::1", ":::80", "[::1:80", "[host]:80"],
)
def test_an_invalid_address_is_named_with_an_example(text: str) -> None:
    with pytest.raises(Misconfigured, match=re.escape(f"'{text}' is not an address; write HOST:PORT")):
        Address.parse(text)
