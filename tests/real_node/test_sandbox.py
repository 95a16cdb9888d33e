"""The sandbox that holds a node: apart from this machine, and gone with whoever started it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.real_node.control_groups import PREFIX, Hierarchy, NoControlGroups, hierarchies
from harness.real_node.sandbox import Sandbox, connect
from harness.waiting import wait_until

HYBRID = """\
24 18 0:22 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
25 24 0:23 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:5 - cgroup cgroup rw,cpu,cpuacct
26 24 0:24 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset,clone_children
27 24 0:25 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,release_agent=/lib/agent,name=systemd
28 24 0:26 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate
"""

STARTER = """\
import os, sys
from pathlib import Path
from harness.real_node.sandbox import Sandbox
sandbox = Sandbox("orphan", Path(sys.argv[1]))
sandbox.start("worker", "sleep", "1000")
print(sandbox.pid, sandbox.number, *sandbox.groups.paths, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def sandbox(sandbox_machine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """Share one sandbox among the tests that leave it as it is."""
    with Sandbox("first", tmp_path_factory.mktemp("sandbox")) as running:
        yield running


def test_hierarchies_are_mounted_again_with_their_controllers_and_nothing_else() -> None:
    assert hierarchies(HYBRID) == [
        Hierarchy(Path("/sys/fs/cgroup/cpu,cpuacct"), 1, "cpu,cpuacct"),
        Hierarchy(Path("/sys/fs/cgroup/cpuset"), 1, "cpuset"),
        Hierarchy(Path("/sys/fs/cgroup/systemd"), 1, "name=systemd"),
        Hierarchy(Path("/sys/fs/cgroup/unified"), 2, ""),
    ]


def test_a_machine_without_a_cpuset_of_version_1_is_refused_with_the_fix() -> None:
    with pytest.raises(NoControlGroups, match=r"systemd\.unified_cgroup_hierarchy=0"):
        hierarchies("28 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n")


def test_it_has_processes_a_name_and_control_groups_of_its_own(sandbox: Sandbox) -> None:
    assert sandbox.run("hostname") == "first\n"
    assert "sandbox_init" in sandbox.run("cat", "/proc/1/cmdline")
    assert all(line.endswith(":/") for line in sandbox.run("cat", "/proc/self/cgroup").splitlines())
    assert sandbox.run("cat", "/sys/fs/cgroup/cpuset/cpuset.cpus").strip() == sandbox.cpuset(1)


def test_files_written_in_it_are_not_written_on_this_machine(sandbox: Sandbox) -> None:
    sandbox.write("/etc/kvplace-test/mark", "inside")

    assert sandbox.run("cat", "/etc/kvplace-test/mark") == "inside"
    assert not Path("/etc/kvplace-test").exists()
    sandbox.run("sh", "-c", "echo 0 >/proc/sys/vm/overcommit_memory")
    assert sandbox.run("cat", "/proc/sys/vm/overcommit_memory") == "0\n"


_TELL_WHO_CONNECTS = """
import socket, sys
listening = socket.create_server((sys.argv[1], 0))
print(f"port {listening.getsockname()[1]}")
print(f"from {listening.accept()[1][0]}")
"""
_CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2]))).recv(1)"


def test_a_server_can_be_killed_and_orphans_are_reaped(sandbox: Sandbox) -> None:
    server = sandbox.start("shell", "sh", "-c", "sleep 1000 & wait")
    server.wait_until(lambda: "sleep" in sandbox.run("ps", "-e"), "child")
    pid = server.program_pid
    server.kill()

    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(ProcessLookupError):
        server.signal(signal.SIGTERM)
    sandbox.run("pkill", "-x", "sleep")
    wait_until(lambda: "sleep" not in sandbox.run("ps", "-e"), lambda: sandbox.run("ps", "-e"))


def test_two_sandboxes_have_different_networks_and_reach_each_other_when_connected(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    with Sandbox("second", tmp_path) as second:
        assert second.address != sandbox.address
        assert second.run("hostname") == "second\n"
        connect(sandbox, second)
        server = second.start("server", sys.executable, "-u", "-c", _TELL_WHO_CONNECTS, second.address)
        server.wait_until(lambda: "port" in server.log_tail(), "port")
        sandbox.run(sys.executable, "-c", _CONNECT, second.address, server.log_tail().split()[1])
        server.stop()
        assert server.log_tail().endswith(f"from {sandbox.address}")


@pytest.mark.usefixtures("sandbox_machine")
def test_nothing_is_left_of_a_sandbox_whose_starter_was_killed(tmp_path: Path) -> None:
    with _starter(tmp_path) as starter:
        assert starter.stdout is not None
        pid, number, *groups = starter.stdout.readline().split()
        told = json.loads((tmp_path / "orphan.json").read_text())
        assert told["pid"] == int(pid)
        starter.kill()

    link = f"/sys/class/net/kvnode{number}"
    left = [Path(path) for path in (f"/proc/{pid}", told["folder"], link, *groups)]
    wait_until(lambda: not any(path.exists() for path in left), lambda: f"there is one of {left}")


@pytest.mark.usefixtures("sandbox_machine")
def test_a_frozen_container_does_not_outlive_its_sandbox(tmp_path: Path) -> None:
    with Sandbox("frozen", tmp_path) as sandbox:
        inside = "/sys/fs/cgroup/freezer/frozen"
        sandbox.run("mkdir", inside)
        sandbox.start("sleeper", "sh", "-c", f"echo 0 >{inside}/cgroup.procs; exec sleep inf")
        procs = sandbox.path(f"{inside}/cgroup.procs")
        wait_until(procs.read_text, lambda: f"{procs} is empty")
        sandbox.path(f"{inside}/freezer.state").write_text("FROZEN")
        (pid,) = (
            (sandbox.groups.with_file("freezer.self_freezing") / "frozen/cgroup.procs").read_text().split()
        )

    assert not Path(f"/proc/{pid}").exists()
    assert not any(group.exists() for group in sandbox.groups.paths)


@pytest.mark.usefixtures("sandbox_machine")
def test_the_remains_of_a_killed_supervisor_go_when_the_next_sandbox_starts(tmp_path: Path) -> None:
    with _starter(tmp_path) as starter:
        assert starter.stdout is not None
        pid, _, *groups = starter.stdout.readline().split()
        supervisor = int(Path(groups[0]).name.removeprefix(f"{PREFIX}-"))
        os.kill(supervisor, signal.SIGKILL)
        wait_until(
            lambda: not Path(f"/proc/{pid}").exists(), lambda: "its processes outlive their supervisor"
        )
        starter.communicate()
    left = [Path(json.loads((tmp_path / "orphan.json").read_text())["folder"]), *map(Path, groups)]
    assert all(path.exists() for path in left)

    with Sandbox("next", tmp_path):
        assert not any(path.exists() for path in left)


def _starter(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", STARTER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
