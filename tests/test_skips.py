"""Under CI nothing is skipped: not a test, and not a module as a whole."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
SKIPPED = {
    "test_import.py": "import pytest\npytest.importorskip('no_such_module')\ndef test(): pass\n",
    "test_module.py": "import pytest\npytest.skip('for fun', allow_module_level=True)\ndef test(): pass\n",
    "test_inside.py": "import pytest\ndef test(): pytest.importorskip('no_such_module')\n",
    "test_mark.py": "import pytest\n@pytest.mark.skip(reason='for fun')\ndef test(): pass\n",
}
EXPECTED_FAILURE = "import pytest\n@pytest.mark.xfail(strict=True)\ndef test(): assert False\n"


def _run(folder: Path, ci: str, *options: str) -> str:
    """The output of pytest for these modules, with the hooks of our own suite."""
    for name, text in SKIPPED.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "test_expected.py").write_text(EXPECTED_FAILURE, encoding="utf-8")
    plugins = ("-p", "tests.conftest", "-p", "no:cacheprovider")
    return subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "--continue-on-collection-errors", *options, "."],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(PROJECT), "CI": ci},
        capture_output=True,
        text=True,
        check=False,
    ).stdout


def _summary(output: str) -> list[str]:
    """The counts of the last line, without the seconds."""
    return re.findall(r"\d+ (?:passed|failed|skipped|xfailed|error)", output.splitlines()[-1])


def test_whatever_is_skipped_fails_under_ci_and_states_why(tmp_path: Path) -> None:
    output = _run(tmp_path, "true")
    assert _summary(output) == ["1 failed", "1 xfailed", "3 error"]
    for name in SKIPPED:
        assert re.search(rf"{name}\S* must not be skipped under CI: .*(no_such_module|for fun)", output)


def test_a_skipped_module_fails_also_where_several_processes_collect(tmp_path: Path) -> None:
    output = _run(tmp_path, "true", "-n", "2")
    assert _summary(output) == ["1 failed", "1 xfailed", "3 error"]


def test_elsewhere_a_skip_stays_a_skip(tmp_path: Path) -> None:
    assert _summary(_run(tmp_path, "")) == ["4 skipped", "1 xfailed"]
