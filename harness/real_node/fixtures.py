"""pytest fixtures of real nodes. They need root: elsewhere their tests are skipped; under CI they fail."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.real_node.control_groups import NoControlGroups, hierarchies

_FIXTURES = {"sandbox_machine"}


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what needs a sandbox, so that `-m 'not real_node'` leaves it out."""
    if _FIXTURES & set(getattr(item, "fixturenames", ())):
        item.add_marker(pytest.mark.real_node)


@pytest.fixture(scope="session")
def sandbox_machine() -> None:
    """Require that this machine can hold sandboxes."""
    if os.geteuid() != 0:
        pytest.skip("a sandboxed node needs root")
    try:
        hierarchies(Path("/proc/self/mountinfo").read_text())
    except NoControlGroups as missing:
        pytest.skip(str(missing))
