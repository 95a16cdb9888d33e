"""Layers of images that run Python: the interpreter of this very process, and packages beside it.

The interpreter is laid out as in docker.io/library/python, below /usr/local, wherever it is here.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from packaging.requirements import Requirement

from harness.build_cache import BuildFailed, NotInstalled
from harness.node_programs.debian import installed_packages
from harness.node_programs.image import Layer
from harness.node_programs.oci_archive import Attributes
from harness.node_programs.root_filesystem import RootFilesystem, libraries_of

VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
_STANDARD_LIBRARY = Path(f"/usr/local/lib/{VERSION}")
_LEFT_OUT = (
    *("site-packages", "dist-packages", "test", "tests", "idlelib", "turtledemo", "tkinter", "ensurepip"),
    *("lib2to3", "config-*", "_test*.so", "_tkinter*.so", "*.a", "__pycache__"),
)
_ABOUT_THE_INSTALLATION = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}
"""Files of a distribution's metadata that differ between installations of the same distribution."""


def interpreter_layer() -> Layer:
    """Return the lowest layer: the interpreter and the standard library, with its bytecode."""
    program = Path(sys.executable).resolve()
    inputs = (sys.version, str(program), str(program.stat().st_mtime_ns), installed_packages())
    return Layer("python", inputs, _lay_out_interpreter)


def packages_layer(name: str, pins: Sequence[Requirement], target: Path) -> Layer:
    """Return a layer with the packages of this environment that the pins name, in a folder.

    Raises `BuildFailed` when the environment has another version than the pin says.
    """
    for pin in pins:
        installed = _installed(pin.name).version
        if not pin.specifier.contains(installed, prereleases=True):
            raise BuildFailed(
                f"{pin} is pinned, but {pin.name} {installed} is installed here: run `./make test`"
            )
    inputs = (sys.version, str(target), installed_packages(), *sorted(map(str, pins)))
    return Layer(name, inputs, lambda root: _lay_out_packages(RootFilesystem(root), pins, target))


def _lay_out_interpreter(root: Path) -> Attributes:
    files = RootFilesystem(root)
    files.skeleton()
    files.users()
    program = Path(sys.executable).resolve()
    files.file(program, f"/usr/local/bin/{VERSION}")
    for name in ("python", "python3"):
        files.link(f"/usr/local/bin/{name}", VERSION)
    shutil.copytree(
        _standard_library(), files.at(_STANDARD_LIBRARY), ignore=shutil.ignore_patterns(*_LEFT_OUT)
    )
    compile_below(files.at(_STANDARD_LIBRARY), files.root)
    for library in _interpreters_libraries():
        inside = library.is_relative_to(sys.base_prefix) and not library.is_relative_to("/usr/lib")
        files.file(library, f"/usr/local/lib/{library.name}" if inside else library)
    files.index_libraries()
    return Attributes()


def _lay_out_packages(files: RootFilesystem, pins: Iterable[Requirement], target: Path) -> Attributes:
    site_packages = Path(sysconfig.get_path("platlib"))
    for pin in pins:
        for member in _installed(pin.name).files or ():
            source = Path(str(member.locate())).resolve()
            left_out = member.name in _ABOUT_THE_INSTALLATION or member.suffix == ".pyc"
            if left_out or ".." in member.parts or not source.is_file():
                continue
            if source.suffix == ".so":
                files.program(source, target / member)
            else:
                files.file(source, target / member)
    compile_below(files.at(target), files.root)
    files.add_libraries(present=_interpreters_libraries(), besides=site_packages.resolve())
    return Attributes()


def compile_below(folder: Path, root: Path) -> bool:
    """Compile everything in a folder of an image, whose root file system is read-only when it runs.

    The bytecode names no time and no path of this machine, so equal sources give equal layers, and Python
    never compares it with its source. Returns whether every file could be compiled: packages come with
    templates and tests that are no Python.
    """
    where = ("-s", str(root), "-p", "/", str(folder))
    how = ("-qq", "-f", "--invalidation-mode", "unchecked-hash")
    # One fresh process for all files, in their order: what a process has compiled before, and the seed of its
    # hashes, show in the bytecode.
    command = [sys.executable, "-m", "compileall", *how, *where]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    compiled = subprocess.run(command, env=environment, check=False).returncode == 0
    subprocess.run([sys.executable, "-c", _WITHOUT_REFERENCES, str(folder)], env=environment, check=True)
    return compiled


_WITHOUT_REFERENCES = """
import marshal, pathlib, sys
for file in sorted(pathlib.Path(sys.argv[1]).rglob("*.pyc")):
    header, code = file.read_bytes()[:16], file.read_bytes()[16:]
    file.write_bytes(header + marshal.dumps(marshal.loads(code), 2))
"""
"""Version 2 of the format writes equal values equally: later ones mark what the process refers to twice."""


@cache
def _interpreters_libraries() -> frozenset[Path]:
    modules = _standard_library().glob(f"lib-dynload/*{importlib.machinery.EXTENSION_SUFFIXES[0]}")
    wanted = [module for module in modules if not module.name.startswith(("_test", "_tkinter"))]
    return frozenset(libraries_of([Path(sys.executable).resolve(), *wanted]))


def _standard_library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _installed(name: str) -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError as missing:
        raise NotInstalled(f"{name} is not installed here: run `./make test`") from missing
