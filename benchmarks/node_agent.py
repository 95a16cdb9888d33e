"""Cost of the agent on a node with 100 VMs of 8 vCPUs, and its time to repair drift.

    ./make bench node_agent, or .venv/bin/python -m benchmarks.node_agent [--vms N] [--vcpus N] [--seconds N]

Needs root and a cpuset hierarchy. The VMs are sleeping processes with the names, threads and cgroups of QEMU
under a kubelet; the agent reads nothing else of a VM. All run on the shared pool, so that two CPUs are
enough. The agent is a process with its real components (discovery, cpusets by cgroup writes, verification,
publishing). The cluster in memory that it talks to is in the same process and part of the cost. CPU is the
share of one core that the process used, as the kernel counts it, while nothing happened. The benchmark sets
the drift itself, and measures the time until the kernel shows the old state again.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks._processes import cpu_seconds
from harness.played_qemu import played_qemus
from harness.pod_cgroups import PodCgroups, container_id, pod_cgroups, pod_uid
from kvplace.agent.process import running_agent
from kvplace.agent.this_machine import AgentSettings, MachineWatch
from kvplace.core.ledger import LedgerChange, claim_of
from kvplace.core.node_topology import Enforcement
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import OnFailure, Policy
from kvplace.core.scalars import ContainerId, NodeName, PodUid
from kvplace.core.well_known_names import PLACEMENT
from kvplace.kube.memory_cluster import MemoryCluster
from kvplace.linux.cgroups import CgroupVersion
from kvplace.service.connections import Address

NODE = NodeName("worker-1")
SETTLED_S = 5.0
"""After the first reports, until what follows from them has been written."""
_LOOK_EVERY_S = 0.001


@dataclass(frozen=True, slots=True)
class Vm:
    """One process that is a VM to the agent."""

    uid: PodUid
    container: ContainerId
    cgroup: Path
    pid: int

    def threads(self) -> list[int]:
        """List its threads."""
        return [int(task.name) for task in Path(f"/proc/{self.pid}/task").iterdir()]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--vms", type=int, default=100)
    parser.add_argument("--vcpus", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--repairs", type=int, default=30)
    parser.add_argument("--agent", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.agent:
        host, vms = json.loads(given.agent)
        asyncio.run(_agent(Path(host), [(PodUid(uid), ContainerId(one)) for uid, one in vms]))
        return 0
    if os.geteuid() != 0:
        print("the agent's cgroups need root", file=sys.stderr)
        return 1
    with (
        pod_cgroups() as tree,
        tempfile.TemporaryDirectory() as host,
        played_qemus(given.vms, vcpus=given.vcpus) as qemus,
    ):
        lay_out(Path(host), tree)
        vms = [in_pod(tree, number, pid) for number, pid in enumerate(qemus.pids)]
        threads = sum(len(vm.threads()) for vm in vms)
        print(f"{len(vms)} VMs of {given.vcpus} vCPUs, {threads} threads, nothing happens")
        print(f"{'':<34}{'% of one core':>14}{'resident MB':>14}")
        for count in (0, len(vms)):
            with agent(Path(host), vms[:count]) as pid:
                before, began = cpu_seconds(pid), time.monotonic()
                time.sleep(given.seconds)
                share = 100 * (cpu_seconds(pid) - before) / (time.monotonic() - began)
                print(f"{f'agent with {count} VMs':<34}{share:>14.2f}{resident_mb(pid):>14.1f}", flush=True)
                if count:
                    _measure_repairs(vms, given.repairs)
    return 0


def lay_out(host: Path, tree: PodCgroups) -> None:
    """Make a host with the CPUs and processes of this machine and no other cgroups than those of the tree."""
    (host / "sys/fs").mkdir(parents=True)
    (host / "proc").symlink_to("/proc")
    for name in ("devices", "kernel"):
        (host / "sys" / name).symlink_to(f"/sys/{name}")
    cgroups = host / "sys/fs/cgroup"
    if tree.hierarchy.version is CgroupVersion.V1:
        cgroups.mkdir()
        cgroups /= "cpuset"
    cgroups.symlink_to(tree.base)


def in_pod(tree: PodCgroups, number: int, pid: int) -> Vm:
    """Put a process into the container of a pod of its own."""
    vm = Vm(pod_uid(number), container_id(number), tree.container(pod_uid(number), container_id(number)), pid)
    (vm.cgroup / "cgroup.procs").write_text(str(pid))
    return vm


def _measure_repairs(vms: list[Vm], times: int) -> None:
    print(f"\nseconds from drift to repair, {times} times each")
    print(f"{'':<34}{'median':>14}{'longest':>14}")
    # No VM twice: the agent gives up what a user undoes again and again.
    chance = random.Random(1)
    chosen = iter(chance.sample(vms, 3 * times))
    for name, repaired in (
        ("taskset of one thread", _one_thread),
        ("taskset of all threads of a VM", _all_threads),
        ("write to a container's cpuset", _cpuset),
    ):
        seconds = []
        for vm in itertools.islice(chosen, times):
            time.sleep(chance.random())  # any moment between two checks of the agent
            seconds.append(repaired(vm))
        print(f"{name:<34}{statistics.median(seconds):>14.3f}{max(seconds):>14.3f}", flush=True)


def _one_thread(vm: Vm) -> float:
    return _until_repaired([max(vm.threads())])


def _all_threads(vm: Vm) -> float:
    return _until_repaired(vm.threads())


def _until_repaired(threads: list[int]) -> float:
    before = {thread: os.sched_getaffinity(thread) for thread in threads}
    for thread in threads:
        os.sched_setaffinity(thread, {min(before[thread])})
    return _seconds_until(
        lambda: all(os.sched_getaffinity(thread) == cpus for thread, cpus in before.items())
    )


def _cpuset(vm: Vm) -> float:
    file = vm.cgroup / "cpuset.cpus"
    before = file.read_text()
    file.write_text("0")
    return _seconds_until(lambda: file.read_text() == before)


def _seconds_until(done: Callable[[], bool]) -> float:
    began = time.monotonic()
    while not done():
        if time.monotonic() - began > 30:
            sys.exit("the agent did not repair what was changed within 30 seconds")
        time.sleep(_LOOK_EVERY_S)
    return time.monotonic() - began


@contextmanager
def agent(host: Path, vms: list[Vm]) -> Iterator[int]:
    """Run an agent that knows of these VMs; gives its process id when it has settled."""
    plan = json.dumps([str(host), [(vm.uid, vm.container) for vm in vms]])
    command = [sys.executable, "-m", "benchmarks.node_agent", "--agent", plan]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        try:
            if not process.stdout.readline():
                sys.exit("the agent did not start")
            time.sleep(SETTLED_S)
            yield process.pid
        finally:
            process.kill()


def resident_mb(pid: int) -> float:
    """Resident memory, files included."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


async def _agent(host: Path, vms: list[tuple[PodUid, ContainerId]]) -> None:
    """Run an agent before a cluster with these pods until killed."""
    cluster = RunningPods()
    cluster.create_node(NODE)
    settings = AgentSettings(NODE, Address("127.0.0.1", 0), host, enforcement=Enforcement.CGROUP)
    online = MachineWatch(settings).machine.topology
    placement = Placement(
        Policy.NUMA, (), online.cpus, numa_nodes=tuple(node.id for node in online.numa_nodes if node.cpus)
    )
    claims = []
    for uid, container in vms:
        name = f"virt-launcher-{uid[-4:]}"
        bound = PodPlacement(uid, NODE, online.fingerprint, OnFailure.WAIT, placement)
        cluster.run_vm(name, uid, container, bound.to_json())
        claims.append(claim_of(uid, placement, namespace="default", pod=name))
    await cluster.write_ledger(await cluster.create_ledger(NODE), LedgerChange(tuple(claims)))
    async with running_agent(settings, cluster) as running:
        changed = asyncio.Event()
        running.report.subscribe(changed.set)
        async with asyncio.timeout(60):
            while sum(report.pinned for report in running.report.pods.values()) < len(vms):
                changed.clear()
                await changed.wait()
        print("settled", flush=True)
        await asyncio.Event().wait()


class RunningPods(MemoryCluster):
    """A cluster with running pods."""

    def run_vm(self, name: str, uid: PodUid, container: ContainerId, placement: str) -> None:
        """Create the pod of a VM as it is when its kubelet has started it."""
        made = self.create_pod(name, uid=uid, vmi=name, node=NODE, annotations={PLACEMENT: placement})
        self._put_pod(replace(made, phase="Running", compute_container=container))


if __name__ == "__main__":
    sys.exit(main())
