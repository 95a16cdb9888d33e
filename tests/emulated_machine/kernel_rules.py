"""The kernel's treatment of tasks and memory when a cpuset changes; called inside, answers what it saw."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvplace.core.cpuset import parse_cpu_list
from tests.emulated_machine.cgroups import ROOT, Group, affinity, group, pages_by_node, process_in, wait_for
from tests.emulated_machine.observation import set_huge_pages, set_online

MEGABYTES = 8
_NEW_CGROUP_NAMESPACE = 0x02000000
_REMOUNT = 32
_MAP_HUGETLB = 0x40000
_MBIND = 237
PREFERRED_MANY, BIND, INTERLEAVE = 5, 2, 3


@dataclass(frozen=True)
class Affinities:
    """CPUs of a thread that was pinned to one CPU, through a change of its cpuset and back."""

    before: int
    meanwhile: int
    after: int


def pinned_while_the_cpuset_passes_it_by() -> Affinities:
    """Pin to CPU 1 of 0-3, leave only CPU 0, give 0-3 back."""
    with group("passes-by") as pod, process_in(pod) as pid:
        pod.write("cpuset.cpus", "0-3")
        os.sched_setaffinity(pid, {1})
        before = affinity(pid)
        pod.write("cpuset.cpus", "0")
        meanwhile = affinity(pid)
        pod.write("cpuset.cpus", "0-3")
        return Affinities(before, meanwhile, affinity(pid))


def pinned_while_the_cpuset_grows_and_shrinks_around_it() -> Affinities:
    """Pin to CPU 1 of 0-3, grow to 0-7, shrink to 0-1."""
    with group("around") as pod, process_in(pod) as pid:
        pod.write("cpuset.cpus", "0-3")
        os.sched_setaffinity(pid, {1})
        before = affinity(pid)
        pod.write("cpuset.cpus", "0-7")
        meanwhile = affinity(pid)
        pod.write("cpuset.cpus", "0-1")
        return Affinities(before, meanwhile, affinity(pid))


def pinned_while_its_cpu_is_offline() -> Affinities:
    """Pin to CPU 3 of 2-3 and take it offline."""
    with group("offline") as pod, process_in(pod) as pid:
        pod.write("cpuset.cpus", "2-3")
        os.sched_setaffinity(pid, {3})
        before = affinity(pid)
        set_online(3, online=False)
        try:
            meanwhile = wait_for(lambda: affinity(pid), lambda cpus: cpus != before)
        finally:
            set_online(3, online=True)
        wait_for(lambda: pod.read("cpuset.cpus.effective"), lambda cpus: cpus == "2-3")
        # The cpuset has been changed; its tasks follow after it.
        after = wait_for(lambda: affinity(pid), lambda cpus: bool(cpus & 1 << 3))
        return Affinities(before, meanwhile, after)


def errors_of_writes() -> dict[str, str]:
    """Name the errors of what must be refused, and the effect of what is not."""
    with group("refused") as pod, process_in(pod) as pid:
        pod.write("cpuset.cpus", "0-3")
        return {
            "affinity outside": _error(lambda: os.sched_setaffinity(pid, {4})),
            "cpus beyond the machine": _error(lambda: pod.write("cpuset.cpus", "99999")),
            "cpus that are no list": _error(lambda: pod.write("cpuset.cpus", "0-x")),
            "mems beyond the machine": _error(lambda: pod.write("cpuset.mems", "99999")),
            "after the errors": pod.read("cpuset.cpus"),
            "affinity partly outside": _error(lambda: os.sched_setaffinity(pid, {3, 4})),
            "is then": ",".join(str(cpu) for cpu in sorted(os.sched_getaffinity(pid))),
        }


def effective_cpus_of_containers() -> dict[str, str]:
    """Read the CPUs of containers with a cpuset that is empty, or partly or wholly outside their pod's."""
    with group("kubepods") as pods:
        pods.write("cpuset.cpus", "0-3")
        container = pods.child("pod").child("container")
        with process_in(container) as pid:

            def effective(cpus: str) -> str:
                container.write("cpuset.cpus", cpus)
                effective = container.read("cpuset.cpus.effective")
                assert affinity(pid) == parse_cpu_list(effective)
                return effective

            return {
                "empty": effective(""),
                "inside": effective("1-2"),
                "partly outside": effective("3-5"),
                "outside": effective("8-9"),
                "emptying it": _error(lambda: container.write("cpuset.cpus", "")),
                "is then": container.read("cpuset.cpus"),
            }


def seen_from_a_cgroup_namespace() -> dict[str, str]:
    """Write cpusets, and read where processes are, from a namespace whose root is the group `agent`."""
    libc = ctypes.CDLL(None, use_errno=True)
    with group("kubepods") as pods:
        agent, other = pods.child("agent"), pods.child("other")
        for container in (agent, other):
            container.write("cpuset.cpus", "0-3")

        def look() -> dict[str, str]:
            agent.take(os.getpid())
            if libc.unshare(_NEW_CGROUP_NAMESPACE):
                raise OSError(ctypes.get_errno(), "unshare")
            with process_in(other) as pid:
                return {
                    "own": _error(lambda: agent.write("cpuset.cpus", "0-2")),
                    "other": _error(lambda: other.write("cpuset.cpus", "0-2")),
                    "path of other": Path(f"/proc/{pid}/cgroup").read_text().strip(),
                }

        seen = _in_a_child(look)
        if libc.mount(None, str(ROOT).encode(), None, _REMOUNT, b"nsdelegate"):
            raise OSError(ctypes.get_errno(), "mount")
        return seen | {"own with nsdelegate": _in_a_child(look)["own"]}


def _in_a_child(look: Callable[[], dict[str, str]]) -> dict[str, str]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, json.dumps(look()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        found: dict[str, str] = json.loads(answer.read())
    os.waitpid(pid, 0)
    return found


@dataclass(frozen=True)
class Moved:
    """Pages of a process by NUMA node, before its cpuset named other nodes and after."""

    before: dict[int, int]
    after: dict[int, int]


def memory_of_a_cpuset_that_changes_nodes(first: int, then: int) -> Moved:
    """Touch memory on one node, and let the cpuset name another."""
    with group("memory") as pod:
        pod.write("cpuset.mems", str(first))
        with process_in(pod, megabytes=MEGABYTES) as pid:
            before = pages_by_node(pid)
            pod.write("cpuset.mems", str(then))
            # The kernel moves pages after it has answered the write.
            after = wait_for(lambda: pages_by_node(pid), lambda pages: first not in pages)
            return Moved(before, after)


def memory_of_a_cpuset_that_grows(first: int, all_nodes: str) -> Moved:
    """Touch memory on one node, and let the cpuset name all."""
    with group("memory") as pod:
        pod.write("cpuset.mems", str(first))
        with process_in(pod, megabytes=MEGABYTES) as pid:
            before = pages_by_node(pid)
            pod.write("cpuset.mems", all_nodes)
            return Moved(before, pages_by_node(pid))


def huge_pages_of_two_nodes(mode: int, touching: int) -> dict[int, int]:
    """Touch 8 huge pages from a CPU under a policy for nodes 0 and 1, which have 8 each; count by node."""
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {touching})
    for node in (0, 1):
        set_huge_pages(node, 2048, 8)
    try:
        with mmap.mmap(-1, 8 << 21, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_HUGETLB) as pages:
            start = ctypes.c_char.from_buffer(pages)
            address, nodes = ctypes.addressof(start), ctypes.c_ulong(0b11)
            del start  # the pages cannot be unmapped while ctypes holds a pointer to them
            where, size = ctypes.c_void_p(address), ctypes.c_size_t(len(pages))
            assert ctypes.CDLL(None).syscall(_MBIND, where, size, mode, ctypes.byref(nodes), 65, 0) == 0
            for page in range(8):
                pages[page << 21] = 1
            return pages_by_node(os.getpid(), smallest=8, where="huge")
    finally:
        os.sched_setaffinity(0, everywhere)
        for node in (0, 1):
            set_huge_pages(node, 2048, 0)


def cpus_of_a_container_whose_only_cpu_goes_offline() -> dict[str, str]:
    """Give a container one CPU, take it offline and back."""
    with group("kubepods") as pods:
        pods.write("cpuset.cpus", "0-7")
        container: Group = pods.child("pod").child("container")
        container.write("cpuset.cpus", "3")
        with process_in(container):
            before = container.read("cpuset.cpus.effective")
            set_online(3, online=False)
            try:
                meanwhile = wait_for(
                    lambda: container.read("cpuset.cpus.effective"), lambda cpus: cpus != "3"
                )
            finally:
                set_online(3, online=True)
            after = wait_for(lambda: container.read("cpuset.cpus.effective"), lambda cpus: cpus == "3")
            return {
                "before": before,
                "meanwhile": meanwhile,
                "after": after,
                "written": container.read("cpuset.cpus"),
            }


def _error(act: object) -> str:
    assert callable(act)
    try:
        act()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "none"
