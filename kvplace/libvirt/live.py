"""Sets the pins of a running VM through the libvirt in its pod, so that `virsh vcpupin` says what is true.

The socket belongs to the pod, so nothing is taken for granted. No link on the way to it is followed, which
could lead out of the container. The domain must have the UUID and the name with which the VM's own QEMU was
started. And any call may hang for ever: this module is for a process that can be killed
(`kvplace.libvirt.pinning_process`). It is the only place that imports libvirt-python, which costs 25 MB.
"""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import libvirt

from kvplace.core.errors import Misconfigured, Unavailable
from kvplace.core.scalars import CpuMask
from kvplace.libvirt.domain_pins import SOCKET, DomainPins

_LONGEST_COMMAND = 1 << 20
_LIVE: int = libvirt.VIR_DOMAIN_AFFECT_LIVE
_CONFIG: int = libvirt.VIR_DOMAIN_AFFECT_CONFIG


class NoLibvirt(Unavailable):
    """The libvirt of the pod does not answer, or refuses."""


class AnotherDomain(Misconfigured):
    """The socket leads to a libvirt that does not run this VM."""


def pin_domain(qemu_pid: int, pins: DomainPins, *, socket: str = SOCKET, proc: Path = Path("/proc")) -> int:
    """Set the pins that differ and return how many did.

    `socket` is a path below the root of QEMU's container. Pins are also set in the definition that a restart
    of the domain would use. libvirt sets the thread of a vCPU or I/O thread and QEMU's main thread; other
    threads stay where they are. Not transactional: after an error some pins may be set. May hang. Raises
    NoLibvirt or AnotherDomain.
    """
    with _domain_of(qemu_pid, socket, proc) as (connection, domain):
        flags = _LIVE | (_CONFIG if _asked(domain.isPersistent) else 0)
        width = int(_asked(connection.getCPUMap)[0])
        changes = 0
        present = _asked(domain.vcpuPinInfo, _LIVE)
        for vcpu, cpus in pins.vcpus.items():
            wanted = _cpumap(cpus, width)
            if vcpu >= len(present) or tuple(present[vcpu]) != wanted:
                _asked(domain.pinVcpuFlags, vcpu, wanted, flags)
                changes += 1
        if pins.emulator:
            wanted = _cpumap(pins.emulator, width)
            if tuple(_asked(domain.emulatorPinInfo, _LIVE)) != wanted:
                _asked(domain.pinEmulator, wanted, flags)
                changes += 1
        for number, cpus in pins.io_threads.items():
            # What libvirt reports of I/O threads is their affinity and not the pin that it keeps.
            _asked(domain.pinIOThread, number, _cpumap(cpus, width), flags)
            changes += 1
        return changes


@contextmanager
def _domain_of(qemu_pid: int, socket: str, proc: Path) -> Iterator[tuple[Any, Any]]:
    uuid, name = _identity(qemu_pid, proc)
    where = f"the libvirt at {socket} of process {qemu_pid}"
    descriptor = _open_socket(proc / str(qemu_pid) / "root", socket)
    try:
        os.environ["LIBVIRT_AUTOSTART"] = "0"  # else a daemon of our own would be started where none answers
        libvirt.registerErrorHandler(_ignore, None)
        connection = _asked(libvirt.open, f"qemu+unix:///session?socket=/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    try:
        try:
            domain = connection.lookupByUUIDString(uuid)
            found = domain.name()
        except libvirt.libvirtError as error:
            if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:
                raise AnotherDomain(f"{where} has no domain {uuid}") from None
            raise NoLibvirt(f"{where}: {error}") from None
        if found != name:
            raise AnotherDomain(f"{where} calls {uuid} {found!r}, not {name!r}")
        yield connection, domain
    finally:
        connection.close()


def _identity(qemu_pid: int, proc: Path) -> tuple[str, str]:
    """Read the UUID and the name that QEMU was started with."""
    try:
        with (proc / str(qemu_pid) / "cmdline").open("rb") as file:
            words = file.read(_LONGEST_COMMAND).decode(errors="replace").split("\0")
    except OSError as error:
        raise NoLibvirt(f"the command line of process {qemu_pid} cannot be read: {error.strerror}") from None
    options = dict(itertools.pairwise(words))
    guest = options.get("-name", "").partition(",")[0].removeprefix("guest=")
    if not guest or not options.get("-uuid"):
        raise AnotherDomain(f"process {qemu_pid} has no -uuid or no -name guest=: libvirt did not start it")
    return options["-uuid"], guest


def _open_socket(root: Path, path: str) -> int:
    """Open a socket below a container's root without following a link, but one to its own folder."""
    *folders, name = Path(path).parts
    held: list[int] = []
    try:
        held.append(os.open(root, os.O_PATH | os.O_DIRECTORY))
        for folder in folders:
            held.append(os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=held[-1]))
        if stat.S_ISLNK(os.stat(name, dir_fd=held[-1], follow_symlinks=False).st_mode):
            name = os.readlink(name, dir_fd=held[-1])
            if "/" in name:
                raise AnotherDomain(f"{root / path} is a link to {name}, out of its folder")
        found = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=held[-1])
    except OSError as error:
        raise NoLibvirt(f"{root / path} cannot be opened: {error.strerror}") from None
    finally:
        for descriptor in held:
            os.close(descriptor)
    if not stat.S_ISSOCK(os.fstat(found).st_mode):
        os.close(found)
        raise AnotherDomain(f"{root / path} is not a socket")
    return found


def _asked(call: Callable[..., Any], *arguments: object) -> Any:
    try:
        return call(*arguments)
    except libvirt.libvirtError as error:
        raise NoLibvirt(f"libvirt: {error}") from None


def _cpumap(cpus: CpuMask, width: int) -> tuple[bool, ...]:
    """Spread a set over as many flags as libvirt counts CPUs; it drops what lies beyond."""
    if not cpus & (1 << width) - 1:
        raise NoLibvirt(f"libvirt knows {width} CPUs, and none of the pin's")
    return tuple(bool(cpus >> cpu & 1) for cpu in range(width))


def _ignore(_context: object, _error: Sequence[object]) -> None:
    """Keep libvirt from printing errors that are raised anyway."""
