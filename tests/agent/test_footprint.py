"""The agent runs on every node, so what it imports counts."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("kubernetes", "libvirt", "lxml", "pydantic", "rich", "yaml")


def test_the_agent_starts_without_modules_that_it_may_never_need() -> None:
    program = f"import sys, kvplace.agent.process; print([name for name in {HEAVY} if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout == "[]\n"
