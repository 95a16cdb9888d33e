"""Becomes the pod around a session libvirtd: its user, its cpuset, its seccomp filter, its reaper of orphans.

A program of its own, started as root with one JSON argument. QEMU puts itself in the background; as the
nearest sub-reaper this process inherits it, and takes everything in its control group along when it ends.
"""

import ctypes
import errno
import json
import os
import platform
import signal
import struct
import subprocess
import sys
from pathlib import Path

CLONE_NEWNS = 0x00020000
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
PR_SET_PDEATHSIG = 1
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2
LAST_CAPABILITY = 63

# linux/audit.h and the architectures' tables: mbind, set_mempolicy, get_mempolicy, set_mempolicy_home_node
MEMORY_POLICY_CALLS = {
    "x86_64": (0xC000003E, (237, 238, 239, 450)),
    "aarch64": (0xC00000B7, (235, 237, 236, 450)),
}

# linux/bpf_common.h and linux/seccomp.h
LOAD_WORD = 0x20
JUMP_IF_EQUAL = 0x15
RETURN = 0x06
OFFSET_OF_NUMBER = 0
OFFSET_OF_ARCHITECTURE = 4
ALLOW = 0x7FFF0000
ERRNO = 0x00050000

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> int:
    """Joins the control group, gives up all privileges, starts the daemon and stays until it ends."""
    plan = json.loads(sys.argv[1])
    group = Path(plan["group"]) / "cgroup.procs"
    group.write_text(str(os.getpid()))
    _become_known(plan["known_by"])
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    for capability in range(LAST_CAPABILITY + 1):
        if _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break
    os.setgroups([])
    os.setresgid(plan["uid"], plan["uid"], plan["uid"])
    os.setresuid(plan["uid"], plan["uid"], plan["uid"])
    # Asked for after the change of user, which forgets it.
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != plan["parent"]:
        return 1
    if plan["deny_memory_policy"]:
        _deny_memory_policy()
    os.chdir("/")
    os.umask(0o022)
    return _supervise(plan["command"], plan["environment"], group)


def _become_known(files: dict[str, str]) -> None:
    """Shows the daemon files that name its user and group, as libvirt wants; the machine's own stay."""
    _checked("unshare", _libc.unshare(CLONE_NEWNS))
    _checked("mount", _libc.mount(b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None))
    for over, file in files.items():
        _checked("mount", _libc.mount(file.encode(), over.encode(), None, ctypes.c_ulong(MS_BIND), None))


def _supervise(command: list[str], environment: dict[str, str], group: Path) -> int:
    daemon = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)

    def stop(_number: int, _frame: object) -> None:
        daemon.send_signal(signal.SIGTERM)
        signal.alarm(20)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGALRM, lambda *_: daemon.send_signal(signal.SIGKILL))
    status = 0
    while True:
        pid, status = os.wait()
        if pid == daemon.pid:
            daemon.returncode = os.waitstatus_to_exitcode(status)
            break
    signal.alarm(0)
    while left := {int(line) for line in group.read_text().split()} - {os.getpid()}:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            os.wait()
        except ChildProcessError:
            break
    return daemon.returncode


def _deny_memory_policy() -> None:
    """Answers EPERM to the memory policy calls, as containerd's default profile does."""
    architecture, numbers = MEMORY_POLICY_CALLS[platform.machine()]
    program = [
        (LOAD_WORD, 0, 0, OFFSET_OF_ARCHITECTURE),
        (JUMP_IF_EQUAL, 0, len(numbers) + 1, architecture),
        (LOAD_WORD, 0, 0, OFFSET_OF_NUMBER),
        *((JUMP_IF_EQUAL, len(numbers) - at, 0, number) for at, number in enumerate(numbers)),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, ERRNO | errno.EPERM),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in program))
    length_and_address = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(length_and_address))


def _prctl(option: int, *arguments: int) -> None:
    padded = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]]
    _checked(f"prctl {option}", _libc.prctl(option, *padded))


def _checked(call: str, result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


if __name__ == "__main__":
    sys.exit(main())
