"""One release for all tests."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import tarfile
from pathlib import Path

import pytest

from harness.build_fixtures import skipped_if_not_installed
from kvplace import __version__
from release.__main__ import main

REGISTRY = "registry.example/kvplace"
URL = "https://files.example/kvplace"


@pytest.fixture(scope="session")
def signing_key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a key as the page states."""
    key = tmp_path_factory.mktemp("key") / "release.key"
    command = ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(key)]
    subprocess.run(command, check=True)
    return key


@pytest.fixture(scope="session")
def made(signing_key: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Make a release for a registry, signed; its folder, and what was printed."""
    folder = tmp_path_factory.mktemp("release") / "dist"
    arguments = ["--registry", REGISTRY, "--url", URL, "--key", str(signing_key), "--folder", str(folder)]
    with skipped_if_not_installed(), contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(arguments) == 0
    return folder, printed.getvalue()


@pytest.fixture(scope="session")
def released(made: tuple[Path, str]) -> Path:
    """Name the folder of the release."""
    return made[0]


@pytest.fixture(scope="session")
def digests(made: tuple[Path, str]) -> dict[str, str]:
    """Read the digest of each image, as it was printed."""
    return dict(re.findall(rf"^{REGISTRY}/(\w+):\S+ +(sha256:\w+)", made[1], re.MULTILINE))


@pytest.fixture(scope="session")
def unpacked(released: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack chart and manifests of the release."""
    folder = tmp_path_factory.mktemp("unpacked")
    for name in (f"kvplace-chart-{__version__}.tgz", f"kvplace-manifests-{__version__}.tar.gz"):
        with tarfile.open(released / name) as archive:
            archive.extractall(folder, filter="data")
    return folder
