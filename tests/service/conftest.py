"""Fixtures: certificates of a listener and its clients."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.certificates import Certificates


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    """Issue what an installation needs."""
    return Certificates.issue(tmp_path)
