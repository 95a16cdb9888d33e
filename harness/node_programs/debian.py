"""Debian's packages on this machine, as far as they decide the content of an image."""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from harness.build_cache import NotInstalled
from harness.node_programs.image import Layer
from harness.node_programs.oci_archive import Attributes
from harness.node_programs.root_filesystem import RootFilesystem

_SHARED_LIBRARY = re.compile(r".+\.so\.\d+")
_STATUS = Path("/var/lib/dpkg/status")


def installed_packages() -> str:
    """Return a digest that changes when any Debian package is installed, updated or removed."""
    return hashlib.sha256(_STATUS.read_bytes()).hexdigest() if _STATUS.exists() else "no Debian"


def libraries_layer(name: str, packages: Iterable[str], present: Iterable[Path]) -> Layer:
    """Return a layer with the shared libraries of Debian packages and all that these are linked to.

    Without packages that are `present` below. Raises `NotInstalled` when a package is missing here.
    """
    libraries = [path for package in packages for path in _shared_libraries(package)]

    def lay_out(root: Path) -> Attributes:
        files = RootFilesystem(root)
        for library in libraries:
            files.program(library)
        files.add_libraries(present=present)
        return Attributes()

    return Layer(name, (installed_packages(), *map(str, libraries)), lay_out)


def _shared_libraries(package: str) -> list[Path]:
    try:
        listed = subprocess.run(["dpkg-query", "-L", package], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise NotInstalled(f"the image needs {package}, and this machine has no Debian packages") from None
    if listed.returncode != 0:
        raise NotInstalled(
            f"{package} is not installed here, and the image needs its libraries: apt-get install {package}"
        )
    return [Path(line) for line in listed.stdout.splitlines() if _SHARED_LIBRARY.fullmatch(line)]
