"""Starts and stops one KubeVirt-like session daemon, and runs domains on it."""

import json
import os
import platform
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.libvirt_session.cpuset_group import NAME, CpusetGroup, NoCpusetGroup
from harness.libvirt_session.pod import MEMORY_POLICY_CALLS, Pod
from harness.libvirt_session.threads import Affinities

# A user that no system gives to any client; only the daemon's own view of /etc knows it.
UID = 1_640_107
# With the name of the socket each one serves.
DAEMONS = {"virtqemud": "virtqemud-sock", "libvirtd": "libvirt-sock"}
# Where KubeVirt's daemon listens in its pod.
POD_RUN, POD_SOCKET = Path("/run/libvirt"), "virtqemud-sock"
PROJECT = Path(__file__).resolve().parent.parent.parent
QEMU_CONF = """\
# As KubeVirt's cmd/virt-launcher/qemu.conf has it, less the lines that need its image.
stdio_handler = "file"
vnc_tls = 0
remember_owner = 0
namespaces = [ ]
cgroup_controllers = [ ]
"""
_START_SECONDS = 60


class NoLibvirtHere(Exception):
    """Real domains cannot be run on this machine; the message has the reason."""


class DaemonDied(Exception):
    """The daemon did not come up; the message ends with its log."""


@dataclass(frozen=True, slots=True)
class RunningDomain:
    """One domain that runs, paused or not, under the session daemon."""

    handle: Any
    """libvirt.virDomain"""
    pid: int

    def affinities(self) -> Affinities:
        """Reads where QEMU's threads may run now."""
        return Affinities.of_process(self.pid)


@dataclass(frozen=True, slots=True)
class LibvirtSession:
    """A session daemon as it runs in a virt-launcher pod."""

    folder: Path
    uri: str
    group: CpusetGroup
    pod: Pod
    connection: Any
    """libvirt.virConnect, opened as root on the unprivileged daemon's socket, as a node agent does it."""

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """Holds the daemon, so that it answers nothing."""
        (daemon,) = [
            pid
            for pid in self.group.processes()
            if Path(f"/proc/{pid}/comm").read_text().strip() in ("libvirtd", "virtqemud")
        ]
        os.kill(daemon, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(daemon, signal.SIGCONT)

    @contextmanager
    def running(self, xml: str | bytes) -> Iterator[RunningDomain]:
        """Defines and starts a domain, paused; it is gone afterwards.

        Raises libvirt.libvirtError where libvirt refuses.
        """
        import libvirt

        domain = self.connection.defineXML(xml if isinstance(xml, str) else xml.decode())
        try:
            domain.createWithFlags(libvirt.VIR_DOMAIN_START_PAUSED)
            try:
                pid_file = self.folder / "run" / "libvirt" / "qemu" / "run" / f"{domain.name()}.pid"
                yield RunningDomain(domain, int(pid_file.read_text()))
            finally:
                if domain.isActive():  # it may have migrated
                    domain.destroy()
        finally:
            domain.undefineFlags(libvirt.VIR_DOMAIN_UNDEFINE_NVRAM)

    @property
    def hooks(self) -> Path:
        """The daemon's /etc/libvirt/hooks/qemu.d."""
        return self.folder / "libvirt" / "hooks" / "qemu.d"

    @contextmanager
    def confined_to(self, cpus: int) -> Iterator[None]:
        """Shrinks the pod's cpuset for a while."""
        before = self.group.effective()
        self.group.confine(cpus)
        try:
            yield
        finally:
            self.group.confine(before)


@contextmanager
def session_daemon(
    *, deny_memory_policy: bool = False, container: CpusetGroup | None = None
) -> Iterator[LibvirtSession]:
    """Runs a daemon, and leaves no process, file, user or control group behind.

    With `deny_memory_policy` it and its QEMUs run under a seccomp filter that answers EPERM to mbind and its
    kin. With `container` they run in that control group, which stays, and the socket is seen where KubeVirt's
    is in its pod. Raises NoLibvirtHere where that cannot be.
    """
    import libvirt

    program = _require()
    with ExitStack() as leave:
        # Short: the guest agent's socket lies deep below it and must fit into 107 characters.
        folder = Path(tempfile.mkdtemp(prefix="kvp-", dir="/run"))
        leave.callback(shutil.rmtree, folder)
        group = container or _own_group(folder, leave)
        environment = _furnish(folder)
        known_by = {f"/etc/{name}": str(folder / name) for name in ("passwd", "group", "libvirt")}
        if container is not None:
            POD_RUN.mkdir(exist_ok=True)
            known_by[str(POD_RUN)] = str(folder / "run" / "libvirt")
        pod = Pod(group=str(group.path), uid=UID, known_by=known_by, deny_memory_policy=deny_memory_policy)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifications:
            notifications.bind(str(folder / "notify"))
            os.chown(folder / "notify", UID, UID)
            process = leave.enter_context(_launched(folder, pod, program, environment))
            _await_ready(process, notifications, folder)
        path = folder / "run" / "libvirt" / DAEMONS[Path(program).name]
        if container is not None and path.name != POD_SOCKET:
            os.link(path, path.with_name(POD_SOCKET))
        uri = f"qemu+unix:///session?socket={path}"
        libvirt.registerErrorHandler(lambda *_: None, None)
        connection = libvirt.open(uri)
        leave.callback(connection.close)
        yield LibvirtSession(folder, uri, group, pod, connection)


def _own_group(folder: Path, leave: ExitStack) -> CpusetGroup:
    try:
        group = CpusetGroup.make(f"{NAME}-{folder.name.rpartition('-')[2]}-{os.getpid()}")
    except NoCpusetGroup as reason:
        raise NoLibvirtHere(str(reason)) from reason
    leave.callback(group.remove)
    return group


def _require() -> str:
    if os.geteuid() != 0:
        raise NoLibvirtHere("starting a daemon as another user in a cpuset of its own needs root")
    if platform.machine() not in MEMORY_POLICY_CALLS:
        raise NoLibvirtHere(f"no system call numbers are known here for {platform.machine()}")
    for name in DAEMONS:
        if program := shutil.which(name, path="/usr/sbin:/usr/local/sbin:/usr/bin"):
            break
    else:
        raise NoLibvirtHere(f"none of {', '.join(DAEMONS)} is installed (Debian: libvirt-daemon)")
    if shutil.which(f"qemu-system-{platform.machine()}") is None:
        raise NoLibvirtHere(
            f"no qemu-system-{platform.machine()} (Debian: qemu-system-x86 or qemu-system-arm)"
        )
    return program


def _furnish(folder: Path) -> dict[str, str]:
    """Makes the daemon's home and gives the environment that points into it."""
    folder.chmod(0o711)
    places = {
        "HOME": "home",
        "XDG_RUNTIME_DIR": "run",
        "XDG_CONFIG_HOME": "c",
        "XDG_CACHE_HOME": "cache",
    }
    for name in places.values():
        (folder / name).mkdir(mode=0o700)
    (folder / "run" / "libvirt").mkdir()
    (folder / "c" / "libvirt").mkdir()
    (folder / "c" / "libvirt" / "qemu.conf").write_text(QEMU_CONF)
    (folder / "libvirt" / "hooks" / "qemu.d").mkdir(parents=True)
    # KubeVirt's image has a program here, too. Without any at its start libvirt never searches for one again.
    (folder / "libvirt" / "hooks" / "qemu").write_text("#!/bin/sh\nexit 0\n")
    (folder / "libvirt" / "hooks" / "qemu").chmod(0o755)
    # Domains do not migrate between daemons that believe to be on one host.
    host = f'host_uuid = "{uuid.uuid4()}"\n'
    for name in DAEMONS:
        (folder / "c" / "libvirt" / f"{name}.conf").write_text(host)
    user = f"kvplace-tests:x:{UID}:{UID}::{folder}/home:/usr/sbin/nologin\n"
    (folder / "passwd").write_text(Path("/etc/passwd").read_text() + user)
    (folder / "group").write_text(Path("/etc/group").read_text() + f"kvplace-tests:x:{UID}:\n")
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, UID, UID)
    environment = {variable: str(folder / name) for variable, name in places.items()}
    return {
        **environment,
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "LC_ALL": "C",
        "NOTIFY_SOCKET": str(folder / "notify"),
    }


@contextmanager
def _launched(
    folder: Path, pod: Pod, program: str, environment: dict[str, str]
) -> Iterator["subprocess.Popen[bytes]"]:
    plan = {"parent": os.getpid(), "command": [program], "environment": environment}
    with (folder / "daemon.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "harness.libvirt_session.launcher", pod.to_json(), json.dumps(plan)],
            cwd=PROJECT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _await_ready(process: "subprocess.Popen[bytes]", notifications: socket.socket, folder: Path) -> None:
    """Waits for the daemon's own word that it serves, or for its end."""
    ended = os.pidfd_open(process.pid)
    try:
        while True:
            readable, _, _ = select.select([notifications.fileno(), ended], [], [], _START_SECONDS)
            if notifications.fileno() in readable:
                if b"READY=1" in notifications.recv(4096).splitlines():
                    return
                continue
            how = f"ended with {process.wait()}" if readable else f"was not ready within {_START_SECONDS} s"
            raise DaemonDied(f"the libvirt daemon {how}:\n{(folder / 'daemon.log').read_text()}")
    finally:
        os.close(ended)
