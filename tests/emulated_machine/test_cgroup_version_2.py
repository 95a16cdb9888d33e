"""The tests of what touches cgroups and threads, on kernels whose cgroups are of version 2."""

from __future__ import annotations

import re
import sys

import pytest

from harness.emulated_machine.fixtures import on_machines
from harness.emulated_machine.kernels import Kernel
from harness.emulated_machine.machine import PROJECT, EmulatedMachine
from harness.emulated_machine.shape import TWO_CPUS

FILES = (
    "tests/linux/test_threads.py",
    "tests/linux/test_container_watch_folders.py",
    "tests/linux/test_container_watch.py",
    "tests/linux/test_cgroups_in_kernel.py",
    "tests/agent/test_cgroup_source.py",
)


def run_tests(machine: EmulatedMachine, *files: str, within_s: float) -> int:
    """Run tests of this project inside; none may be skipped. Returns the number that passed."""
    machine.output_of("sh", "-c", "echo +cpuset > /sys/fs/cgroup/cgroup.subtree_control")
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    finished = machine.run_within(within_s, sys.executable, "-m", "pytest", *options, *files, folder=PROJECT)
    assert finished.exit_code == 0, finished.stdout
    assert "skipped" not in finished.stdout.splitlines()[-1], finished.stdout
    passed = re.search(r"(\d+) passed", finished.stdout)
    assert passed is not None, finished.stdout
    return int(passed[1])


@pytest.mark.timeout(700)
@on_machines((TWO_CPUS, Kernel.V6_1), (TWO_CPUS, Kernel.V6_12))
def test_cpusets_containers_and_threads_are_handled_as_on_version_1(machine: EmulatedMachine) -> None:
    assert run_tests(machine, *FILES, within_s=600) >= 40
