"""One running Chromium; each test gets a profile of its own.

The protocol's own words, and no library between: tests need a small part of it, and it is the browser's
public interface.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

from harness.control_plane.server_process import ServerProcess

PROGRAMS = ("/usr/lib/chromium/chromium-headless-shell", "chromium-headless-shell", "chromium")
"""Debian's program itself comes first: the script of that name on PATH starts it as a child."""


class NoBrowser(Exception):
    """There is no Chromium on this machine."""


def chromium() -> str:
    """Find the program; raises NoBrowser, which names the package."""
    for name in PROGRAMS:
        if found := shutil.which(name):
            return found
    raise NoBrowser("no Chromium on PATH; on Debian: apt-get install chromium-headless-shell")


class Browser:
    """A running browser; `endpoint` is where DevTools clients connect."""

    def __init__(self, folder: Path) -> None:
        """Start it with its files in `folder`."""
        profile = folder / "profile"
        command = [
            *("setpriv", "--pdeathsig=KILL", "--"),
            chromium(),
            "--headless",
            "--no-sandbox",  # tests run as root, and everything that is loaded is ours
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--no-proxy-server",
            "--disable-background-networking",
            "--disable-component-update",
            "--force-color-profile=srgb",
            "--remote-debugging-port=0",
            f"--user-data-dir={profile}",
            "about:blank",
        ]
        self._process = ServerProcess(
            "chromium", command, folder / "chromium.log", {"HOME": str(folder), "TMPDIR": str(folder)}
        )
        told = profile / "DevToolsActivePort"
        try:
            self._process.wait_until(lambda: told.exists() and "\n" in told.read_text(), "DevTools port")
        except BaseException:
            self.stop()
            raise
        port, path = told.read_text().split("\n")[:2]
        self.endpoint = f"ws://127.0.0.1:{port}{path}"

    def stop(self) -> None:
        """End it with all of its processes, which are a group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()


@contextlib.contextmanager
def running_browser(folder: Path) -> Iterator[Browser]:
    """Run a browser while the block runs."""
    browser = Browser(folder)
    try:
        yield browser
    finally:
        browser.stop()
