"""The control groups of a sandbox: one group in every hierarchy, which the sandbox sees as the root.

The group's name ends with the id of the process that supervises the sandbox, so that a later run can see
and remove the groups of a supervisor that was killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.waiting import PATIENCE_S

PREFIX = "kvplace-node"

_OPTIONS_OF_NO_CONTROLLER = {"rw", "ro", "xattr", "clone_children", "noprefix"}
_JOIN_AND_EXECUTE = (
    'while [ "$1" != -- ]; do echo 0 >"$1/cgroup.procs" || exit 125; shift; done; shift; exec "$@"'
)


class NoControlGroups(Exception):
    """This machine's control groups cannot hold a sandbox; the message has the reason."""


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """One mounted hierarchy of control groups."""

    mount: Path
    version: int
    controllers: str
    """As the mount option names them; empty with version 2."""

    def mount_arguments(self) -> list[str]:
        """Return the arguments of mount(8) that show this hierarchy again."""
        if self.version == 2:
            return ["-t", "cgroup2", "cgroup2"]
        options = f"none,{self.controllers}" if self.controllers.startswith("name=") else self.controllers
        return ["-t", "cgroup", "-o", options, "cgroup"]


def hierarchies(mountinfo: str) -> list[Hierarchy]:
    """Read the hierarchies from /proc/self/mountinfo; raises `NoControlGroups` without a cpuset of version 1.

    With version 2 alone the processes of a sandbox would have to leave its root group before anything in it
    could be limited.
    """
    found = []
    for line in mountinfo.splitlines():
        place, _, kind = line.partition(" - ")
        filesystem, _, options = kind.split(" ", 2)
        mount = Path(place.split(" ")[4])
        if filesystem == "cgroup2":
            found.append(Hierarchy(mount, 2, ""))
        elif filesystem == "cgroup":
            controllers = [
                option
                for option in options.split(",")
                if option not in _OPTIONS_OF_NO_CONTROLLER and not option.startswith("release_agent=")
            ]
            found.append(Hierarchy(mount, 1, ",".join(controllers)))
    if not any("cpuset" in hierarchy.controllers.split(",") for hierarchy in found):
        raise NoControlGroups(
            "a sandboxed node needs the cpuset controller in a hierarchy of version 1 (hybrid layout); "
            "boot with systemd.unified_cgroup_hierarchy=0 or use ./make cluster"
        )
    return found


@dataclass(frozen=True, slots=True)
class NodeGroups:
    """The groups of one sandbox."""

    paths: tuple[Path, ...]

    @property
    def cpuset(self) -> Path:
        """The group with the CPUs of the sandbox."""
        return self.with_file("cpuset.cpus")

    def with_file(self, name: str) -> Path:
        """The group in the hierarchy that has files of that name in its groups."""
        return next(path for path in self.paths if (path / name).exists())

    @classmethod
    def make(cls, found: Sequence[Hierarchy], owner: int) -> NodeGroups:
        """Make a group in every hierarchy and remove the groups of supervisors that were killed."""
        _sweep([hierarchy.mount for hierarchy in found])
        paths = []
        for hierarchy in found:
            path = hierarchy.mount / f"{PREFIX}-{owner}"
            path.mkdir()
            if "cpuset" in hierarchy.controllers.split(","):
                # A new group has no CPU, and takes no process before it has one.
                for file in ("cpuset.cpus", "cpuset.mems"):
                    (path / file).write_text((hierarchy.mount / file).read_text())
                (path / "cgroup.clone_children").write_text("1")
            paths.append(path)
        return cls(tuple(paths))

    def command(self, command: Iterable[str | Path]) -> list[str]:
        """Return a command that joins the groups and becomes `command`."""
        return ["sh", "-c", _JOIN_AND_EXECUTE, "sh", *map(str, self.paths), "--", *map(str, command)]

    def remove(self) -> None:
        """Remove the groups and all below, depth first; their processes have been killed.

        A killed process stays in its group until the kernel is done with it, so this tries again.
        """
        self.thaw()
        deadline = time.monotonic() + PATIENCE_S
        while [path for path in self.paths if not _removed(path)] and time.monotonic() < deadline:
            # The end of a killed process in a group has no event in version 1.
            time.sleep(0.02)

    def thaw(self) -> None:
        """Let frozen processes continue: runc freezes containers for moments, and a frozen one cannot die."""
        for path in self.paths:
            for state in path.rglob("freezer.state"):
                with contextlib.suppress(OSError):  # the top has none to write; others may be gone by now
                    state.write_text("THAWED")


def _removed(top: Path) -> bool:
    folders = [Path(folder) for folder, _, _ in os.walk(top, topdown=False)]
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()
    return not top.exists()


def is_left_over(folder: Path) -> bool:
    """Whether a folder that is named like a supervisor's is of one that is no more."""
    owner = folder.name.rpartition("-")[2]
    return owner.isdigit() and not Path(f"/proc/{owner}").exists()


def _sweep(mounts: Sequence[Path]) -> None:
    left = [path for mount in mounts for path in mount.glob(f"{PREFIX}-*") if is_left_over(path)]
    for path in left:
        for procs in path.rglob("cgroup.procs"):
            with contextlib.suppress(OSError):
                for pid in procs.read_text().split():
                    os.kill(int(pid), signal.SIGKILL)
    NodeGroups(tuple(left)).remove()
