"""A node as a kubelet leaves it, and its agent; called inside."""

from __future__ import annotations

import os
import re
import signal
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from harness.libvirt_session.threads import Affinities
from harness.pod_cgroups import Driver, PodCgroups
from kvplace.agent.process import run
from kvplace.agent.this_machine import AgentSettings
from kvplace.core.cpuset import format_cpu_list, parse_cpu_list
from kvplace.core.node_topology import Enforcement
from kvplace.core.scalars import ContainerId, NodeName, PodUid
from kvplace.linux.cgroups import find_cpuset_hierarchy
from kvplace.service.connections import Address
from tests.emulated_machine.cgroups import ROOT, Group, pages_by_node

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
AGENT_LOG = Path("/run/agent.log")


@dataclass(frozen=True)
class ApiServer:
    """How a pod of this node reaches the API server."""

    host: str
    port: int
    token: str
    authority: str
    """The CA certificate."""


def start_agent(node: str, server: ApiServer, reserved: str) -> int:
    """Start the agent's process as in its pod, and give its id."""
    SERVICE_ACCOUNT.mkdir(parents=True, exist_ok=True)
    for name, text in (("token", server.token), ("ca.crt", server.authority), ("namespace", "kvplace-agent")):
        (SERVICE_ACCOUNT / name).write_text(text)
    os.environ |= {"KUBERNETES_SERVICE_HOST": server.host, "KUBERNETES_SERVICE_PORT": str(server.port)}
    settings = AgentSettings(
        node=NodeName(node),
        health_address=Address("127.0.0.1", 8082),
        reserved=parse_cpu_list(reserved),
        enforcement=Enforcement.CGROUP,
    )
    # A fork with everything imported starts in a second, a new interpreter under emulation in ten and more.
    if child := os.fork():
        return child
    os.setsid()
    log = os.open(AGENT_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    try:
        run(settings)
    finally:
        traceback.print_exc()
        os._exit(1)


def kill_agent(pid: int, after_s: float, within_s: float) -> None:
    """End the agent as a crash does, some time from now; raises TimeoutError, which names the missing event.

    A write into `cpuset.mems` ends when the memory has moved, and no signal ends it earlier.
    """
    time.sleep(after_s)
    os.kill(pid, signal.SIGKILL)
    ends = time.monotonic() + within_s
    while (process := Path(f"/proc/{pid}")).exists():
        if time.monotonic() > ends:
            raise TimeoutError("".join(each.read_text() for each in process.glob("task/*/stack")))
        time.sleep(0.01)


def agent_log() -> str:
    return AGENT_LOG.read_text() if AGENT_LOG.exists() else ""


def make_container(uid: str, container: str, driver: str, *, busy: bool) -> str:
    """Make a container's cgroup, with a process if wanted, and give its folder."""
    (ROOT / "cgroup.subtree_control").write_text("+cpuset +memory")
    tree = PodCgroups(find_cpuset_hierarchy(ROOT), ROOT, Driver(driver))
    folder = tree.container(PodUid(uid), ContainerId(container))
    if busy:
        tree.process(folder)
    return str(folder)


def end_pods(keepers: list[int]) -> None:
    """End everything that runs in pods, and remove their cgroups."""
    for keeper in keepers:
        os.kill(keeper, signal.SIGKILL)
    for folder in ROOT.glob("kubepods*"):
        Group(folder).remove()


@dataclass(frozen=True)
class Seen:
    """The kernel's report of one VM."""

    vcpus: dict[int, str]
    io_threads: dict[int, str]
    emulator: dict[str, str]
    cpuset: str
    mems: str
    pages: dict[int, int]
    """Of the guest's memory, by NUMA node."""
    policies: set[str]
    """Of the guest's memory."""


def look_at_vm(pid: int, cgroup: str, megabytes: int) -> Seen:
    """Read every thread, the cgroup, and the memory of a VM."""
    found = Affinities.of_process(pid)
    folder = Path(cgroup)
    return Seen(
        {vcpu: format_cpu_list(cpus) for vcpu, cpus in found.vcpus().items()},
        {thread: format_cpu_list(cpus) for thread, cpus in found.io_threads().items()},
        {name: format_cpu_list(cpus) for name, cpus in found.emulator().items()},
        (folder / "cpuset.cpus.effective").read_text().strip(),
        (folder / "cpuset.mems.effective").read_text().strip(),
        pages_by_node(pid, smallest=megabytes * 256),
        _policies(pid, megabytes),
    )


def _policies(pid: int, megabytes: int) -> set[str]:
    pages = re.compile(r"\banon=(\d+)|\bdirty=(\d+)")
    return {
        line.split()[1]
        for line in Path(f"/proc/{pid}/numa_maps").read_text().splitlines()
        if (found := pages.search(line)) and int(found[1] or found[2]) >= megabytes * 256
    }


def await_vm(pid: int, cgroup: str, megabytes: int, wanted: Seen, seconds: float) -> tuple[Seen, float]:
    """Check again and again until a VM is as wanted, or the time is over; gives how long that took."""
    began = time.monotonic()
    while True:
        seen = look_at_vm(pid, cgroup, megabytes)
        if as_wanted(seen, wanted) or time.monotonic() - began > seconds:
            return seen, time.monotonic() - began
        time.sleep(0.1)


def as_wanted(seen: Seen, wanted: Seen) -> bool:
    """Compare all but names of QEMU's other threads and numbers of pages."""
    return (
        seen.vcpus == wanted.vcpus
        and seen.io_threads == wanted.io_threads
        and set(seen.emulator.values()) == set(wanted.emulator.values())
        and seen.cpuset == wanted.cpuset
        and seen.pages.keys() == wanted.pages.keys()
    )


def effective_cpus(cgroup: str) -> str:
    """Read what a container may use."""
    return (Path(cgroup) / "cpuset.cpus.effective").read_text().strip()


# Ways in which a VM gets elsewhere.


def taskset(pid: int, name: str, cpus: str) -> None:
    """Move a thread of QEMU by its name."""
    for thread in Affinities.of_process(pid).threads:
        if thread.name == name:
            os.sched_setaffinity(thread.tid, _set(cpus))


def virsh_vcpupin(uri: str, vcpu: int, cpus: str) -> None:
    """Pin a vCPU as an operator does."""
    import libvirt

    connection = libvirt.open(uri)
    try:
        (domain,) = connection.listAllDomains()
        width = connection.getCPUMap()[0]
        mask = parse_cpu_list(cpus)
        domain.pinVcpu(vcpu, tuple(bool(mask >> cpu & 1) for cpu in range(width)))
    finally:
        connection.close()


def write_cpuset(cgroup: str, cpus: str) -> None:
    """Change a container's cpuset as a container runtime's update does."""
    (Path(cgroup) / "cpuset.cpus").write_text(cpus)


def _set(cpus: str) -> set[int]:
    mask = parse_cpu_list(cpus)
    return {cpu for cpu in range(mask.bit_length()) if mask >> cpu & 1}
