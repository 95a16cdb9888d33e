"""Fixtures: certificates of the listener, and a browser that trusts them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.browser.process import Browser, NoBrowser, chromium, running_browser
from harness.certificates import Certificates


@pytest.fixture(scope="package")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Issue what an installation needs."""
    return Certificates.issue(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="package")
def browser(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Run one browser for all tests."""
    try:
        chromium()
    except NoBrowser as reason:
        pytest.skip(str(reason))
    folder: Path = tmp_path_factory.mktemp("browser")
    with running_browser(folder, certificates.serve[0]) as running:
        yield running
