"""Where the captured real data lies: documents and machines recorded from KubeVirt, libvirt and real hosts.

They stand beside the project, not in it; KVPLACE_CAPTURED_DATA names the folder when a copy of the project
runs elsewhere. A machine without them skips the tests that need them; CI must not.
"""

import os
from pathlib import Path

import pytest

_BESIDE_THE_PROJECT = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
_CAPTURED = Path(os.environ.get("KVPLACE_CAPTURED_DATA", _BESIDE_THE_PROJECT))


def captured_folder(name: str) -> Path:
    """Find one folder of captured data, for instance `kubevirt/domains`; fails in CI when it is missing."""
    folder = _CAPTURED / name
    if not folder.is_dir():
        sentence = f"the captured data {folder} is not here; lay ../shared/data beside the project"
        if os.environ.get("CI"):
            pytest.fail(sentence)
        pytest.skip(sentence)
    return folder


def captured_files(name: str, pattern: str) -> list[Path]:
    """List the files of one captured folder for parametrised tests; an empty list where they are missing.

    Called while tests are collected, when nothing can be skipped: pair it with `captured_folder` in a test.
    """
    folder = _CAPTURED / name
    return sorted(folder.glob(pattern)) if folder.is_dir() else []
