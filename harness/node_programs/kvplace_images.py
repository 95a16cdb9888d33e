"""kvplace's own images, made from the same files as its Containerfiles state.

The interpreter and its packages are the ones of this process, not of a registry's base image.
"""

from __future__ import annotations

import configparser
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import kvplace
from harness.build_cache import BuildFailed
from harness.go_build import tail
from harness.node_programs.containerfile import Containerfile, Copy
from harness.node_programs.debian import libraries_layer
from harness.node_programs.image import Image, Layer
from harness.node_programs.oci_archive import Attributes
from harness.node_programs.python_layers import (
    VERSION,
    compile_below,
    interpreter_layer,
    interpreters_libraries,
    packages_layer,
)
from harness.node_programs.root_filesystem import RootFilesystem

PROJECT = Path(__file__).resolve().parents[2]
_HOME = Path("/opt/kvplace")
_SITE_PACKAGES = _HOME / "lib" / VERSION / "site-packages"
LEFT_OUT = tuple(
    line
    for line in (PROJECT / "images" / "left-out.txt").read_text().splitlines()
    if not line.startswith("#")
)
"""Patterns of the files of packages that the Containerfiles leave out."""
_CLIENT = {
    *(
        "aiohttp-retry",
        "certifi",
        "charset-normalizer",
        "durationpy",
        "kubernetes",
        "oauthlib",
        "python-dateutil",
    ),
    *("requests", "requests-oauthlib", "urllib3", "websocket-client"),
}
"""The client of Kubernetes and what only it needs, which the images leave out."""
LEFT_OUT_OF_CLIENT = (
    *("kubernetes/*/*_test.py", "kubernetes/aio/*/*_test.py", "websocket/tests"),
    *("kubernetes/client/api/[a-z]*.py", "kubernetes/client/models/[a-z]*.py"),
    *("kubernetes/aio/client/api/[a-z]*.py", "kubernetes/aio/client/models/[a-z]*.py"),
)
"""What the client need not load to renew an OIDC token: nine of ten of its bytes."""


def serve_image(reference: str | None = None) -> Image:
    """Return the image of `kvplace serve`."""
    return _image("serve", PROJECT / "images" / "serve" / "Containerfile", reference)


def hook_image(reference: str | None = None) -> Image:
    """Return the image of the sidecar in every VM's pod."""
    return _image("hook", PROJECT / "hooks" / "Containerfile", reference)


def agent_image(reference: str | None = None) -> Image:
    """Return the image of `kvplace agent`."""
    return _image("agent", PROJECT / "images" / "agent" / "Containerfile", reference)


def serve_image_with_client() -> Image:
    """Return the image of `kvplace serve` with the client added: the files of the kubectl plugin."""
    recipe = Containerfile.read(PROJECT / "images" / "serve" / "Containerfile")
    pins = [pin for pin in recipe.pins(PROJECT / "constraints.txt") if pin.name in _CLIENT]
    client = packages_layer("client", pins, _SITE_PACKAGES, LEFT_OUT_OF_CLIENT)
    serve = serve_image()
    return replace(serve, layers=(*serve.layers, client))


def _image(name: str, containerfile: Path, reference: str | None) -> Image:
    recipe = Containerfile.read(containerfile)
    site_packages = _SITE_PACKAGES if recipe.installs_kvplace_itself() else _HOME
    copies = [*recipe.copies(of_last_stage=False), *recipe.copies(of_last_stage=True)]
    sources = [PROJECT / source for copy in copies for source in copy.sources]
    layers = (
        interpreter_layer(),
        *_debian_layers(name, recipe),
        packages_layer(f"{name}-packages", recipe.pins(PROJECT / "constraints.txt"), site_packages, LEFT_OUT),
        Layer(
            f"{name}-kvplace",
            (sys.version, containerfile.read_text(), *_contents(sources)),
            lambda root: _lay_out_kvplace(RootFilesystem(root), recipe),
        ),
    )
    return Image(
        reference or f"docker.io/kvplace/{name}:{kvplace.__version__}", layers, recipe.configuration()
    )


def _debian_layers(name: str, recipe: Containerfile) -> Iterator[Layer]:
    if packages := recipe.debian_packages():
        yield libraries_layer(f"{name}-debian", packages, interpreters_libraries())


def _lay_out_kvplace(files: RootFilesystem, recipe: Containerfile) -> Attributes:
    if recipe.installs_kvplace_itself():
        _install_wheel(files, recipe)
    else:
        for copy in recipe.copies(of_last_stage=False):
            _copy(files, copy)
    for copy in recipe.copies(of_last_stage=True):
        _copy(files, copy)
    compiled = compile_below(files.at(_HOME), files.root)
    if not compiled:
        raise BuildFailed(f"a module that {recipe.path} copies cannot be compiled: `./make lint` names it")
    return Attributes()


def _copy(files: RootFilesystem, copy: Copy) -> None:
    if not Path(copy.target).is_absolute():  # constraints.txt, for the stage that builds
        return
    for name in copy.sources:
        source = PROJECT / name
        if source.is_dir():
            shutil.copytree(
                source,
                files.at(copy.target),
                dirs_exist_ok=True,
                ignore=shutil.ignore_patterns("__pycache__"),
            )
        else:
            into_folder = copy.target.endswith("/")
            files.file(source, Path(copy.target) / source.name if into_folder else copy.target)


def _install_wheel(files: RootFilesystem, recipe: Containerfile) -> None:
    """Build the wheel from the files that the Containerfile copies, laid out as in a virtual environment."""
    with tempfile.TemporaryDirectory(prefix="kvplace-wheel-") as folder:
        source = RootFilesystem(Path(folder) / "source")
        for copy in recipe.copies(of_last_stage=False):
            _copy(source, Copy(copy.sources, f"/{copy.target.removeprefix('./')}"))
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        built = subprocess.run(
            [*command, "--wheel-dir", folder, source.root], capture_output=True, text=True, check=False
        )
        if built.returncode != 0:
            raise BuildFailed(
                f"the files that {recipe.path} copies make no wheel:\n{tail(built.stdout + built.stderr)}"
            )
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(files.at(_SITE_PACKAGES))
    files.text(f"{_HOME}/pyvenv.cfg", "home = /usr/local/bin\ninclude-system-site-packages = false\n")
    for name in ("python", "python3"):
        files.link(f"{_HOME}/bin/{name}", f"/usr/local/bin/{VERSION}")
    scripts = configparser.ConfigParser()
    (entry_points,) = files.at(_SITE_PACKAGES).glob("kvplace-*.dist-info/entry_points.txt")
    scripts.read(entry_points)
    for name, entry in scripts["console_scripts"].items():
        module, _, function = entry.partition(":")
        call = f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n"
        files.text(f"{_HOME}/bin/{name}", f"#!{_HOME}/bin/python\n{call}", mode=0o755)


def _contents(sources: list[Path]) -> Iterator[str]:
    for source in sources:
        below = [source] if source.is_file() else sorted(source.rglob("*"))
        for path in below:
            if path.is_file() and "__pycache__" not in path.parts:
                yield f"{path.relative_to(PROJECT)} {hashlib.sha256(path.read_bytes()).hexdigest()}"
