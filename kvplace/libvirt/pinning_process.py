"""`python -m kvplace.libvirt.pinning_process`: sets the pins of one running VM, and is killed when it hangs.

It uses the libvirt in the VM's pod, so that `virsh vcpupin` prints the real pins. One request on stdin, one
answer on stdout, and an end:

    {"pid": 4711, "socket": "run/libvirt/virtqemud-sock",
     "pins": {"vcpus": {"0": "4"}, "otherVcpus": "4-5", "emulator": "2-3", "ioThreads": {}}}

    {"changed": 2}  or  {"error": "one sentence"}

A user who controls the VM's pod also controls the socket and the program behind it, so nothing is taken for
granted. No link on the way to the socket is followed, which could lead out of the container. The domain must
have the UUID and the name that started the VM's own QEMU. Every size is this machine's or the placement's:
libvirt's own Python binding is not used, because it allocates as much as the peer states, for each call. Any
call may hang. So the process has bounded memory and CPU time, and once it is connected it is a user that owns
nothing, without capabilities: the connection is all that it has. Another VM gets another process.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import resource
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_char_p, c_int, c_uint, c_void_p
from pathlib import Path
from typing import Any

from kvplace.core.errors import KvplaceError, Misconfigured, Unavailable
from kvplace.libvirt.domain_pins import SOCKET, DomainPins

_LONGEST_COMMAND = 1 << 20
_LIVE, _CONFIG = 1, 2  # virDomainModificationImpact
_NO_DOMAIN = 42  # VIR_ERR_NO_DOMAIN
MOST_VCPUS = 4096
"""vCPUs of one domain with a pin that is set; KubeVirt allows 512, and the number is the peer's."""

_ON_ERROR = ctypes.CFUNCTYPE(None, c_void_p, c_void_p)
_SILENT = _ON_ERROR(lambda _context, _error: None)
"""Keeps libvirt from printing errors that are raised anyway."""
_MAP = (c_void_p, c_uint, c_char_p, c_int, c_uint)
MOST_MEMORY = 64 << 20
"""Bytes of private memory: about 9 MiB are needed, and libvirt reads messages of up to 32 MiB."""
_MOST_CPU_S = 5
_LONGEST_ERROR = 1000
"""Characters of an error: its words come from a libvirt in the pod of a VM."""
_NO_OWNER = 2_000_004_711
"""A user and group that no process and no file of a node has."""
_PR_SET_NO_NEW_PRIVS = 38


class NoLibvirt(Unavailable):
    """The libvirt of the pod does not answer, or refuses."""


class AnotherDomain(Misconfigured):
    """The socket leads to a libvirt that does not run this VM."""


class _Error(ctypes.Structure):
    """The first members of virError."""

    _fields_ = (("code", c_int), ("domain", c_int), ("message", c_char_p))


_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "virConnectOpen": (c_void_p, (c_char_p,)),
    "virConnectClose": (c_int, (c_void_p,)),
    "virDomainFree": (c_int, (c_void_p,)),
    "virDomainGetEmulatorPinInfo": (c_int, (c_void_p, c_char_p, c_int, c_uint)),
    "virDomainGetMaxVcpus": (c_int, (c_void_p,)),
    "virDomainGetName": (c_char_p, (c_void_p,)),
    "virDomainGetVcpuPinInfo": (c_int, (c_void_p, c_int, c_char_p, c_int, c_uint)),
    "virDomainIsPersistent": (c_int, (c_void_p,)),
    "virDomainLookupByUUIDString": (c_void_p, (c_void_p, c_char_p)),
    "virDomainPinEmulator": (c_int, (c_void_p, c_char_p, c_int, c_uint)),
    "virDomainPinIOThread": (c_int, _MAP),
    "virDomainPinVcpuFlags": (c_int, _MAP),
    "virGetLastError": (ctypes.POINTER(_Error), ()),
    "virSetErrorFunc": (None, (c_void_p, _ON_ERROR)),
}


def pin_domain(
    qemu_pid: int,
    pins: DomainPins,
    *,
    socket: str = SOCKET,
    proc: Path = Path("/proc"),
    connected: Callable[[], None] = lambda: None,
) -> int:
    """Set the pins that differ and return how many did.

    `socket` is a path below the root of QEMU's container; `connected` is called as soon as it has been used.
    Pins are also set in the definition that a restart of the domain would use. A vCPU that is not plugged in
    has a pin, too: libvirt applies it when the thread starts. libvirt sets the thread of a vCPU or I/O thread
    and QEMU's main thread; other threads stay where they are. Not transactional: after an
    error some pins may be set. May hang. Raises NoLibvirt or AnotherDomain.
    """
    size = _bytes_of_a_map(pins)
    with _domain_of(qemu_pid, socket, proc, connected) as (libvirt, domain):
        flags = _LIVE | (_CONFIG if libvirt.number("virDomainIsPersistent", domain) else 0)
        changes = 0
        if pins.emulator:
            wanted = pins.emulator.to_bytes(size, "little")
            if libvirt.emulator_pin(domain, size) != wanted:
                libvirt.number("virDomainPinEmulator", domain, wanted, size, flags)
                changes += 1
        for number, cpus in pins.io_threads.items():
            # For I/O threads libvirt reports the affinity and not the pin that it keeps.
            wanted = cpus.to_bytes(size, "little")
            libvirt.number("virDomainPinIOThread", domain, number, wanted, size, flags)
            changes += 1
        count = min(libvirt.number("virDomainGetMaxVcpus", domain), MOST_VCPUS)
        present = libvirt.vcpu_pins(domain, count, size)
        for vcpu in range(count):
            wanted = pins.vcpus.get(vcpu, pins.other_vcpus).to_bytes(size, "little")
            if any(wanted) and (vcpu >= len(present) or present[vcpu] != wanted):
                libvirt.number("virDomainPinVcpuFlags", domain, vcpu, wanted, size, flags)
                changes += 1
        return changes


class _Libvirt:
    """The calls of libvirt's C library that are made here; each raises NoLibvirt."""

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL("libvirt.so.0")
        except OSError as error:
            raise NoLibvirt(f"libvirt's library cannot be loaded: {error}") from None
        self._functions = {name: library[name] for name in _FUNCTIONS}
        for name, (result, arguments) in _FUNCTIONS.items():
            self._functions[name].restype, self._functions[name].argtypes = result, arguments
        self._functions["virSetErrorFunc"](None, _SILENT)

    def pointer(self, function: str, *arguments: object) -> int:
        """Call a function that returns an object of libvirt."""
        found: int | None = self._functions[function](*arguments)
        if found is None:
            raise self._error()
        return found

    def number(self, function: str, *arguments: object) -> int:
        """Call a function that returns a number, which is negative after an error."""
        found: int = self._functions[function](*arguments)
        if found < 0:
            raise self._error()
        return found

    def name(self, domain: int) -> str:
        found: bytes | None = self._functions["virDomainGetName"](domain)
        return (found or b"").decode(errors="replace")

    def vcpu_pins(self, domain: int, count: int, size: int) -> list[bytes]:
        """Read the pins of at most the first `count` vCPUs."""
        maps = ctypes.create_string_buffer(count * size)
        known = self.number("virDomainGetVcpuPinInfo", domain, count, maps, size, _LIVE) if count else 0
        return [maps.raw[vcpu * size : (vcpu + 1) * size] for vcpu in range(min(known, count))]

    def emulator_pin(self, domain: int, size: int) -> bytes:
        found = ctypes.create_string_buffer(size)
        self.number("virDomainGetEmulatorPinInfo", domain, found, size, _LIVE)
        return found.raw

    def is_about_no_domain(self) -> bool:
        """Return whether the last error was that a domain does not exist."""
        error = self._functions["virGetLastError"]()
        return bool(error) and error.contents.code == _NO_DOMAIN

    def _error(self) -> NoLibvirt:
        error = self._functions["virGetLastError"]()
        message = error.contents.message if error else None
        return NoLibvirt(f"libvirt: {(message or b'an unknown error').decode(errors='replace')}")


@contextmanager
def _domain_of(
    qemu_pid: int, socket: str, proc: Path, connected: Callable[[], None]
) -> Iterator[tuple[_Libvirt, int]]:
    uuid, name = _identity(qemu_pid, proc)
    where = f"the libvirt at {socket} of process {qemu_pid}"
    libvirt = _Libvirt()
    descriptor = _open_socket(proc / str(qemu_pid) / "root", socket)
    try:
        os.environ["LIBVIRT_AUTOSTART"] = "0"  # else a daemon of our own would be started where none answers
        address = f"qemu+unix:///session?socket=/proc/self/fd/{descriptor}"
        connection = libvirt.pointer("virConnectOpen", address.encode())
    finally:
        os.close(descriptor)
    connected()
    try:
        try:
            domain = libvirt.pointer("virDomainLookupByUUIDString", connection, uuid.encode())
        except NoLibvirt as error:
            if libvirt.is_about_no_domain():
                raise AnotherDomain(f"{where} has no domain {uuid}") from None
            raise NoLibvirt(f"{where}: {error}") from None
        if (found := libvirt.name(domain)) != name:
            raise AnotherDomain(f"{where} calls {uuid} {found!r}, not {name!r}")
        yield libvirt, domain
        libvirt.number("virDomainFree", domain)
    finally:
        libvirt.number("virConnectClose", connection)


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


def _bytes_of_a_map(pins: DomainPins) -> int:
    """Count the bytes that hold a bit for every CPU of this machine and of the pins."""
    named = (*pins.vcpus.values(), pins.other_vcpus, pins.emulator, *pins.io_threads.values())
    highest = max(named).bit_length()
    return (max(os.sysconf("SC_NPROCESSORS_CONF"), highest) + 7) // 8


class RightsKept(Unavailable):
    """The rights of the agent cannot be dropped."""


def answer_to(request: dict[str, Any]) -> dict[str, Any]:
    """Set the pins of a request."""
    try:
        pins = DomainPins.of_document(request["pins"])
        changed = pin_domain(request["pid"], pins, socket=request["socket"], connected=drop_rights)
        return {"changed": changed}
    except KvplaceError as error:
        return {"error": str(error)[:_LONGEST_ERROR]}


def limit_resources() -> None:
    """Bound the memory and CPU time of this process; the kernel refuses more, or ends it."""
    for limit, most in (
        (resource.RLIMIT_DATA, MOST_MEMORY),
        (resource.RLIMIT_CPU, _MOST_CPU_S),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (most, most))


def drop_rights() -> None:
    """Become a user that owns nothing, for good, and start no process any more.

    Raises RightsKept. Where the agent does not run as root it has no rights to drop.
    """
    try:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(_NO_OWNER, _NO_OWNER, _NO_OWNER)
            os.setresuid(_NO_OWNER, _NO_OWNER, _NO_OWNER)  # takes the capabilities, too
            resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    except PermissionError:
        raise RightsKept(
            "the agent may not drop its rights before it asks libvirt; give it CAP_SETUID and CAP_SETGID, "
            "as its manifest does"
        ) from None
    ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


if __name__ == "__main__":
    limit_resources()
    if line := sys.stdin.readline():
        sys.stdout.write(json.dumps(answer_to(json.loads(line))) + "\n")
