"""Time that the agent, an NRI plugin of a real containerd, adds to the creation and start of a container.

    ./make bench container_creation, or .venv/bin/python -m benchmarks.container_creation [--rounds N]

containerd runs in a sandbox without a kubelet and is called over its CRI socket. A round creates, starts and
removes one container of a pod. Rounds without and with the agent take turns, in blocks of ten. The second
table is the creation of a VM's container that takes a CPU from the given number of running containers, which
the agent moves off this CPU in its answer. Needs root.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from asyncio import to_thread
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks._cri import CriClient, sandbox_config
from benchmarks._tables import table
from harness.node_programs.image import archive
from harness.node_programs.programs import node_programs
from harness.node_programs.small_images import busybox
from harness.real_node.runtime import ContainerRuntime
from harness.real_node.sandbox import Sandbox
from kvplace.agent.cpuset_keeper import CpusetKeeper
from kvplace.agent.node_plan import PodRevisions, ThisNode
from kvplace.agent.node_report import NodeReport
from kvplace.agent.nri_source import NriSource
from kvplace.core.cpuset import cpus_of, lowest
from kvplace.core.ledger import Ledger, LedgerChange, claim_of
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import OnFailure, Policy
from kvplace.core.scalars import CpuId, NodeName, PodUid
from kvplace.linux.cgroups import find_cpuset_hierarchy
from kvplace.linux.sysfs import discover
from kvplace.linux.tree import FolderTree
from kvplace.nri.plugin import NriRuntime

BLOCK = 10
OTHERS = (0, 10, 50, 100)
"""How many running containers a VM's container takes a CPU from."""
NODE, VM = NodeName("worker-1"), PodUid("uid-vm")


@dataclass
class Objects:
    """The objects of the node, as the benchmark states."""

    state: ThisNode
    listeners: list[Callable[[], None]] = field(default_factory=list)

    def subscribe(self, listener: Callable[[], None]) -> None:
        self.listeners.append(listener)

    async def wait_until_known(self) -> None:
        pass

    def become(self, state: ThisNode) -> None:
        self.state = state
        for listener in self.listeners:
            listener()


class Node:
    """A sandbox with containerd, and the agent that can be connected to it."""

    def __init__(self, runtime: ContainerRuntime) -> None:
        self.runtime = runtime
        self.cri = CriClient(runtime.containerd_socket)
        self.empty = ThisNode(NODE, discover(FolderTree(Path("/"))).topology)
        self.objects = Objects(self.empty)
        self._hierarchy = find_cpuset_hierarchy(runtime.sandbox.path("/sys/fs/cgroup"))
        self._count = 0

    def vm(self) -> ThisNode:
        """A state with a VM that owns the CPUs above the lower half."""
        online = self.empty.topology.cpus
        cpus = online & ~lowest(online, (online.bit_count() + 1) // 2)
        placement = Placement(Policy.EXCLUSIVE, tuple(map(CpuId, cpus_of(cpus))), cpus, owned=cpus)
        bound = PodPlacement(VM, NODE, "", OnFailure.WAIT, placement)
        ledger = Ledger().after(LedgerChange((claim_of(VM, placement),)))
        return replace(self.empty, ledger=ledger, pods={VM: PodRevisions(bound)})

    @asynccontextmanager
    async def agent(self) -> AsyncIterator[tuple[CpusetKeeper, NriSource]]:
        keeper = CpusetKeeper(self.objects, NodeReport(), self._hierarchy)
        source = NriSource(keeper, NriRuntime(self.runtime.nri_socket), self._hierarchy.root)
        running = asyncio.create_task(keeper.run(source))
        while not keeper.is_connected:  # noqa: ASYNC110 - nothing reports it
            await asyncio.sleep(0.001)
        try:
            yield keeper, source
        finally:
            running.cancel()
            await asyncio.wait([running])

    def round(self, sandbox: str, config: bytes) -> tuple[float, float]:
        """Create, start and remove one container; returns the seconds of the first two."""
        self._count += 1
        began = time.perf_counter()
        container = self.cri.create(sandbox, config, f"c{self._count}", busybox().reference)
        created = time.perf_counter()
        self.cri.start(container)
        started = time.perf_counter()
        self.cri.remove(container)
        return created - began, started - created


async def added(node: Node, rounds: int) -> str:
    """Measure rounds without and with the agent."""
    pod = node.runtime.run_pod("measured")
    config = sandbox_config("measured", pod.uid, f"/kubepods/pod{pod.uid}")
    seconds: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    node.round(pod.sandbox_id, config)
    node.objects.become(node.vm())
    for _ in range(rounds // BLOCK):
        seconds[False] += [await to_thread(node.round, pod.sandbox_id, config) for _ in range(BLOCK)]
        async with node.agent():
            seconds[True] += [await to_thread(node.round, pod.sandbox_id, config) for _ in range(BLOCK)]
    node.objects.become(node.empty)
    pod.remove()
    medians = {
        which: [statistics.median(column) * 1000 for column in zip(*found, strict=True)]
        for which, found in seconds.items()
    }
    rows = [
        [name, *(f"{value:.1f}" for value in (without, with_, with_ - without))]
        for name, without, with_ in zip(("create", "start"), medians[False], medians[True], strict=True)
    ]
    return table(["ms, median", "without", "with the agent", "added"], rows)


async def moving(node: Node) -> str:
    """Measure the creation of a VM's container that takes CPUs from running containers."""
    rows = []
    others = node.runtime.run_pod("others")
    config = sandbox_config("others", others.uid, f"/kubepods/pod{others.uid}")
    vm_pod = node.runtime.run_pod("vm", labels={"kubevirt.io": "virt-launcher"})
    vm_config = sandbox_config("vm", vm_pod.uid, f"/kubepods/pod{vm_pod.uid}")
    running = 0
    for count in OTHERS:
        while running < count:
            running += 1
            name = f"other{running}"
            container = await to_thread(node.cri.create, others.sandbox_id, config, name, busybox().reference)
            await to_thread(node.cri.start, container)
        async with node.agent() as (keeper, source):
            times = []
            for number in range(5):
                node.objects.become(node.empty)
                keeper.carry_out()
                await source.carry_specs()
                # Waits until the runtime has applied what the courier brought.
                await to_thread(node.round, others.sandbox_id, config)
                node.objects.state = node.vm()  # as when the claim and the pod come together
                began = time.perf_counter()
                compute = await to_thread(
                    node.cri.create,
                    vm_pod.sandbox_id,
                    vm_config,
                    f"compute{count}-{number}",
                    busybox().reference,
                )
                times.append(time.perf_counter() - began)
                await to_thread(node.cri.remove, compute)
        rows.append([str(count), f"{statistics.median(times) * 1000:.0f}"])
    return table(["containers moved off", "ms, median of 5"], rows)


async def measure(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder, Sandbox("creation", Path(folder)) as sandbox:
        node = Node(ContainerRuntime(sandbox, node_programs()))
        node.runtime.import_image(archive(busybox()))
        print(await added(node, rounds))
        print()
        print(await moving(node))


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=100)
    asyncio.run(measure(arguments.parse_args().rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
