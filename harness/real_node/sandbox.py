"""A sandbox: a machine of its own inside this one, made of namespaces, control groups and an overlay.

It has its own processes, mounts, host name, network (one link to this machine) and control groups, and shares
the kernel and the CPUs. Everything in it ends with the process that started it, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Network
from pathlib import Path
from typing import Self

from harness.build_cache import cache_folder
from harness.control_plane.server_process import ServerProcess
from harness.real_node.control_groups import NodeGroups

PROJECT = Path(__file__).resolve().parents[2]

Command = Sequence[str | Path]


class CommandFailed(Exception):
    """A command in a sandbox ended with an error; the message is its output."""


class Sandbox:
    """One running sandbox; use it as a context manager, or call `stop`. Needs root."""

    def __init__(self, name: str, folder: Path, *, visible: Sequence[Path] = ()) -> None:
        """Start it and wait until it can run commands (0.3 s).

        Args:
            name: its host name.
            folder: the folder of its log and the logs of its servers; it must exist.
            visible: folders to show in it, read-only, besides the project and its builds; / is there
                anyway, without other file systems.
        """
        self.name = name
        self.folder = folder
        self._servers: list[SandboxedServer] = []
        answer = folder / f"{name}.json"
        answer.unlink(missing_ok=True)
        wanted = {
            "name": name,
            "visible": [str(path.resolve()) for path in (PROJECT, cache_folder(), *visible)],
        }
        self._supervisor = ServerProcess(
            f"sandbox of {name}",
            [
                *(sys.executable, "-m", "harness.real_node.sandbox_process"),
                *(json.dumps(wanted), str(answer)),
            ],
            folder / f"{name}-sandbox.log",
            {"PYTHONPATH": str(PROJECT), "PYTHONDONTWRITEBYTECODE": "1"},
        )
        try:
            self._supervisor.wait_until(answer.exists, "first process")
        except BaseException:
            self.stop()
            raise
        answered = json.loads(answer.read_text())
        self.pid = int(answered["pid"])
        """Its first process, as this machine counts."""
        self.number = int(answered["number"])
        self.groups = NodeGroups(tuple(Path(path) for path in answered["groups"]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def address(self) -> str:
        """Its own address."""
        return f"198.18.{self.number}.2"

    @property
    def gateway(self) -> str:
        """The address that this machine has for it."""
        return f"198.18.{self.number}.1"

    @property
    def pod_subnet(self) -> str:
        """The addresses that its pods may have; this machine sends them into the sandbox."""
        return f"198.19.{self.number}.0/24"

    @property
    def service_subnet(self) -> IPv4Network:
        """Addresses for Services that this machine sends into the sandbox, for its kube-proxy."""
        return IPv4Network(f"100.64.{self.number}.0/24")

    def stop(self) -> None:
        """End everything in it and remove it; harmless when that has been done."""
        self._supervisor.stop()
        for server in self._servers:
            server.forget()

    def path(self, inside: str | Path) -> Path:
        """Name a file of the sandbox as this machine reaches it."""
        return Path(f"/proc/{self.pid}/root") / str(inside).lstrip("/")

    def command(self, command: Command, environment: Mapping[str, str] | None = None) -> list[str]:
        """Return the command, for this machine, that runs `command` inside: in its groups and namespaces."""
        variables = [f"{name}={value}" for name, value in (environment or {}).items()]
        return self.groups.command(
            ["nsenter", "--target", str(self.pid), "--all", "--", "env", *variables, *map(str, command)]
        )

    def run(
        self,
        *command: str | Path,
        environment: Mapping[str, str] | None = None,
        stdin: str = "",
        timeout_s: float = 120,
    ) -> str:
        """Run a command inside and return its output; raises `CommandFailed`."""
        done = subprocess.run(
            self.command(command, environment),
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
        if done.returncode != 0:
            raise CommandFailed(
                f"{' '.join(map(str, command))} in {self.name} ended with {done.returncode}: "
                f"{done.stderr.strip() or done.stdout.strip()}"
            )
        return done.stdout

    def start(
        self, name: str, *command: str | Path, environment: Mapping[str, str] | None = None
    ) -> SandboxedServer:
        """Start a server inside; it ends with the sandbox at the latest."""
        server = SandboxedServer(self, name, command, environment)
        self._servers.append(server)
        return server

    def cpuset(self, pid: int) -> str:
        """Read the CPUs that the kernel gives the control group of a process; `pid` as the sandbox counts."""
        for line in self.path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if "cpuset" in controllers.split(","):
                # Read from outside, /proc names the group from the hierarchy's own root.
                mount = self.groups.cpuset.parent
                return (mount / group.lstrip("/") / "cpuset.effective_cpus").read_text().strip()
        raise AssertionError(f"process {pid} of {self.name} is in no cpuset group")

    def write(self, inside: str, text: str, *, mode: int = 0o644) -> None:
        """Write a file inside, with the folders above it."""
        path = self.path(inside)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)


def connect(first: Sandbox, second: Sandbox) -> None:
    """Let two sandboxes and their pods reach each other, past this machine, which forwards nothing."""
    link = ("ip", "link", "add", f"to-{second.name}", "netns", str(first.pid), "type", "veth")
    peer = ("peer", "name", f"to-{first.name}", "netns", str(second.pid))
    subprocess.run([*link, *peer], check=True)
    for here, there in ((first, second), (second, first)):
        device = f"to-{there.name}"
        here.run("ip", "link", "set", device, "up")
        here.run("ip", "route", "add", there.address, "dev", device, "src", here.address)
        here.run("ip", "route", "add", there.pod_subnet, "via", there.address, "dev", device, "onlink")


class SandboxedServer(ServerProcess):
    """A server inside a sandbox, and its log file outside."""

    def __init__(
        self, sandbox: Sandbox, name: str, command: Command, environment: Mapping[str, str] | None
    ) -> None:
        super().__init__(
            f"{name} of {sandbox.name}",
            sandbox.command(command, environment),
            sandbox.folder / f"{sandbox.name}-{name}.log",
        )

    @property
    def program_pid(self) -> int:
        """The server itself, as this machine counts; raises `ProcessLookupError` when it has ended.

        nsenter, its parent, stays outside of the sandbox's processes.
        """
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        try:
            return int(children.read_text().split()[0])
        except (FileNotFoundError, IndexError):
            raise ProcessLookupError(f"{self.name} has ended:\n{self.log_tail()}") from None

    def signal(self, number: int) -> None:
        """Send the server a signal."""
        os.kill(self.program_pid, number)

    def terminate(self) -> None:
        """End it as a service is ended, and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGTERM)
        self.stop()

    def kill(self) -> None:
        """End it at once, as a crash would, and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.stop()

    def forget(self) -> None:
        """Take note that it ended with its sandbox."""
        self.stop()
