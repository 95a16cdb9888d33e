"""Run a pod's container as a process of this machine with the view of the container.

The process gets a mount namespace with a throw-away overlay of this machine's root, with the pod's
volumes mounted as in its spec; that takes root. So a program under test finds its files and sockets at
their real paths, may write anywhere, and changes nothing outside its volumes. It runs as the user the pod
asks for, without capabilities, and dies with the process that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from harness.control_plane.pod_files import Json, Mount


class NotStarted(Exception):
    """A container's root could not be prepared: its program never ran, so another try cannot help."""


SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_KERNELS_OWN = ("/proc", "/sys", "/dev")
_OF_ITS_OWN = {"/run": "755", "/tmp": "1777"}


@dataclass(frozen=True, slots=True)
class ContainerRequest:
    """One container that a hollow node wants started."""

    pod: Json
    name: str
    image: str
    command: tuple[str, ...]
    args: tuple[str, ...]
    environment: Mapping[str, str]
    mounts: tuple[Mount, ...]
    user: int
    group: int
    scratch: Path
    """An existing folder for the runtime's own use; it outlives the container."""
    log: Path


class RunningContainer(Protocol):
    """A started container, as a hollow node sees it."""

    async def exited(self) -> int:
        """Wait for its end and return the exit code."""

    async def run(self, command: Sequence[str], timeout_s: float) -> tuple[int, str]:
        """Run a command inside, as an exec probe does; (exit code, output), 124 when it took too long."""

    async def stop(self, grace_s: float) -> None:
        """Ask it to end, and kill it after `grace_s`; returns when it is gone."""


class ContainerRunner(Protocol):
    """The part that really starts containers: `ProcessRunner`, or a test's own."""

    async def __call__(self, request: ContainerRequest) -> RunningContainer | None:
        """Start a container, or return None: it is then hollow, runs at once and passes every probe."""


@dataclass(frozen=True, slots=True)
class Image:
    """The content of an image's configuration: the command of a container, unless the pod sets another."""

    entrypoint: tuple[str, ...]
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


class ProcessRunner:
    """Start the containers of known images as processes; containers of other images stay hollow."""

    def __init__(self, images: Mapping[str, Image]) -> None:
        self.images = images

    async def __call__(self, request: ContainerRequest) -> RunningContainer | None:
        image = self.images.get(request.image)
        if image is None:
            return None
        return await start_process(request, image)


def python_image(*module: str) -> Image:
    """Return an image with `python -m MODULE` of this very interpreter as the entry point."""
    folder = Path(sys.executable).parent
    environment = {"PATH": f"{folder}:{SEARCH_PATH}", "PYTHONPATH": str(Path.cwd()), "PYTHONUNBUFFERED": "1"}
    return Image((sys.executable, "-m", *module), environment=environment)


class ProcessContainer:
    """A container that is a process in a mount namespace of its own."""

    def __init__(self, process: asyncio.subprocess.Process, enter: Sequence[str]) -> None:
        self._process = process
        self._enter = enter

    @property
    def pid(self) -> int:
        return self._process.pid

    async def exited(self) -> int:
        code = await self._process.wait()
        return code if code >= 0 else 128 - code

    async def run(self, command: Sequence[str], timeout_s: float) -> tuple[int, str]:
        probe = await asyncio.create_subprocess_exec(
            *("nsenter", f"--target={self.pid}", "--mount", "--root", "--wd", "--"),
            *self._enter,
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(timeout_s):
                output, _ = await probe.communicate()
        except TimeoutError:
            return 124, f"no answer within {timeout_s:g} s"
        finally:
            if probe.returncode is None:
                _signal_group(probe.pid, signal.SIGKILL)
                await probe.communicate()
        code = probe.returncode if probe.returncode is not None else 255
        return code, output.decode(errors="replace").strip()

    async def stop(self, grace_s: float) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                # Like a container runtime: the signal goes to the container's first process alone.
                self._process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._process.wait()
        _signal_group(self.pid, signal.SIGKILL)
        await self._process.wait()


async def start_process(request: ContainerRequest, image: Image) -> ProcessContainer:
    """Start a container's process and wait until it is inside its own root, so that probes may follow."""
    if os.geteuid() != 0:
        raise PermissionError("containers of hollow nodes need root, for a root file system of their own")
    entrypoint = request.command or image.entrypoint
    arguments = request.args or (() if request.command else image.command)
    environment = {"PATH": SEARCH_PATH, "HOME": "/", **image.environment, **request.environment}
    identity = [
        *("setpriv", "--pdeathsig=KILL", "--no-new-privs", "--bounding-set=-all"),
        *(f"--reuid={request.user}", f"--regid={request.group}", "--clear-groups"),
    ]
    enter = ["env", "-i", *(f"{name}={value}" for name, value in environment.items()), *identity]

    inside, outside = os.pipe()
    try:
        with request.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *("setpriv", "--pdeathsig=KILL", "unshare", "--mount", "--propagation=private"),
                *("sh", "-c", _prepare_root(request, entrypoint[0])),
                *("chroot", str(request.scratch / "root")),
                *enter,
                *("sh", "-c", 'printf started >&0; exec "$@" </dev/null', "sh"),
                *entrypoint,
                *arguments,
                # Standard input is the writing end of a pipe: a word in it reports that the root is prepared.
                stdin=outside,
                stdout=log,
                stderr=log,
                start_new_session=True,
                # A user's PATH may lack the folder that chroot is in.
                env={"PATH": f"{os.environ.get('PATH', '')}:{SEARCH_PATH}"},
            )
    except BaseException:
        os.close(inside)
        raise
    finally:
        os.close(outside)
    try:
        if not await _read_to_end(inside):
            raise NotStarted(
                f"container {request.name} of image {request.image} was not started:\n{log_tail(request.log)}"
            )
    except BaseException:
        _signal_group(process.pid, signal.SIGKILL)
        await process.wait()
        raise
    return ProcessContainer(process, enter)


def log_tail(log: Path) -> str:
    """Return the end of a container's log, as much as a kubelet shows of it; empty when there is none."""
    try:
        return log.read_text(errors="replace")[-2048:].strip()
    except FileNotFoundError:
        return ""


def _prepare_root(request: ContainerRequest, program: str) -> str:
    """Write the shell script that makes the container's root and then becomes the command in its
    arguments.
    """
    scratch, root = shlex.quote(str(request.scratch)), shlex.quote(str(request.scratch / "root"))
    overlay = f"lowerdir=/,upperdir={request.scratch}/upper,workdir={request.scratch}/work"
    lines = [
        "set -e",
        f"mount -t tmpfs -o mode=755 container {scratch}",
        f"cd {scratch}; mkdir upper work root",
        f"mount -t overlay -o {shlex.quote(overlay)} container root",
    ]
    shared = []
    for point in _top_level_mounts():
        if point in _OF_ITS_OWN:
            lines.append(f"mount -t tmpfs -o mode={_OF_ITS_OWN[point]} container root{point}")
        elif not str(request.scratch).startswith(f"{point}/") or point in _KERNELS_OWN:
            shared.append(Path(point))
            lines.append(f"mount --rbind {shlex.quote(point)} root{shlex.quote(point)}")
    # An image is readable for all; an interpreter in a home directory is made readable in the overlay,
    # and only there: all other files are this machine's own.
    lines += [
        f"chmod a+rx root{shlex.quote(str(folder))}"
        for folder in _ancestors(program)
        if not any(folder.is_relative_to(point) for point in shared)
    ]
    for mount in request.mounts:
        source, target = shlex.quote(str(mount.source)), shlex.quote(mount.target)
        if mount.source.is_dir():
            lines.append(f"chroot {root} mkdir -p {target}")
        else:
            parent = shlex.quote(str(Path(mount.target).parent))
            lines.append(f'chroot {root} sh -c \'mkdir -p "$1"; : >>"$2"\' sh {parent} {target}')
        # Absolute links such as /var/run must be followed inside the new root, not in ours.
        lines.append(f'at="$(chroot {root} realpath {target})"')
        lines.append(f'mount --bind {source} {root}"$at"')
        if mount.read_only:
            lines.append(f'mount -o remount,bind,ro {root}"$at"')
    return "\n".join([*lines, 'exec "$0" "$@"'])


def _top_level_mounts() -> list[str]:
    points = {
        line.split()[4].encode().decode("unicode_escape")
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
    } - {"/"}
    return sorted(
        point
        for point in points
        if Path(point).is_dir() and not any(point.startswith(f"{other}/") for other in points)
    )


def _ancestors(program: str) -> list[Path]:
    """List the folders that a user must be able to enter to run a program, Python and this repository."""
    paths = {Path.cwd(), Path(sys.executable), Path(sys.executable).resolve()}
    if os.path.isabs(program):  # noqa: PTH117 - a word, maybe not a path at all
        paths |= {Path(program), Path(program).resolve()}
    return sorted({parent for path in paths for parent in path.parents} - {Path("/")})


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


async def _read_to_end(descriptor: int) -> bytes:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb")
    )
    try:
        return await reader.read()
    finally:
        transport.close()
