"""What it costs the agent to look at every thread of every VM of a node once a second.

    ./make bench agent_look, or .venv/bin/python -m benchmarks.agent_look [--looks N]

The VMs are processes with QEMU's thread names that sleep; to read them costs the same. A look of the agent's
guard is measured, with the decision about every pod and without what the API server would be told, in CPU
time of the process. The first look opens everything, sets all threads and reads them back. `anew` is a look
that also reads all names, which happens once a minute. Share of one core: a look a second, one of 60 anew.
Needs root and a cpuset control group.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks._tables import table
from harness.played_qemu import PlayedQemus, played_qemus
from harness.pod_cgroups import PodCgroups, container_id, pod_cgroups, pod_uid
from kvplace.agent.containers import COMPUTE, Container
from kvplace.agent.cpusets import Cpusets, CpuSetting
from kvplace.agent.node_report import NodeReport
from kvplace.agent.own_node import OwnNode
from kvplace.agent.pinning_guard import PinningGuard
from kvplace.agent.pinning_sweep import READ_ANEW_S
from kvplace.agent.relocation import Relocations
from kvplace.core.cpuset import cpus_of
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import OnFailure, Policy
from kvplace.core.scalars import ContainerId, CpuId, CpuMask, NodeName
from kvplace.kube.events import EventRecorder
from kvplace.kube.memory_cluster import MemoryCluster
from kvplace.kube.records import PodRecord
from kvplace.kube.watches import Apply
from kvplace.machines.machine import find_machine

NODE = NodeName("worker-1")
SIZES = ((1, 8), (100, 8), (100, 32))
"""VMs, and vCPUs of each."""


@dataclass
class Enforced:
    """Containers whose cpusets are as decided."""

    members: Mapping[ContainerId, tuple[Container, Path]]
    decided: Cpusets

    def containers(self) -> Iterable[Container]:
        return [container for container, _ in self.members.values()]

    def cpusets(self) -> Cpusets:
        return self.decided

    def cgroup_of(self, container: ContainerId) -> Path:
        return self.members[container][1]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--looks", type=int, default=200, help="looks of each kind; the table has means")
    given = parser.parse_args()
    rows = []
    for vms, vcpus in SIZES:
        with pod_cgroups() as pods, played_qemus(vms, vcpus=vcpus) as qemus:
            rows.append(asyncio.run(measure(pods, qemus, vcpus, given.looks)))
    print(table(["VMs x vCPUs", "threads", "first ms", "look ms", "anew ms", "share of a core"], rows))


async def measure(pods: PodCgroups, qemus: PlayedQemus, vcpus: int, looks: int) -> list[str]:
    """Measure one size."""
    now = [0.0]
    guard, own = guard_over(pods, qemus, vcpus, lambda: now[0])
    try:
        first = await cpu_ms(guard, 1)
        for uid in own.state.placements:
            own.confirm(uid, 1)
        await guard.look()
        plain = await cpu_ms(guard, looks)
        began = time.process_time()
        for _ in range(10):
            now[0] += READ_ANEW_S
            await guard.look()
        anew = (time.process_time() - began) * 100
    finally:
        await guard.close()
    threads = sum(len(os.listdir(f"/proc/{pid}/task")) for pid in qemus.pids)  # noqa: PTH208
    share = (plain * (READ_ANEW_S - 1) + anew) / READ_ANEW_S / 1000
    return [
        f"{len(qemus.pids)} x {vcpus}",
        str(threads),
        f"{first:.1f}",
        f"{plain:.2f}",
        f"{anew:.1f}",
        f"{share:.2%}",
    ]


async def cpu_ms(guard: PinningGuard, looks: int) -> float:
    """CPU time of one look."""
    began = time.process_time()
    for _ in range(looks):
        await guard.look()
    return (time.process_time() - began) * 1000 / looks


def guard_over(
    pods: PodCgroups, qemus: PlayedQemus, vcpus: int, clock: Callable[[], float]
) -> tuple[PinningGuard, OwnNode]:
    """Put every process into a container of its own, and a guard over all."""
    topology = find_machine(None).topology
    online = CpuMask(topology.cpus)
    own = OwnNode(NODE, topology)
    members: dict[ContainerId, tuple[Container, Path]] = {}
    for number, pid in enumerate(qemus.pids):
        uid, identifier = pod_uid(number), container_id(number)
        folder = pods.container(uid, identifier)
        (folder / "cgroup.procs").write_text(str(pid))
        name = f"virt-launcher-{number}"
        members[identifier] = (Container(identifier, COMPUTE, uid, "vms", name, in_vm_pod=True), folder)
        placement = Placement(
            Policy.SHARE,
            tuple(CpuId(cpu) for cpu in cpus_of(online)),
            online,
            emulator_cpus=CpuMask(online & -online),
        )
        text = PodPlacement(uid, NODE, "", OnFailure.WAIT, placement).to_json()
        own.pods.apply(Apply(PodRecord("vms", name, uid, node=NODE, phase="Running", placement=text)))
    settings = {identifier: CpuSetting(online) for identifier in members}
    confirmed = dict.fromkeys(own.state.placements, 1)
    enforced = Enforced(members, Cpusets(online, settings, {}, confirmed))
    cluster = MemoryCluster()
    guard = PinningGuard(
        own,
        enforced,
        Relocations(own),
        NodeReport(),
        EventRecorder(cluster),
        cluster,
        mounted=Path("/sys/fs/cgroup"),
        clock=clock,
    )
    return guard, own


if __name__ == "__main__":
    main()
