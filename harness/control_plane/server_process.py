"""A server that ends with the process that started it.

Every Go program of the control plane reads its standard input and ends at end of file. The pipe's other end
lives in this process only, so no exit path of ours, SIGKILL included, leaves a server behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from harness.waiting import PATIENCE_S


class ServerDied(Exception):
    """A server ended, or did not become ready; the message carries the end of its log."""


class ServerProcess:
    """One running server and its log file."""

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.log = log
        self._command = command
        self._environment = None if environment is None else {**os.environ, **environment}
        self.start_again()

    def start_again(self) -> None:
        """Start it with the same command, after `kill` or `stop`."""
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                # A Ctrl-C at the terminal reaches the starter alone, which then stops its servers in order.
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait_until(self, is_ready: Callable[[], bool], what: str) -> None:
        """Wait until `is_ready` is true; raises `ServerDied` when the server ends or takes too long."""
        deadline = time.monotonic() + PATIENCE_S
        while not is_ready():
            if not self.is_running:
                raise ServerDied(f"{self.name} ended with {self._process.returncode}:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise ServerDied(f"{self.name} has no {what} after {PATIENCE_S:.0f} s:\n{self.log_tail()}")
            # Readiness of a foreign server has no event to wait for.
            time.sleep(0.02)

    def log_tail(self, lines: int = 30) -> str:
        """Return the last lines of the server's log; empty when the log is gone."""
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return ""

    def close_input(self) -> None:
        """Ask the server to end."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def stop(self) -> None:
        """End the server and wait until it is gone; harmless when it is gone already."""
        self.close_input()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def terminate(self) -> None:
        """End a server that knows SIGTERM instead of the end of its input, and wait until it is gone."""
        self._process.terminate()
        self.stop()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop it in the middle of its work while the block runs (SIGSTOP, SIGCONT)."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End the server at once, as a crash would, and wait until it is gone."""
        self._process.kill()
        self.stop()


def reserve_port() -> tuple[socket.socket, int]:
    """Reserve a free loopback port for a server that will be started, and started again.

    The socket is bound, never listening: as long as it is held no other process is given the port, and all
    connections go to the server. That can listen with SO_REUSEADDR, as asyncio's servers do, or with
    SO_REUSEPORT (--permit-port-sharing).
    """
    reservation = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reservation.bind(("127.0.0.1", 0))
    return reservation, int(reservation.getsockname()[1])
