"""The first process of a sandbox: it makes the sandbox's root file system and then reaps orphans.

Runs as process 1 of new namespaces (`sandbox_process` starts it) and uses the standard library alone, because
the file system changes under its feet. Its changes of mounts are seen by no client outside.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

READY = "ready"

# The kubelet writes these and ends when it cannot; they hold for the whole machine, so it gets files instead.
_KERNEL_SETTINGS = {"vm/overcommit_memory": "1", "kernel/panic": "10", "kernel/panic_on_oops": "1"}


def main() -> None:
    """Set up the sandbox that the JSON in the first argument describes, report it on stdout, and stay."""
    wanted = json.loads(sys.argv[1])
    # Blocked, not ignored: an orphan that ends before the loop below begins is still noticed.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    socket.sethostname(wanted["name"])
    _make_root(wanted)
    print(READY, flush=True)
    while True:
        signal.sigwait({signal.SIGCHLD})
        _reap()


def _make_root(wanted: dict[str, Any]) -> None:
    base = Path(wanted["folder"])
    _mount("--make-rprivate", "/")
    # Written files lie in memory and go with the mount namespace.
    _mount("-t", "tmpfs", "tmpfs", base)
    for part in ("upper", "work", "root"):
        (base / part).mkdir()
    root = base / "root"
    _mount(
        "-t",
        "overlay",
        "overlay",
        "-o",
        f"lowerdir=/,upperdir={base / 'upper'},workdir={base / 'work'}",
        root,
    )
    _mount("-t", "proc", "proc", root / "proc")
    _mount("-t", "sysfs", "sysfs", root / "sys")
    _mount("--rbind", "/dev", root / "dev")
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", root / "run")
    (root / "run/lock").mkdir()
    for folder in wanted["visible"]:
        inside = root / folder.lstrip("/")
        inside.mkdir(parents=True, exist_ok=True)
        _mount("--bind", folder, inside)
        _mount("-o", "remount,bind,ro", inside)
    _mount_control_groups(root, wanted["hierarchies"])
    for folder in ("var/lib/containerd", "var/lib/kubelet"):
        (root / folder).mkdir(parents=True, exist_ok=True)
        # An overlay's upper folder cannot lie on an overlay; the kubelet wants a file system of its own, too.
        _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", root / folder)
    (root / "var/lib/kubelet/pods").mkdir()
    (root / "pods").mkdir(exist_ok=True)
    (root / "old").mkdir(exist_ok=True)
    os.chdir(root)
    subprocess.run(["pivot_root", ".", "old"], check=True)
    os.chdir("/")
    subprocess.run(["umount", "--lazy", "/old"], check=True)
    Path("/old").rmdir()
    # Mounts of the kubelet and of CSI-like pods have to reach the containers: systemd does the same.
    _mount("--make-rshared", "/")
    # virt-handler, which is a pod elsewhere, has the kubelet's pods here.
    _mount("--bind", "/var/lib/kubelet/pods", "/pods")
    settings = Path("/run/kernel-settings")
    for name, value in _KERNEL_SETTINGS.items():
        file = settings / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")
        _mount("--bind", file, f"/proc/sys/{name}")


def _mount_control_groups(root: Path, hierarchies: list[dict[str, Any]]) -> None:
    folder = root / "sys/fs/cgroup"
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", folder)
    for hierarchy in hierarchies:
        inside = root / hierarchy["mount"].lstrip("/")
        inside.mkdir(parents=True, exist_ok=True)
        _mount(*hierarchy["arguments"], inside)
    for link in Path("/sys/fs/cgroup").iterdir():
        if link.is_symlink():
            (folder / link.name).symlink_to(link.readlink())


def _mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *arguments], check=True)


def _reap() -> None:
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                return
        except ChildProcessError:
            return


if __name__ == "__main__":
    main()
