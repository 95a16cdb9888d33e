"""The memory of this node: the amount that no claim accounts for, and the memory of a VM that is relocated.

The use of the whole node is read first, then the part of the cgroups with claims: memory that a VM takes in
between makes the rest seem smaller, never larger. The kernel counts some seconds late, so of two measurements
that follow each other the smaller one counts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from kvplace.agent.node_objects import NodeObjects
from kvplace.agent.node_plan import NodePlan, PodPlan, PodRevisions
from kvplace.agent.node_report import NodeReport
from kvplace.core.cpuset import format_cpu_list, mask_of
from kvplace.core.errors import BadAnnotation, KvplaceError
from kvplace.core.free_resources import NOTHING_IN_USE, Used, in_use
from kvplace.core.ledger import Claim
from kvplace.core.placement import PodPlacement
from kvplace.core.request import NumaMemory
from kvplace.core.request_json import read_pod_request
from kvplace.core.scalars import NO_BYTES, Bytes, NumaId, PodUid
from kvplace.linux.cgroups import MOUNT_POINT, folders_of, processes_of
from kvplace.linux.kernel_files import Gone
from kvplace.linux.numa_memory import (
    huge_pages_of_cgroup,
    memory_of_process,
    memory_use,
    migrate_memory,
    plain_memory_of_cgroup,
)

log = logging.getLogger(__name__)

MEASURE_EVERY_S = 10.0


class MemoryWatch:
    """Reports the memory in use outside of the claims, again and again."""

    def __init__(
        self, own: NodeObjects, plan: Callable[[], NodePlan], report: NodeReport, *, host: Path
    ) -> None:
        """`plan` returns the plan of the moment, `host` is the root of the host's proc and sys."""
        self._own = own
        self._plan = plan
        self._report = report
        self._proc, self._sys = host / "proc", host / "sys"
        self._taken: Mapping[NumaId, Used] = {}

    async def run(self) -> None:
        """Measure until cancelled."""
        await self._own.wait_until_known()
        while True:
            try:
                await self.measure()
            except KvplaceError as error:
                log.warning("the memory in use cannot be measured: %s", error)
            await asyncio.sleep(MEASURE_EVERY_S)

    async def measure(self) -> None:
        """Measure once and report, unless the pods of the node are not known yet."""
        plan = self._plan()
        if not plan.is_complete:
            return
        pods, held = list(plan.pods.values()), self._own.ledger.claims
        found = await asyncio.to_thread(self._read, pods, held)
        counted = {node: _smaller(used, self._taken.get(node)) for node, used in found.items()}
        self._taken = found
        stored = self._own.topology_record()
        before = self._report.in_use or (NOTHING_IN_USE if stored is None else stored.in_use)
        self._report.use_memory(in_use(counted, before))

    def _read(self, pods: Iterable[PodPlan], held: Mapping[PodUid, Claim]) -> dict[NumaId, Used]:
        nodes = memory_use(self._sys)
        plain: dict[NumaId, int] = {}
        pages: dict[tuple[NumaId, Bytes], int] = {}
        for pod in pods:
            for container in pod.containers:
                with suppress(Gone):  # it has ended
                    self._add(container.cgroup, held.get(pod.uid), plain, pages)
        return {node: _of_others(use, node, plain, pages) for node, use in nodes.items()}

    def _add(
        self,
        cgroup: Path,
        claim: Claim | None,
        plain: dict[NumaId, int],
        pages: dict[tuple[NumaId, Bytes], int],
    ) -> None:
        """Add the memory of one container; the memory of its claim if its cgroups do not count memory."""
        process = next(iter(processes_of(cgroup)), None)
        if process is None:
            return
        folders = folders_of(self._proc / str(process), self._sys / MOUNT_POINT, cgroup)
        memory = plain_memory_of_cgroup(folders)
        if memory is None:
            memory = {} if claim is None else claim.plain_memory
        for node, amount in memory.items():
            plain[node] = plain.get(node, 0) + amount
        in_pages = huge_pages_of_cgroup(folders)
        if in_pages is None:
            held = {} if claim is None else claim.huge_pages
            in_pages = {node: dict(sizes) for node, sizes in held.items()}
        for node, sizes in in_pages.items():
            for size, count in sizes.items():
                pages[node, size] = pages.get((node, size), 0) + count


def _of_others(
    use: Used, node: NumaId, plain: Mapping[NumaId, int], pages: Mapping[tuple[NumaId, Bytes], int]
) -> Used:
    return Used(
        use.memory,
        Bytes(max(0, use.taken - plain.get(node, NO_BYTES))),
        {
            size: (total, max(0, taken - pages.get((node, size), 0)))
            for size, (total, taken) in use.pages.items()
        },
    )


def _smaller(now: Used, before: Used | None) -> Used:
    if before is None:
        return now
    pages = {
        size: (total, min(taken, before.pages.get(size, (0, taken))[1]))
        for size, (total, taken) in now.pages.items()
    }
    return Used(now.memory, min(now.taken, before.taken), pages)


MAY_STAY = Bytes(256 * 1024 * 1024)
"""Memory that may stay on other NUMA nodes after a move: pages that are locked or in use by a device."""


class MemoryMoves:
    """The moves of this node; none for a relocation that an agent before this one has carried out."""

    def __init__(self, own: NodeObjects, proc: Path = Path("/proc")) -> None:
        """`proc` is where the host's processes are."""
        self._own = own
        self._proc = proc

    async def move(self, pid: int, placement: PodPlacement) -> str:
        """Move the memory of a QEMU to the NUMA nodes of a placement; returns the failure, if any.

        Memory without a strict binding may stay elsewhere, so it is never a failure. But cores do not leave
        memory that devices of the host access.
        """
        wanted = placement.placement
        targets = wanted.memory_nodes
        if wanted.floats or wanted.numa_memory is NumaMemory.OFF or not targets:
            return ""
        revisions = self._own.revisions.of(placement.pod_uid) or PodRevisions(placement)
        if revisions.was_carried_out(placement, self._own.ledger):
            return ""
        why = ""
        try:
            await asyncio.to_thread(_move, self._proc / str(pid), targets)
            left = await asyncio.to_thread(memory_of_process, self._proc / str(pid))
            elsewhere = sum(amount for node, amount in left.items() if node not in targets)
            if elsewhere > MAY_STAY:
                nodes = format_cpu_list(mask_of(targets))
                why = f"{elsewhere >> 20} MiB could not be moved to NUMA node {nodes}"
        except KvplaceError as error:
            why = str(error)
        if why and self._leaves_memory_of_devices(placement):
            return f"{why}, because devices of the host access them"
        if why and wanted.numa_memory is not NumaMemory.STRICT:
            log.warning("memory stays: %s", why, extra={"uid": placement.pod_uid})
            return ""
        return why

    def _leaves_memory_of_devices(self, placement: PodPlacement) -> bool:
        """Whether a relocation takes a VM with devices of the host to NUMA nodes where it was not before."""
        claim, pod = self._own.ledger.claims.get(placement.pod_uid), self._own.pods.get(placement.pod_uid)
        relocation = None if claim is None else claim.relocation
        if pod is None or relocation is None or relocation.previous is None or relocation.is_way_back:
            return False
        try:
            has_devices = bool(pod.resource_claims or read_pod_request(pod.request).request.devices)
        except BadAnnotation:
            return False
        before = relocation.previous.placement.numa_nodes
        return has_devices and not set(placement.placement.numa_nodes) <= set(before)


def _move(process: Path, targets: tuple[NumaId, ...]) -> None:
    sources = [node for node, amount in memory_of_process(process).items() if amount and node not in targets]
    if sources:
        migrate_memory(int(process.name), sources, targets)
