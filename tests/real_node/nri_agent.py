"""The agent's enforcement beside a real containerd, without a cluster: tests set the node's state."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from harness.node_programs.small_images import busybox
from harness.real_node.runtime import Container, ContainerRuntime, Pod
from harness.waiting import PATIENCE_S
from kvplace.agent.cpuset_keeper import CpusetKeeper
from kvplace.agent.node_report import NodeReport
from kvplace.agent.nri_source import NriSource
from kvplace.core.cpuset import format_cpu_list, lowest, mask_of
from kvplace.core.placement import PodPlacement
from kvplace.core.scalars import PodUid
from kvplace.core.well_known_names import PLACED_LABEL, PLACEMENT
from kvplace.linux.cgroups import find_cpuset_hierarchy
from kvplace.nri.plugin import NriRuntime
from tests.agent.nodes_in_use import machine_of, node_with, placed
from tests.agent.played_runtime import PlayedObjects

SAY_CPUS_AND_STAY = ["sh", "-c", "grep Cpus_allowed_list /proc/self/status; exec sleep inf"]
"""Prints what its first instructions may run on."""
_VM_LABELS = {"kubevirt.io": "virt-launcher", PLACED_LABEL: "true"}
_ALL = mask_of(os.sched_getaffinity(0))
ALL = format_cpu_list(_ALL)
OWNED = format_cpu_list(_ALL & ~lowest(_ALL, _ALL.bit_count() - 1))
"""The CPU that the VM of a test owns: the highest."""
POOL = format_cpu_list(lowest(_ALL, _ALL.bit_count() - 1))


class RealNode:
    """A sandbox with containerd, and an agent on this side of it."""

    def __init__(self, runtime: ContainerRuntime) -> None:
        self.runtime = runtime
        self._machine = machine_of(sorted(os.sched_getaffinity(0)))
        self._hierarchy = find_cpuset_hierarchy(runtime.sandbox.path("/sys/fs/cgroup"))
        self.report = NodeReport()
        self.objects = PlayedObjects(node_with(topology=self._machine))

    @asynccontextmanager
    async def agent(self) -> AsyncIterator[CpusetKeeper]:
        """Run an agent that is connected; the connection ends with the block, as when it is killed."""
        runtime = NriRuntime(self.runtime.nri_socket)
        # No sweep: what a test waits for is done because of an event.
        keeper = CpusetKeeper(self.objects, self.report, self._hierarchy, sweep_s=3600.0, starting_s=0.0)
        source = NriSource(keeper, runtime, self._hierarchy.root)
        running = asyncio.create_task(keeper.run(source))
        try:
            await until(lambda: keeper.is_connected)
            yield keeper
        finally:
            running.cancel()
            await asyncio.wait([running])

    def claim(self, *bound: PodPlacement) -> None:
        """Let these be the placements of the node from now on."""
        self.objects.become(node_with(*bound, topology=self._machine))

    def vm_pod(self, name: str) -> tuple[Pod, PodPlacement]:
        """Make the sandbox of a VM's pod and its placement on the CPU that it owns."""
        bound = placed(PodUid(f"uid-of-vms-{name}"), OWNED)
        annotations = {PLACEMENT: bound.to_json()}
        pod = self.runtime.run_pod(name, namespace="vms", labels=_VM_LABELS, annotations=annotations)
        return pod, bound

    def first_cpus(self, pod: Pod, name: str) -> str:
        """Read what a container that ran SAY_CPUS_AND_STAY has printed first; empty before it has."""
        namespace, pod_name = pod.uid.removeprefix("uid-of-").split("-", 1)
        log = self.runtime.sandbox.path(f"/var/log/pods/{namespace}_{pod_name}_{pod.uid}/{name}.log")
        lines = log.read_text().splitlines() if log.exists() else []
        return lines[0].split()[-1] if lines else ""


def container(pod: Pod, name: str) -> Container:
    """Create a container in a pod and start it."""
    return pod.run_container(name, SAY_CPUS_AND_STAY, image=busybox().reference)


async def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds that nothing reports."""
    async with asyncio.timeout(PATIENCE_S):
        while not await asyncio.to_thread(holds):  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)
