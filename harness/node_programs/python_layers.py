"""Layers of images that run Python: the interpreter of this very process, and packages beside it.

The interpreter is laid out as in docker.io/library/python, below /usr/local, wherever it is here.
"""

from __future__ import annotations

import compileall
import importlib.machinery
import importlib.metadata
import py_compile
import shutil
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
    *("lib2to3", "config-*", "_test*.so", "_tkinter*.so", "*.a", "*.opt-?.pyc"),
)


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
    _compile_stale(files.at(_STANDARD_LIBRARY), files.root)
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
            if ".." in member.parts or not source.is_file():
                continue
            if source.suffix == ".so":
                files.program(source, target / member)
            else:
                files.file(source, target / member)
    _compile_stale(files.at(target), files.root)
    files.add_libraries(present=_interpreters_libraries(), besides=site_packages.resolve())
    return Attributes()


def _compile_stale(folder: Path, root: Path) -> None:
    """Compile what has no bytecode or old one: a container's root file system is read-only."""
    compileall.compile_dir(
        folder,
        quiet=2,  # packages come with templates and tests that are no Python
        stripdir=root,
        prependdir="/",
        invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP,
    )


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
