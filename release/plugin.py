"""The kubectl plugin as krew installs it: the commands of kvplace with an interpreter of their own.

Everything comes out of the image of `serve`, besides the client that renews OIDC tokens. What the plugin
takes from the machine it runs on is the C library alone, which must be at least as new as that of the machine
that built it.
"""

from __future__ import annotations

import platform
import shutil
import tarfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from textwrap import dedent
from typing import Any

from release.archives import write_tar_gz

_VERSION = "python" + ".".join(platform.python_version_tuple()[:2])
_PARTS = {
    f"usr/local/bin/{_VERSION}": f"bin/{_VERSION}",
    f"usr/local/lib/{_VERSION}/": f"lib/{_VERSION}/",
    "usr/local/lib/": "libraries/",
    "usr/lib/x86_64-linux-gnu/": "libraries/",
    f"opt/kvplace/lib/{_VERSION}/site-packages/": "packages/",
}
_OF_THE_C_LIBRARY = (
    "ld-linux",
    "libc.",
    "libm.",
    "libdl.",
    "libpthread.",
    "librt.",
    "libutil.",
    "libresolv.",
)
_LAUNCHER = f"""\
#!/bin/sh
# krew puts a link to this file on PATH. Programs that a kubeconfig names get the libraries of the machine.
home=$(dirname -- "$(readlink -f -- "$0")")
KVPLACE_CALLERS_LIBRARIES=${{LD_LIBRARY_PATH-}} LD_LIBRARY_PATH="$home/libraries" \\
    exec "$home/bin/{_VERSION}" -ISB "$home/start.py" "$@"
"""
_START = """\
import os
import sys

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "packages"))
del os.environ["LD_LIBRARY_PATH"]
if callers := os.environ.pop("KVPLACE_CALLERS_LIBRARIES", ""):
    os.environ["LD_LIBRARY_PATH"] = callers
sys.argv[0] = "kubectl-kvplace"

from kvplace.__main__ import main

main()
"""


def write_plugin(target: Path, layers: Sequence[Path], scratch: Path, date: datetime) -> None:
    """Write the plugin's archive from layers with the folders of the image of `serve`."""
    folder = scratch / "plugin"
    folder.mkdir()
    for layer in layers:
        _take_parts(layer, folder)
    launcher = folder / "kubectl-kvplace"
    launcher.write_text(_LAUNCHER)
    launcher.chmod(0o755)
    (folder / "start.py").write_text(_START)
    write_tar_gz(target, folder, "kvplace", date)


def krew_manifest(version: str, url: str, archive: Path, sha256: str) -> dict[str, Any]:
    """Return krew's manifest for installing an archive; `url` is the folder to download it from."""
    return {
        "apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
        "kind": "Plugin",
        "metadata": {"name": "kvplace"},
        "spec": {
            "version": f"v{version}",
            "shortDescription": "Show which VM has which CPU core, and why",
            "description": dedent(
                """\
                Shows what kvplace gives KubeVirt VMs: which VM has which physical CPU cores, what is free
                on each node, and why a VM waits. It also plans and simulates placements without a cluster.
                """
            ),
            "platforms": [
                {
                    "selector": {"matchLabels": {"os": "linux", "arch": "amd64"}},
                    "uri": f"{url.rstrip('/')}/{archive.name}",
                    "sha256": sha256,
                    "files": [{"from": "kvplace/*", "to": "."}],
                    "bin": "kubectl-kvplace",
                }
            ],
        },
    }


def _take_parts(layer: Path, folder: Path) -> None:
    with tarfile.open(layer) as files:
        for member in files:
            place = _place_of(member.name)
            if place is None or not (member.isfile() or member.issym()):
                continue
            target = folder / place
            target.parent.mkdir(parents=True, exist_ok=True)
            if member.issym():
                target.symlink_to(member.linkname)
            elif content := files.extractfile(member):
                with target.open("wb") as copy:
                    shutil.copyfileobj(content, copy)
                target.chmod(member.mode)


def _place_of(name: str) -> str | None:
    for part, place in _PARTS.items():
        if name.startswith(part):
            below = name.removeprefix(part)
            if place == "libraries/" and ("/" in below or below.startswith(_OF_THE_C_LIBRARY)):
                return None
            return f"{place}{below}"
    return None
