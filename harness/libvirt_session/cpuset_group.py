"""A cpuset control group of its own for the daemon under test, with version 1 or 2 of the interface.

Written apart from kvplace's own handling of control groups on purpose: a mistake there must not hide here.
"""

from dataclasses import dataclass
from pathlib import Path

from kvplace.core.cpuset import format_cpu_list, parse_cpu_list

NAME = "kvplace-tests"


class NoCpusetGroup(Exception):
    """This machine gives no cpuset control group; the message names the obstacle."""


@dataclass(frozen=True, slots=True)
class CpusetGroup:
    """A control group with a cpuset, made by `make` and gone after `remove`."""

    path: Path
    effective_file: str

    @classmethod
    def make(cls, name: str) -> "CpusetGroup":
        """Makes a group that may use every CPU and memory node that the machine offers."""
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
        for _, where, kind, options, *_ in mounts:
            if kind == "cgroup" and "cpuset" in options.split(","):
                return cls._make_v1(Path(where), name)
        for _, where, kind, *_ in mounts:
            if kind == "cgroup2" and "cpuset" in (Path(where) / "cgroup.controllers").read_text().split():
                return cls._make_v2(Path(where), name)
        raise NoCpusetGroup("no cpuset controller is mounted below /sys/fs/cgroup")

    @classmethod
    def _make_v1(cls, root: Path, name: str) -> "CpusetGroup":
        group = cls(root / name, "cpuset.effective_cpus")
        _sweep(root)
        group._mkdir()
        # A version 1 group starts with nothing and takes no process before it has both.
        for file in ("cpuset.mems", "cpuset.cpus"):
            (group.path / file).write_text((root / file).read_text())
        return group

    @classmethod
    def _make_v2(cls, root: Path, name: str) -> "CpusetGroup":
        enabled = root / "cgroup.subtree_control"
        if "cpuset" not in enabled.read_text().split():
            try:
                enabled.write_text("+cpuset")
            except OSError as error:
                raise NoCpusetGroup(f"cannot enable cpuset in {enabled}: {error.strerror}") from error
        _sweep(root)
        group = cls(root / name, "cpuset.cpus.effective")
        group._mkdir()
        group.confine(parse_cpu_list((root / "cpuset.cpus.effective").read_text().strip()))
        return group

    def _mkdir(self) -> None:
        try:
            self.path.mkdir()
        except OSError as error:
            raise NoCpusetGroup(f"cannot make {self.path}: {error.strerror}") from error

    def confine(self, cpus: int) -> None:
        """Lets the group's processes run on these CPUs only; the kernel moves them at once."""
        (self.path / "cpuset.cpus").write_text(format_cpu_list(cpus))

    def effective(self) -> int:
        """Reads the CPUs that the kernel really lets the group use."""
        return parse_cpu_list((self.path / self.effective_file).read_text().strip())

    def processes(self) -> list[int]:
        """Lists the processes in the group."""
        return [int(line) for line in (self.path / "cgroup.procs").read_text().split()]

    def remove(self) -> None:
        """Removes the group, which must be empty."""
        self.path.rmdir()


def _sweep(root: Path) -> None:
    """Removes empty groups of test runs that were killed; their names end with the process id."""
    for left in root.glob(f"{NAME}-*"):
        owner = left.name.rpartition("-")[2]
        if (
            owner.isdigit()
            and not Path(f"/proc/{owner}").exists()
            and not (left / "cgroup.procs").read_text()
        ):
            left.rmdir()
