"""`python -m kvplace.libvirt.pinning_process`: sets the pins of one VM, and is killed when it hangs.

One request on stdin, one answer on stdout, and an end:

    {"pid": 4711, "socket": "run/libvirt/virtqemud-sock",
     "pins": {"vcpus": {"0": "4"}, "otherVcpus": "4-5", "emulator": "2-3", "ioThreads": {}}}

    {"changed": 2}  or  {"error": "one sentence"}

What answers at the socket is in the hand of whoever controls the VM's pod. So the process has bounded memory
and CPU time, and once it is connected it is a user that owns nothing, without capabilities: the connection is
all that it has. Another VM gets another process.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
from typing import Any

from kvplace.core.errors import KvplaceError, Unavailable
from kvplace.libvirt.domain_pins import DomainPins
from kvplace.libvirt.live import pin_domain

MOST_MEMORY = 64 << 20
"""Bytes of private memory: about 9 MiB are needed, and libvirt reads messages of up to 32 MiB."""
_MOST_CPU_S = 5
_LONGEST_ERROR = 1000
"""Characters of an error: its words come from a libvirt in the pod of a VM."""
_NO_OWNER = 2_000_004_711
"""A user and group that no process and no file of a node has."""
_PR_SET_NO_NEW_PRIVS = 38


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
    """Bound what this process may use; the kernel refuses more, or ends it."""
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
