"""`python -m harness.real_node.sandbox_process`: starts one sandbox, supervises it, and removes all of it.

It stays outside the sandbox, and ends at the end of its standard input. The other end of that pipe is held by
the process that wanted the sandbox, so however that one dies, nothing of the sandbox is left: processes,
mounts and network go with the namespaces, and the control groups are removed here.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from harness.real_node.control_groups import PREFIX, NodeGroups, hierarchies, is_left_over
from harness.real_node.sandbox_init import READY

# 198.18.0.0/15 is set apart for tests of network devices (RFC 2544), so it leads nowhere else.
_NODE_SUBNET = "198.18.{}"
# The addresses of a sandbox for its pods, and for Services with traffic through it: see sandbox.py.
_ROUTED_SUBNETS = ("198.19.{}.0/24", "100.64.{}.0/24")
_MOST_NODES = 250


def main() -> None:
    """Run the sandbox that the JSON in the first argument describes; the second names the answer's file."""
    wanted, answer = json.loads(sys.argv[1]), Path(sys.argv[2])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _leave)
    found = hierarchies(Path("/proc/self/mountinfo").read_text())
    groups = NodeGroups.make(found, os.getpid())
    folder = _make_mount_point()
    described = {
        "name": wanted["name"],
        "folder": str(folder),
        "visible": wanted["visible"],
        "hierarchies": [
            {"mount": str(hierarchy.mount), "arguments": hierarchy.mount_arguments()} for hierarchy in found
        ],
    }
    command = [
        *("setpriv", "--pdeathsig=KILL", "--"),
        *("unshare", "--mount", "--pid", "--net", "--uts", "--ipc", "--cgroup", "--fork", "--kill-child"),
        *(sys.executable, "-m", "harness.real_node.sandbox_init", json.dumps(described)),
    ]
    namespaces = subprocess.Popen(
        groups.command(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    try:
        assert namespaces.stdout is not None
        if namespaces.stdout.readline().strip() != READY:
            sys.exit("the sandbox's first process could not set it up; see above")
        init = int(Path(f"/proc/{namespaces.pid}/task/{namespaces.pid}/children").read_text().split()[0])
        answered = {
            "pid": init,
            "number": _connect(init),
            "folder": str(folder),
            "groups": [str(path) for path in groups.paths],
        }
        partial = answer.with_suffix(".partial")
        partial.write_text(json.dumps(answered))
        partial.rename(answer)
        _wait(namespaces)
    finally:
        namespaces.kill()
        groups.thaw()
        namespaces.wait()
        groups.remove()
        shutil.rmtree(folder, ignore_errors=True)


def _make_mount_point() -> Path:
    """Make the folder for the sandbox's root, and remove the folders of killed supervisors."""
    temporary = Path(tempfile.gettempdir())
    for left in temporary.glob(f"{PREFIX}-*"):
        if is_left_over(left):
            shutil.rmtree(left, ignore_errors=True)
    folder = temporary / f"{PREFIX}-{os.getpid()}"
    folder.mkdir(mode=0o700)
    return folder


def _leave(number: int, _frame: object) -> None:
    sys.exit(128 + number)


def _wait(namespaces: subprocess.Popen[str]) -> None:
    """Return when the starter has closed its end of the pipe, or when the sandbox has ended."""
    ended = os.pidfd_open(namespaces.pid)
    with contextlib.closing(select.epoll()) as waiting:
        waiting.register(ended, select.EPOLLIN)
        waiting.register(sys.stdin.fileno(), select.EPOLLIN)
        while True:
            for descriptor, _ in waiting.poll():
                if descriptor == ended or not os.read(sys.stdin.fileno(), 4096):
                    return


def _connect(init: int) -> int:
    """Join the sandbox to this machine's network and return the number of its subnet.

    Two sandboxes cannot have the same name of the link, so it decides which sandbox has a number.
    """
    for number in range(1, _MOST_NODES):
        made = subprocess.run(
            [
                *("ip", "link", "add", f"kvnode{number}", "type", "veth"),
                *("peer", "name", "eth0", "netns", str(init)),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode == 0:
            _configure(init, number)
            return number
        if "File exists" not in made.stderr:
            sys.exit(f"no network link to the sandbox: {made.stderr.strip()}")
    sys.exit(f"all {_MOST_NODES} networks of sandboxes are in use")


def _configure(init: int, number: int) -> None:
    network = _NODE_SUBNET.format(number)
    _ip("address", "add", f"{network}.1/24", "dev", f"kvnode{number}")
    _ip("link", "set", f"kvnode{number}", "up")
    for subnet in _ROUTED_SUBNETS:
        _ip("route", "add", subnet.format(number), "via", f"{network}.2", "dev", f"kvnode{number}")
    inside = ("nsenter", "--target", str(init), "--net", "--")
    _ip("link", "set", "lo", "up", inside=inside)
    _ip("address", "add", f"{network}.2/24", "dev", "eth0", inside=inside)
    _ip("link", "set", "eth0", "up", inside=inside)
    _ip("route", "add", "default", "via", f"{network}.1", inside=inside)
    forward = Path(f"/proc/{init}/root/proc/sys/net/ipv4/ip_forward")
    subprocess.run([*inside, "sh", "-c", f"echo 1 >{forward}"], check=True)


def _ip(*arguments: str, inside: Sequence[str] = ()) -> None:
    subprocess.run([*inside, "ip", *arguments], check=True)


if __name__ == "__main__":
    main()
