"""A registry of images on this machine; images are pushed to it by the commands of the pages.

It is the registry of go-containerregistry: it speaks the OCI protocol and keeps its images in memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

from harness.control_plane.server_process import ServerProcess, reserve_port
from harness.waiting import PATIENCE_S


@contextlib.contextmanager
def running_registry(programs: Path, folder: Path) -> Iterator[str]:
    """Run one without TLS while the block runs, and name it as images do: host and port."""
    reservation, port = reserve_port()
    address = f"127.0.0.1:{port}"

    def answers() -> bool:
        connection = HTTPConnection(address, timeout=PATIENCE_S)
        with contextlib.closing(connection), contextlib.suppress(ConnectionError):
            connection.request("GET", "/v2/")
            return connection.getresponse().status == 200
        return False

    command = ["setpriv", "--pdeathsig=KILL", "--", str(programs / "crane"), "registry", "serve"]
    with contextlib.closing(reservation):
        server = ServerProcess("registry", [*command, f"--address={address}"], folder / "registry.log")
        try:
            server.wait_until(answers, "answer")
            yield address
        finally:
            server.terminate()
