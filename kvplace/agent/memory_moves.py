"""Moves the memory of a VM's QEMU when a relocation is carried out."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from kvplace.agent.node_objects import NodeObjects
from kvplace.core.cpuset import format_cpu_list, mask_of
from kvplace.core.errors import BadAnnotation, KvplaceError
from kvplace.core.placement import PodPlacement
from kvplace.core.request import NumaMemory
from kvplace.core.request_json import read_pod_request
from kvplace.core.scalars import Bytes, NumaId
from kvplace.linux.numa_memory import memory_of_process, migrate_memory

log = logging.getLogger(__name__)

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
        if wanted.floats or wanted.numa_memory is NumaMemory.OFF or not targets or self._is_over(placement):
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

    def _is_over(self, placement: PodPlacement) -> bool:
        """Whether an agent before this one has carried a placement out."""
        revisions = self._own.revisions.of(placement.pod_uid)
        claim = self._own.ledger.claims.get(placement.pod_uid)
        return (
            (revisions is None or revisions.followed is None)
            and claim is not None
            and claim.relocation is None
            and claim.revision >= placement.revision
        )


def _move(process: Path, targets: tuple[NumaId, ...]) -> None:
    sources = [node for node, amount in memory_of_process(process).items() if amount and node not in targets]
    if sources:
        migrate_memory(int(process.name), sources, targets)
