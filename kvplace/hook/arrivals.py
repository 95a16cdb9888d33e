"""A VM that migrates to this pod gets the CPUs of this pod before its QEMU exists.

KubeVirt discards the answers of hooks on a migration target: the domain arrives with the CPU numbers of the
source, which may belong to others here or not exist. But libvirt shows every arriving domain to the programs
in /etc/libvirt/hooks/qemu.d and takes the domain that they print (https://libvirt.org/hooks.html, operation
`migrate`). Pod admission mounts that folder into this container; the program put there passes the domain on
through a named pipe beside it, and reads the answer from another one. It needs a shell, `cat` and `timeout`.

The answer is the domain to use, or one sentence why there is none. One domain arrives at a time, as a pod has
one VM.
"""

from __future__ import annotations

import os
import select
import time
from contextlib import suppress
from dataclasses import dataclass

from kvplace.core.errors import BadDomainXml, KvplaceError, Misconfigured, Unavailable
from kvplace.core.protobuf import MAX_MESSAGE_BYTES
from kvplace.hook.process import TIME_LIMIT_S, PodEnvironment, log

TIMEOUT_S = 5.0
"""How long libvirt's program may take to send or to read."""
_PAUSE_S = 0.01
_CHUNK_BYTES = 1 << 16
_PROGRAM = "kvplace"
_DOMAIN, _ANSWER = "kvplace.domain", "kvplace.answer"
_SCRIPT = f"""\
#!/bin/sh
# Gives a VM that migrates here the CPUs of this pod. Written by the container with the command kvplace-hook.
[ "$2" = migrate ] && [ "$3" = begin ] || exit 0
exchange='cat >"$0/{_DOMAIN}" && cat "$0/{_ANSWER}"'
answer=$(timeout {TIME_LIMIT_S + 2:.0f} sh -c "$exchange" "${{0%/*}}" 2>/dev/null)
case $answer in
*'</domain>') printf '%s\\n' "$answer" ;;
'') echo "kvplace: the hook sidecar does not answer; the VM keeps the CPU numbers of its source" >&2 ;;
*) printf 'kvplace: %s\\n' "$answer" >&2; exit 1 ;;
esac
"""


@dataclass(slots=True)
class ArrivalPipes:
    """The named pipes in libvirt's folder; `domain` is readable when a domain arrives."""

    folder: str
    domain: int

    @classmethod
    def open(cls, env: PodEnvironment) -> ArrivalPipes | None:
        """Put the program into libvirt's folder, with pipes beside it; None where that cannot be.

        Raises Misconfigured when the folder cannot be used.
        """
        folder = env.libvirt_hook_folder
        if not os.path.isdir(folder):  # noqa: PTH112 - see process
            return None  # not mounted: the admission of another release made the pod
        if os.statvfs(folder).f_flag & os.ST_NOEXEC:
            # libvirt would try all the same, and start nothing: a program that cannot be run has failed.
            log(
                "warning",
                f"{folder} is mounted noexec; a VM that migrates here keeps the pins of its source",
            )
            return None
        try:
            for name in (_DOMAIN, _ANSWER):
                with suppress(FileNotFoundError):
                    os.unlink(f"{folder}/{name}")  # noqa: PTH108
                os.mkfifo(f"{folder}/{name}", 0o600)
            _write_program(folder)
            return cls(folder, _opened(folder))
        except OSError as error:
            raise Misconfigured(f"cannot use {folder} for libvirt's hooks: {error}") from None

    def reopen(self) -> None:
        """Forget the domain that was sent, and wait for the next one."""
        self.close()
        self.domain = _opened(self.folder)

    def close(self) -> None:
        """Stop waiting for domains."""
        os.close(self.domain)

    def answer(self, env: PodEnvironment) -> bytes:
        """Answer the domain that arrives; raises Unavailable when libvirt's program stops before its end.

        Returns nothing; blocks, and changes the memory policy of this process: call it only in a short-lived
        one.
        """
        from kvplace.hook.define_domain import define_arrival

        try:
            try:
                said = define_arrival(self._received(), env)
            except KvplaceError as error:
                said = str(error).encode()
            self._send(said)
        except OSError as error:
            why = error.strerror or error
            raise Unavailable(
                f"libvirt's program does not send the domain or read the answer ({why}); "
                "has virt-launcher ended?"
            ) from None
        return b""

    def _received(self) -> bytes:
        received, is_too_long = bytearray(), False
        while chunk := self._chunk():
            # The rest is read, too: the program reads no answer before it has sent everything.
            is_too_long = is_too_long or len(received) + len(chunk) > MAX_MESSAGE_BYTES
            if not is_too_long:
                received += chunk
        if is_too_long:
            raise BadDomainXml(f"the arriving domain has more than {MAX_MESSAGE_BYTES} bytes")
        return bytes(received)

    def _chunk(self) -> bytes:
        while select.select([self.domain], [], [], TIMEOUT_S)[0]:
            with suppress(BlockingIOError):
                return os.read(self.domain, _CHUNK_BYTES)
        raise TimeoutError(f"nothing came for {TIMEOUT_S:.0f} s")

    def _send(self, said: bytes) -> None:
        pipe = self._opened_by_reader()
        try:
            while said:
                if not select.select([], [pipe], [], TIMEOUT_S)[1]:
                    raise TimeoutError(f"nothing was read for {TIMEOUT_S:.0f} s")
                said = said[os.write(pipe, said) :]
        finally:
            os.close(pipe)

    def _opened_by_reader(self) -> int:
        """Open the pipe of the answer as soon as the program reads there."""
        until = time.monotonic() + TIMEOUT_S
        while True:
            try:
                return os.open(f"{self.folder}/{_ANSWER}", os.O_WRONLY | os.O_NONBLOCK)
            except OSError:  # ENXIO: it does not read yet
                if time.monotonic() > until:
                    raise
            time.sleep(_PAUSE_S)


def _opened(folder: str) -> int:
    return os.open(f"{folder}/{_DOMAIN}", os.O_RDONLY | os.O_NONBLOCK)


def _write_program(folder: str) -> None:
    """Write the program and move it into place, so that libvirt never runs half of it."""
    staged = f"{folder}/.{_PROGRAM}"
    with open(staged, "wb") as file:  # noqa: PTH123
        file.write(_SCRIPT.encode())
        os.fchmod(file.fileno(), 0o755)
    os.rename(staged, f"{folder}/{_PROGRAM}")  # noqa: PTH104
