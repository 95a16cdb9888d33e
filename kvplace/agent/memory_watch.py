"""Measures the memory and huge pages that something else than VMs with claims uses on this node.

What the whole node uses is read first, then what the cgroups of claims use of it: memory that a VM takes in
between makes others seem smaller, never larger. The kernel counts some seconds late, so of two measurements
that follow each other the smaller one counts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from kvplace.agent.node_objects import NodeObjects
from kvplace.agent.node_plan import NodePlan, PodPlan
from kvplace.agent.node_report import NodeReport
from kvplace.core.errors import KvplaceError
from kvplace.core.ledger import Claim
from kvplace.core.memory_in_use import NOTHING_IN_USE, Used, in_use
from kvplace.core.scalars import NO_BYTES, Bytes, NumaId, PodUid
from kvplace.linux.cgroup import UNIFIED, folders_of, processes_of
from kvplace.linux.kernel_files import Gone
from kvplace.linux.numa_memory import NodeUse, huge_pages_of_cgroup, memory_use, plain_memory_of_cgroup

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
        """Add the memory of one container; that of its claim if its cgroups do not count memory."""
        process = next(iter(processes_of(cgroup)), None)
        if process is None:
            return
        folders = folders_of(self._proc / str(process), self._sys / "fs/cgroup")
        if (cgroup / "cgroup.controllers").exists():
            folders[UNIFIED] = cgroup  # /proc shows paths as seen from our own cgroup namespace
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
    use: NodeUse, node: NumaId, plain: Mapping[NumaId, int], pages: Mapping[tuple[NumaId, Bytes], int]
) -> Used:
    return Used(
        use.memory,
        Bytes(max(0, use.used - plain.get(node, NO_BYTES))),
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
