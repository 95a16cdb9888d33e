"""Fixture: a browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.browser.process import Browser, NoBrowser, chromium, running_browser


@pytest.fixture(scope="package")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Run one browser for all tests."""
    try:
        chromium()
    except NoBrowser as reason:
        pytest.skip(str(reason))
    with running_browser(tmp_path_factory.mktemp("browser")) as running:
        yield running
