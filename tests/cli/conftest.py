"""Fixtures of the command line tests."""

from __future__ import annotations

import pytest

from tests.cli.calls import Caller


@pytest.fixture
def kvplace(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Caller:
    """Calls `kvplace` in this process."""
    return Caller(capsys, monkeypatch)
