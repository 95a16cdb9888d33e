"""The date of what is released: that of its source, so that two builds of one source are equal."""

from __future__ import annotations

import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path

_WITHOUT_HISTORY = datetime(2026, 1, 1, tzinfo=UTC)


def source_date(project: Path) -> datetime:
    """Return SOURCE_DATE_EPOCH where it is set, else the date of the last commit."""
    if (given := os.environ.get("SOURCE_DATE_EPOCH", "")).isdigit():
        return datetime.fromtimestamp(int(given), UTC)
    command = ["git", "log", "-1", "--format=%ct"]
    try:
        answer = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return _WITHOUT_HISTORY
    seconds = answer.stdout.strip()
    return datetime.fromtimestamp(int(seconds), UTC) if seconds.isdigit() else _WITHOUT_HISTORY
