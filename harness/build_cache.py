"""Build something expensive once, and keep it for later test runs.

A result is a folder; its name is made from its inputs. Two processes that want the same result at once share
one build, and a build that dies half-way leaves nothing that could be mistaken for a result.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

Say = Callable[[str], None]


class BuildFailed(Exception):
    """Something could not be built; the message ends with the output of the failed command."""


class NotInstalled(BuildFailed):
    """A compiler or another program is missing on this machine, and could not be installed."""


def say_to_stderr(message: str) -> None:
    """Print a message for the person at the terminal."""
    print(message, file=sys.stderr, flush=True)


def built_once(
    name: str,
    fingerprint: str,
    build: Callable[[Path], None],
    *,
    contents: str,
    unused_days: float,
    say: Say = say_to_stderr,
) -> Path:
    """Return the folder of a result; `build` fills an empty folder when there is none yet.

    Results of the same name that no client has asked for in `unused_days` are removed after a build.
    """
    place = _place(name, fingerprint)
    if not place.is_dir():
        with only_one(place, lambda: say(f"waiting for another process that builds {contents}")):
            if not place.is_dir():
                with temporary_beside(place) as folder:
                    build(folder)
                    folder.rename(place)
                _drop_unused(name, place, unused_days)
    # The modification time is the time of the last use.
    os.utime(place)
    return place


def is_kept(name: str, fingerprint: str) -> bool:
    """Whether this result is there and need not be built."""
    return _place(name, fingerprint).is_dir()


def cache_folder() -> Path:
    """Return the folder of all results, made when missing."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "kvplace" / "control-plane"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def only_one(place: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Let one process at a time make `place`; the lock falls with its holder, however that dies."""
    with place.with_name(f".{place.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def temporary_beside(place: Path) -> Iterator[Path]:
    """Give a folder on the same file system as `place`; files left in it at the end are removed.

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


def _place(name: str, fingerprint: str) -> Path:
    return cache_folder() / f"{name}-{fingerprint}"


def _drop_unused(name: str, keep: Path, unused_days: float) -> None:
    too_old = time.time() - unused_days * 86400
    for place in cache_folder().glob(f"{name}-*"):
        if place != keep and place.is_dir() and place.stat().st_mtime < too_old:
            shutil.rmtree(place, ignore_errors=True)
