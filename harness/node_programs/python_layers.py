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
from fnmatch import fnmatch
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
    *("site-packages", "dist-packages", "test", "tests", "*.a", "__pycache__"),
    *("config-*", "distutils", "ensurepip", "lib2to3", "venv"),
    *("curses", "dbm", "idlelib", "pydoc_data", "sqlite3", "tkinter", "turtle.py", "turtledemo"),
)
"""Of the standard library: the parts that build and test Python, or that no program of an image can use."""
_MODULES_LEFT_OUT = (
    *("_ctypes_test.*", "_test*", "_xx*", "xx*"),
    *("_curses*", "_dbm.*", "_gdbm.*", "_sqlite3.*", "_tkinter.*", "nis.*", "ossaudiodev.*", "readline.*"),
)
"""Extension modules of the same kind, with the libraries that only they need."""
_ABOUT_THE_INSTALLATION = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}
"""Files of a distribution's metadata that differ between installations of the same distribution."""


def interpreter_layer() -> Layer:
    """Return the lowest layer: the interpreter and the standard library, with its bytecode."""
    program = Path(sys.executable).resolve()
    inputs = (sys.version, str(program), str(program.stat().st_mtime_ns), installed_packages())
    return Layer("python", inputs, _lay_out_interpreter)


def packages_layer(name: str, pins: Sequence[Requirement], target: Path, left_out: Sequence[str]) -> Layer:
    """Return a layer with the packages of this environment that the pins name, in a folder.

    Without the files that a pattern of `left_out` names, below that folder. Raises `BuildFailed` when the
    environment has another version than the pin states.
    """
    for pin in pins:
        installed = _installed(pin.name).version
        if not pin.specifier.contains(installed, prereleases=True):
            raise BuildFailed(
                f"{pin} is pinned, but {pin.name} {installed} is installed here: run `./make test`"
            )
    inputs = (sys.version, str(target), installed_packages(), *sorted(map(str, pins)), *left_out)
    return Layer(name, inputs, lambda root: _lay_out_packages(RootFilesystem(root), pins, target, left_out))


def _lay_out_interpreter(root: Path) -> Attributes:
    files = RootFilesystem(root)
    files.skeleton()
    files.users()
    program = Path(sys.executable).resolve()
    files.file(program, f"/usr/local/bin/{VERSION}")
    for name in ("python", "python3"):
        files.link(f"/usr/local/bin/{name}", VERSION)
    left_out = shutil.ignore_patterns(*_LEFT_OUT, *_MODULES_LEFT_OUT)
    shutil.copytree(_standard_library(), files.at(_STANDARD_LIBRARY), ignore=left_out)
    compile_below(files.at(_STANDARD_LIBRARY), files.root)
    for library in interpreters_libraries():
        inside = library.is_relative_to(sys.base_prefix) and not library.is_relative_to("/usr/lib")
        files.file(library, f"/usr/local/lib/{library.name}" if inside else library)
    _strip([files.at(f"/usr/local/bin/{VERSION}"), *files.at("/usr/local/lib").rglob("*.so*")])
    files.index_libraries()
    return Attributes()


def _lay_out_packages(
    files: RootFilesystem, pins: Iterable[Requirement], target: Path, left_out: Iterable[str]
) -> Attributes:
    site_packages = Path(sysconfig.get_path("platlib"))
    for pin in pins:
        for member in _installed(pin.name).files or ():
            source = Path(str(member.locate())).resolve()
            of_here = member.name in _ABOUT_THE_INSTALLATION or member.suffix == ".pyc"
            if of_here or ".." in member.parts or not source.is_file():
                continue
            if source.suffix == ".so":
                files.program(source, target / member)
            else:
                files.file(source, target / member)
    for path in {path for pattern in left_out for path in files.at(target).glob(pattern)}:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    _strip(files.at(target).rglob("*.so"))
    compile_below(files.at(target), files.root)
    files.add_libraries(present=interpreters_libraries(), besides=site_packages.resolve())
    return Attributes()


def compile_below(folder: Path, root: Path) -> bool:
    """Compile everything in a folder of an image, since its root file system is read-only when it runs.

    The bytecode names no time and no path of this machine, so equal sources give equal layers, and Python
    never compares it with its source. Returns whether every file could be compiled: packages come with
    templates and tests that are not Python.
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


def _strip(programs: Iterable[Path]) -> None:
    """Remove the symbols of programs and libraries that only a debugger reads: often most of their bytes."""
    if shutil.which("strip") is None:
        raise NotInstalled("strip, which makes images small, is not installed here: apt-get install binutils")
    for program in programs:
        program.chmod(program.stat().st_mode | 0o200)
        subprocess.run(["strip", "--strip-unneeded", program], check=True)


_WITHOUT_REFERENCES = """
import marshal, pathlib, sys
for file in sorted(pathlib.Path(sys.argv[1]).rglob("*.pyc")):
    header, code = file.read_bytes()[:16], file.read_bytes()[16:]
    file.write_bytes(header + marshal.dumps(marshal.loads(code), 2))
"""
"""Version 2 of the format writes equal values equally: later ones mark what the process refers to twice."""


@cache
def interpreters_libraries() -> frozenset[Path]:
    """Return the shared libraries of the interpreter and its modules, which the lowest layer has."""
    modules = _standard_library().glob(f"lib-dynload/*{importlib.machinery.EXTENSION_SUFFIXES[0]}")
    wanted = [
        module
        for module in modules
        if not any(fnmatch(module.name, pattern) for pattern in _MODULES_LEFT_OUT)
    ]
    return frozenset(libraries_of([Path(sys.executable).resolve(), *wanted]))


def _standard_library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _installed(name: str) -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError as missing:
        raise NotInstalled(f"{name} is not installed here: run `./make test`") from missing
