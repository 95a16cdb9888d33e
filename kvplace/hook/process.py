"""The process of the hook: its folders and names, read from the environment once, its log and its children.

Paths are plain text here and in all that the server and the probe import: pathlib would take a tenth of the
CPU time of a start. A log line is one JSON object on stderr, which virt-launcher's pod log collects.

A forked child that lives for a moment works out one answer. The work (the XML library, the trial of memory
policies) takes as much memory as the server and is done two or three times in a VM's life, so the child loads
the libraries and frees them by ending. A document that crashes the XML library crashes the child and not the
server, and a child that hangs is killed.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from kvplace.core.errors import GrpcStatus, KvplaceError, grpc_status_of
from kvplace.core.scalars import NodeName

_STDERR = 2


@dataclass(frozen=True, slots=True)
class PodEnvironment:
    """Everything outside the process that its answers depend on."""

    pod_folder: str
    """The downward API volume: `placement`, `cpu-map`, `request`, `uid`, `name`, `namespace`."""
    hook_folder: str
    """Where virt-launcher searches for our socket."""
    container: str
    node: NodeName
    """Name of the node, empty when it is not known."""
    libvirt_hook_folder: str = "/var/run/kvplace-libvirt-hooks"
    """The folder that the container of libvirt has as /etc/libvirt/hooks/qemu.d."""
    stays: bool = False
    """Whether the kubelet ends this container with the pod, so that it must not end when KubeVirt reports
    Shutdown: the kubelet would start it again."""
    socket_name: str = ""
    """Name of our socket if a Plugin of KubeVirt sets it; empty for the name of a hook sidecar."""
    proc: str = "/proc"
    sys: str = "/sys"

    @classmethod
    def of(cls, environ: Mapping[str, str] = os.environ) -> PodEnvironment:
        """Read KubeVirt's and kvplace's variables."""
        return cls(
            pod_folder=environ.get("KVPLACE_POD_FOLDER") or "/etc/kvplace-pod",
            hook_folder=environ.get("KVPLACE_HOOK_FOLDER") or "/var/run/kubevirt-hooks",
            container=environ.get("CONTAINER_NAME") or "hook-sidecar",
            node=NodeName(environ.get("NODE_NAME", "")),
            libvirt_hook_folder=environ.get("KVPLACE_LIBVIRT_HOOK_FOLDER")
            or "/var/run/kvplace-libvirt-hooks",
            stays=environ.get("KVPLACE_STAYS_AFTER_SHUTDOWN") == "true",
            socket_name=environ.get("KVPLACE_SOCKET_NAME", ""),
            proc=environ.get("KVPLACE_PROC_FOLDER") or "/proc",
            sys=environ.get("KVPLACE_SYS_FOLDER") or "/sys",
        )

    @property
    def socket(self) -> str:
        """Our socket; its name contains the container's, since KubeVirt distinguishes sidecars by it."""
        return f"{self.hook_folder}/{self.socket_name or f'kvplace-{self.container}.sock'}"

    @property
    def staging_folder(self) -> str:
        """Where the socket is made; virt-launcher finds only files that are one level down."""
        return f"{self.hook_folder}/.staging"


def log(level: str, msg: str, about: Mapping[str, str] | None = None) -> None:
    """Write one line; `about` has the VM and the node. A closed stderr is not an error."""
    now = time.time()
    line = {
        "ts": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now))}.{int(now % 1 * 1000):03d}Z",
        "level": level,
        "msg": msg,
        "component": "hook",
        **(about or {}),
    }
    with suppress(OSError):
        os.write(_STDERR, json.dumps(line).encode() + b"\n")


TIME_LIMIT_S = 8.0
"""virt-handler gives up on all calls of one start together after 20 seconds."""

_CHUNK_BYTES = 1 << 16


class Outcome(NamedTuple):
    """The result: the answer when the status is OK, else one sentence."""

    status: GrpcStatus
    output: bytes


class ChildProcess:
    """A child at work: `pipe` is readable when it has written, `deadline` is in monotonic seconds."""

    def __init__(self, pid: int, pipe: int) -> None:
        self.pid = pid
        self.pipe = pipe
        self.deadline = time.monotonic() + TIME_LIMIT_S
        self._output = bytearray()

    @classmethod
    def start(cls, work: Callable[[], bytes]) -> ChildProcess:
        """Fork a child that does the work; raises OSError when there can be no more processes."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        try:
            pid = os.fork()
        except OSError:
            os.close(reading)
            os.close(writing)
            raise
        if pid == 0:
            _work_and_exit(work, writing)
        os.close(writing)
        return cls(pid, reading)

    def read(self) -> bool:
        """Read the child's output so far; True at its end."""
        while True:
            try:
                chunk = os.read(self.pipe, _CHUNK_BYTES)
            except BlockingIOError:
                return False
            if not chunk:
                return True
            self._output += chunk

    def end(self) -> Outcome:
        """Kill and reap the child, finished or not, and return its outcome."""
        os.close(self.pipe)
        os.kill(self.pid, signal.SIGKILL)
        _, wait_status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(wait_status)
        if self._output and code == 0:
            return Outcome(GrpcStatus(self._output[0]), bytes(self._output[1:]))
        if time.monotonic() >= self.deadline:
            sentence = f"pinning took longer than {TIME_LIMIT_S:g} seconds; is the node out of CPU time?"
        else:
            sentence = f"the process that pins ended with {code}; is the sidecar's memory limit too low?"
        return Outcome(GrpcStatus.UNAVAILABLE, sentence.encode())


def _work_and_exit(work: Callable[[], bytes], pipe: int) -> None:
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _prefer_to_be_killed()
        try:
            outcome = Outcome(GrpcStatus.OK, work())
        except KvplaceError as error:
            outcome = Outcome(grpc_status_of(error), str(error).encode())
        rest = memoryview(bytes([outcome.status]) + outcome.output)
        while rest:
            rest = rest[os.write(pipe, rest) :]
        code = 0
    finally:
        os._exit(code)


def _prefer_to_be_killed() -> None:
    """Where memory runs out, the kernel should kill this process and not the server."""
    with suppress(OSError):
        adjustment = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(adjustment, b"1000")
        os.close(adjustment)
