"""The cpuset of a process's cgroup and of its status file, in every layout of the files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvplace.core.cpuset import mask_of
from kvplace.linux import kernel_files
from kvplace.linux.cgroups import effective_cpus
from kvplace.linux.kernel_files import Gone, KernelError, read_cpu_list, read_text


@pytest.fixture
def mounted(tmp_path: Path) -> Path:
    """Where the cgroup file systems of the test are mounted."""
    folder = tmp_path / "fs/cgroup"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def process(tmp_path: Path) -> Path:
    """A process in the root cgroup of version 2."""
    folder = tmp_path / "proc/17"
    folder.mkdir(parents=True)
    (folder / "cgroup").write_text("0::/\n")
    return folder


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_effective_cpuset_of_version_2_is_that_of_the_process_own_cgroup(
    process: Path, mounted: Path
) -> None:
    write(mounted / "cpuset.cpus.effective", "0-15\n")
    assert effective_cpus(process, mounted) == mask_of(range(16))
    write(process / "cgroup", "0::/kubepods/pod1/hook\n")
    write(mounted / "kubepods/pod1/hook/cpuset.cpus.effective", "4-7\n")
    assert effective_cpus(process, mounted) == mask_of(range(4, 8))


@pytest.mark.parametrize("inside", ["cpuset/kubepods/pod1", "cpuset"])
@pytest.mark.parametrize("name", ["cpuset.effective_cpus", "cpuset.cpus"])
def test_the_cpuset_of_version_1_is_found_with_and_without_the_hosts_path(
    process: Path, mounted: Path, inside: str, name: str
) -> None:
    write(process / "cgroup", "7:memory:/other\n3:cpuset:/kubepods/pod1\n")
    write(mounted / inside / name, "8-9")
    assert effective_cpus(process, mounted) == mask_of((8, 9))


def test_version_1_prefers_the_effective_cpuset_and_the_process_own_cgroup(
    process: Path, mounted: Path
) -> None:
    write(process / "cgroup", "3:cpuset:/kubepods/pod1\n")
    write(mounted / "cpuset/cpuset.effective_cpus", "0-63")
    write(mounted / "cpuset/kubepods/pod1/cpuset.cpus", "0-9")
    write(mounted / "cpuset/kubepods/pod1/cpuset.effective_cpus", "8-9")
    assert effective_cpus(process, mounted) == mask_of((8, 9))


@pytest.mark.parametrize("content", [None, "", "\n"])
def test_without_a_cpuset_in_effect_there_are_none(process: Path, mounted: Path, content: str | None) -> None:
    if content is not None:
        write(mounted / "cpuset.cpus.effective", content)
    assert effective_cpus(process, mounted) == 0


def test_a_process_that_is_gone_is_distinguished_from_one_without_a_cpuset(
    process: Path, mounted: Path
) -> None:
    (process / "cgroup").unlink()
    with pytest.raises(Gone, match="proc/17/cgroup does not exist"):
        effective_cpus(process, mounted)


def test_a_process_that_ends_while_its_files_are_read_is_gone(mounted: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = Path(f"/proc/{child.pid}")
        folder = os.open(process, os.O_RDONLY)
        assert kernel_files.allowed_cpus_of(process) == kernel_files.allowed_cpus_of(Path("/proc/self"))
        child.kill()
    try:  # through the open folder the kernel answers ESRCH instead of ENOENT
        with pytest.raises(Gone):
            kernel_files.allowed_cpus_of(Path(f"/proc/self/fd/{folder}"))
    finally:
        os.close(folder)
    with pytest.raises(Gone):
        effective_cpus(process, mounted)


def test_a_file_that_may_not_be_read_is_distinguished_from_one_that_is_gone(process: Path) -> None:
    status = process / "status"
    write(status, "Cpus_allowed_list:\t0-3\n")
    status.chmod(0)
    program = (
        "import os, pathlib, sys; from kvplace.linux.kernel_files import allowed_cpus_of;"
        "os.getuid() or os.setresuid(65534, 65534, 65534); allowed_cpus_of(pathlib.Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", program, str(process)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == (
        f"kvplace.linux.kernel_files.NotPermitted: {status} may not be read: Permission denied"
    )


def test_status_lists_are_those_of_the_task(process: Path) -> None:
    write(process / "task/18/status", "Name:\tCPU 0/KVM\nCpus_allowed_list:\t1,3\nMems_allowed_list:\t0-1\n")
    assert kernel_files.allowed_cpus_of(process / "task/18") == mask_of((1, 3))
    assert kernel_files.allowed_memory_nodes_of(process / "task/18") == 0b11
    with pytest.raises(Gone):
        kernel_files.allowed_cpus_of(process)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("Name:\tqemu\n", "status does not contain Cpus_allowed_list"),
        ("Cpus_allowed_list:\tall\n", "status: CPU list 'all'"),
    ],
)
def test_contents_that_make_no_sense_name_the_file(process: Path, content: str, sentence: str) -> None:
    write(process / "status", content)
    with pytest.raises(KernelError, match=sentence):
        kernel_files.allowed_cpus_of(process)


def test_a_file_that_is_unreadable_for_another_reason_is_neither_gone_nor_forbidden(process: Path) -> None:
    with pytest.raises(KernelError, match="cannot be read: Is a directory"):
        read_text(process)


def test_this_process_is_inside_its_own_cpuset() -> None:
    here = Path("/proc/self")
    assert kernel_files.allowed_cpus_of(here) == mask_of(os.sched_getaffinity(0))
    allowed = effective_cpus(here, Path("/sys/fs/cgroup"))
    assert allowed == 0 or kernel_files.allowed_cpus_of(here) & ~allowed == 0
    assert kernel_files.allowed_memory_nodes_of(here)
    assert read_cpu_list(Path("/sys/devices/system/cpu/online")) & kernel_files.allowed_cpus_of(here)
