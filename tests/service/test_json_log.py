"""Log lines: one JSON object each, with the same keys everywhere."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from kvplace.service.process import log_as_json


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    """Put the handlers and the level of the root logger back after the test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("root_logger")
def test_a_line_has_time_level_component_and_the_context_that_was_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log_as_json("info")
    log = logging.getLogger("kvplace.scheduler.binder")
    log.debug("not shown")
    log.warning("no room for %s", "a", extra={"vm": "ns/a", "node": "worker-1", "secret": "x"})
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        log.exception("two\nlines")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert first.pop("ts").endswith("+00:00")
    assert first == {
        "level": "warning",
        "msg": "no room for a",
        "component": "scheduler",
        "vm": "ns/a",
        "node": "worker-1",
    }
    assert second["msg"] == "two\nlines"
    assert second["traceback"].endswith("ZeroDivisionError")
