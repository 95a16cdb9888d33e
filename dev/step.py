"""Runs the commands of a longer job: quiet when they work, everything they stated when they do not."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn


class StepFailed(Exception):
    """A step of the set-up did not work; the message is for the person who typed the command."""


def say(sentence: str) -> None:
    """Reports the present step on stderr."""
    print(f"kvplace: {sentence}", file=sys.stderr, flush=True)


def in_ci() -> bool:
    """Whether the run is a CI run, where nothing may be skipped."""
    return os.environ.get("CI", "").lower() not in {"", "0", "false", "no"}


def run(
    what: str,
    command: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Runs a command and shows its output only when it fails."""
    say(what)
    started = time.monotonic()
    finished = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=None if environment is None else {**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if finished.returncode != 0:
        shown = " ".join(str(word) for word in command)
        raise StepFailed(f"{what}: exit code {finished.returncode} from `{shown}`\n{finished.stdout.strip()}")
    if (seconds := time.monotonic() - started) >= 5:
        say(f"  done in {seconds:.0f} s")


def show(command: Sequence[str | Path], *, cwd: Path, environment: Mapping[str, str] | None = None) -> int:
    """Runs a command and shows its output; gives its exit code.

    It may take its time to clean up after Ctrl-C, which the terminal sends to both; SIGTERM is passed on.
    """
    sys.stdout.flush()
    merged = None if environment is None else {**os.environ, **environment}
    process = subprocess.Popen([str(word) for word in command], cwd=cwd, env=merged)
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: process.terminate()),
    }
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


@contextmanager
def beside(
    commands: Mapping[str, Sequence[str | Path]], *, cwd: Path, environment: Mapping[str, str]
) -> Iterator[Callable[[], list[str]]]:
    """Runs commands while the block runs, with low priority; commands that still run at its end are ended.

    Gives a function that names the steps with an error so far. Their output is shown as it comes.
    """
    sys.stdout.flush()
    started = {
        name: subprocess.Popen(
            ["nice", *map(str, command)],
            cwd=cwd,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            process_group=0,  # so that its children end with it
        )
        for name, command in commands.items()
    }
    try:
        yield lambda: [name for name, process in started.items() if process.poll()]
    finally:
        for process in started.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()


def become(
    command: Sequence[str | Path], *, cwd: Path, environment: Mapping[str, str] | None = None
) -> NoReturn:
    """Ends this program by turning it into another one, which then gets every signal itself."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.chdir(cwd)
    words = [str(word) for word in command]
    os.execve(words[0], words, {**os.environ, **(environment or {})})
