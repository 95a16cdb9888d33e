"""Runs stories in a process of their own, as when they are replayed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
PATIENCE_S = 580.0
"""Shortly below the timeout of the tests: a process that is waited for no longer is killed."""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run stories in a process of their own, as when they are replayed."""
    command = [sys.executable, "-m", "tests.protocol", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    return subprocess.run(
        command, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
