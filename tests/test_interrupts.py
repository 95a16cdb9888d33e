"""The suite can be run by a parent that ignores SIGINT, as a job in the background of a script is."""

import os
import re
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
INTERRUPTED = ("tests/cli/test_main.py", "-k", "interrupt")


def test_tests_that_interrupt_a_program_end_also_where_the_parent_ignores_sigint() -> None:
    ignoring = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=60", *INTERRUPTED]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [*ignoring, *pytest], cwd=PROJECT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    # Lines before it may name tests of data that this machine does not have.
    summary = done.stdout.splitlines()[-1]
    assert re.search(r"[1-9]\d* passed", summary)
    assert not re.search(r"failed|error|skipped", summary)
