"""The restrictions of a process of a virt-launcher pod: user, capabilities, cpuset, seccomp.

Entered by one process for itself, started as root: by the libvirt daemon's launcher and by the program that
stands for another container of the same pod, such as the hook sidecar.
"""

import ctypes
import errno
import json
import os
import platform
import struct
from dataclasses import asdict, dataclass
from pathlib import Path

CLONE_NEWNS = 0x00020000
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
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


@dataclass(frozen=True, slots=True)
class Pod:
    """The confinement that all containers of one pod share."""

    group: str
    """The folder of its cpuset control group."""
    uid: int
    known_by: dict[str, str]
    """Files and folders shown over the machine's own, by path, such as an /etc/passwd that knows the user."""
    deny_memory_policy: bool
    """Whether a seccomp filter answers EPERM to mbind and its kin."""

    @classmethod
    def from_json(cls, text: str) -> "Pod":
        """Reads the text of `to_json`."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """Writes it as an argument for another process."""
        return json.dumps(asdict(self))

    def enter(self) -> None:
        """Confines the calling process for good."""
        (Path(self.group) / "cgroup.procs").write_text(str(os.getpid()))
        _become_known(self.known_by)
        for capability in range(LAST_CAPABILITY + 1):
            if _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
                break
        os.setgroups([])
        os.setresgid(self.uid, self.uid, self.uid)
        os.setresuid(self.uid, self.uid, self.uid)
        if self.deny_memory_policy:
            _deny_memory_policy()
        os.chdir("/")
        os.umask(0o022)


def _become_known(files: dict[str, str]) -> None:
    """Shows the daemon files that name its user and group, as libvirt wants; the machine's own stay."""
    _checked("unshare", _libc.unshare(CLONE_NEWNS))
    _checked("mount", _libc.mount(b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None))
    for over, file in files.items():
        _checked("mount", _libc.mount(file.encode(), over.encode(), None, ctypes.c_ulong(MS_BIND), None))


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
    process_control(PR_SET_NO_NEW_PRIVS, 1)
    process_control(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(length_and_address))


def process_control(option: int, *arguments: int) -> None:
    """Calls prctl(2); raises OSError."""
    padded = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]]
    _checked(f"prctl {option}", _libc.prctl(option, *padded))


def _checked(call: str, result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
