"""A VM that migrates to this pod gets the CPUs of this pod before its QEMU exists.

KubeVirt discards what hooks answer on a migration target: the domain arrives with the CPU numbers of the
source, which may belong to others here or not exist. But libvirt shows every arriving domain to the programs
in /etc/libvirt/hooks/qemu.d and takes what they print for it (https://libvirt.org/hooks.html, operation
`migrate`). Pod admission mounts that folder into this container; the program put there passes the domain on
to a socket beside it. It uses a shell and ncat, which virt-launcher's images contain.

On the socket: the domain, the end of the stream; then the domain to use, or one sentence why there is none.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress

from kvplace.core.errors import BadDomainXml, KvplaceError, Misconfigured, Unavailable
from kvplace.hook.logs import log
from kvplace.hook.pod_environment import PodEnvironment
from kvplace.hook.protobuf import MAX_MESSAGE_BYTES

TIMEOUT_S = 5.0
"""How long the other end may take to send or to read."""
_BACKLOG = 4
_CHUNK_BYTES = 1 << 16
_PROGRAM = "kvplace"
_SOCKET = "kvplace.sock"
_SCRIPT = f"""\
#!/bin/sh
# Gives a VM that migrates here the CPUs of this pod. Written by the container with the command kvplace-hook.
[ "$2" = migrate ] && [ "$3" = begin ] || exit 0
answer=$(ncat -U "${{0%/*}}/{_SOCKET}")
case $answer in
*'</domain>') printf '%s\\n' "$answer" ;;
'') echo "kvplace: the hook sidecar does not answer; the VM keeps the CPU numbers of its source" >&2 ;;
*) printf 'kvplace: %s\\n' "$answer" >&2; exit 1 ;;
esac
"""


def listen(env: PodEnvironment) -> socket.socket | None:
    """Put the program into libvirt's folder and listen beside it; None where that cannot be.

    Raises Misconfigured when the folder cannot be used.
    """
    folder = env.libvirt_hook_folder
    if not os.path.isdir(folder):  # noqa: PTH112 - see pod_environment
        return None  # not mounted: the admission of another release made the pod
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        # libvirt would try all the same, and start nothing: a program that cannot be run has failed.
        log("warning", f"{folder} is mounted noexec; a VM that migrates here keeps the pins of its source")
        return None
    path = f"{folder}/{_SOCKET}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108
        listener.bind(path)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        _write_program(folder)
    except OSError as error:
        listener.close()
        raise Misconfigured(f"cannot use {folder} for libvirt's hooks: {error}") from None
    return listener


def answer(connection: socket.socket, env: PodEnvironment) -> bytes:
    """Answer one arriving domain on an accepted connection and close it; raises Unavailable when it breaks.

    Returns nothing; blocks, and changes the memory policy of this process: call it only in a short-lived one.
    """
    from kvplace.hook.define_domain import define_arrival

    connection.settimeout(TIMEOUT_S)
    try:
        with connection:
            try:
                said = define_arrival(_received(connection), env)
            except KvplaceError as error:
                said = str(error).encode()
            connection.sendall(said)
    except OSError as error:
        why = error.strerror or error
        raise Unavailable(
            f"libvirt's program does not send or read the domain ({why}); has virt-launcher ended?"
        ) from None
    return b""


def _received(connection: socket.socket) -> bytes:
    received = bytearray()
    while chunk := connection.recv(_CHUNK_BYTES):
        received += chunk
        if len(received) > MAX_MESSAGE_BYTES:
            raise BadDomainXml(f"the arriving domain has more than {MAX_MESSAGE_BYTES} bytes")
    return bytes(received)


def _write_program(folder: str) -> None:
    """Write the program and move it into place, so that libvirt never runs half of it."""
    staged = f"{folder}/.{_PROGRAM}"
    with open(staged, "wb") as file:  # noqa: PTH123
        file.write(_SCRIPT.encode())
        os.fchmod(file.fileno(), 0o755)
    os.rename(staged, f"{folder}/{_PROGRAM}")  # noqa: PTH104
