"""One release for all tests."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from harness.build_fixtures import skipped_if_not_installed
from release.__main__ import main

REGISTRY = "registry.example/kvplace"


@pytest.fixture(scope="session")
def signing_key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a key as the page says."""
    key = tmp_path_factory.mktemp("key") / "release.key"
    command = ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(key)]
    subprocess.run(command, check=True)
    return key


@pytest.fixture(scope="session")
def released(signing_key: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a release for a registry, signed, and name its folder."""
    folder = tmp_path_factory.mktemp("release") / "dist"
    arguments = ["--registry", REGISTRY, "--key", str(signing_key), "--folder", str(folder)]
    with skipped_if_not_installed():
        assert main(arguments) == 0
    return folder
