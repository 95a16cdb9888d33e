"""The agent's part when a running pod gets other cores: which placement is to be in effect, and its memory.

The loop that repairs drift does the rest: to it a new revision is one more reason why threads are not where
they should be. While a revision is not confirmed the pod's containers may use its old and its new cores; both
are its own. A revision that cannot be carried out is given up: the previous placement is in effect again, and
`serve` writes it as the next revision. After a restart of the agent the ledger knows the previous one, or
that the relocation is over: then no memory is moved.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path

from kvplace.agent.own_node import OwnNode
from kvplace.core.cpuset import format_cpu_list, mask_of
from kvplace.core.errors import KvplaceError
from kvplace.core.placement import PodPlacement
from kvplace.core.request import NumaMemory
from kvplace.core.scalars import Bytes, NumaId, PodUid
from kvplace.linux.memory_migration import migrate_memory
from kvplace.linux.numa_memory import memory_of_process

log = logging.getLogger(__name__)

MAY_STAY = Bytes(256 * 1024 * 1024)
"""Memory that may stay on other NUMA nodes after a move: pages that are locked or in use by a device."""


@dataclass(frozen=True, slots=True)
class FailedRevision:
    """A revision that this node could not carry out."""

    revision: int
    why: str


class Relocations:
    """The placement that is to be in effect for each pod of the node."""

    def __init__(self, own: OwnNode, proc: Path = Path("/proc")) -> None:
        """`proc` is where the host's processes are."""
        self._own = own
        self._proc = proc
        self._in_force: dict[PodUid, PodPlacement] = {}
        self._failed: dict[PodUid, FailedRevision] = {}
        own.subscribe(self._forget_ended)

    def target(self, uid: PodUid) -> PodPlacement | None:
        """Return the placement that a pod should have: its newest, or the one before if that has failed.

        None for a pod without a placement, and for one that had none before the failed one.
        """
        newest = self._own.placement(uid)
        if newest is None or self.failure(uid) is None:
            return newest
        return self._previous(uid)

    def failure(self, uid: PodUid) -> FailedRevision | None:
        """Return why the newest revision of a pod was given up; None if it was not."""
        newest, failed = self._own.placement(uid), self._failed.get(uid)
        if newest is None or failed is None or failed.revision != newest.revision:
            return None
        return failed

    def succeeded(self, uid: PodUid, placement: PodPlacement) -> None:
        """Note that every thread of a pod was seen where a placement states."""
        self._in_force[uid] = placement
        if self.failure(uid) is None:
            self._own.confirm(uid, placement.revision)

    def failed(self, uid: PodUid, why: str) -> None:
        """Give the newest revision of a pod up.

        Where there is nothing else to go back to, its cpusets leave the CPUs of before all the same: threads
        that the VM sets anew again and again keep no more than its own CPUs.
        """
        newest, previous = self._own.placement(uid), self._previous(uid)
        if newest is None or previous is None or newest.revision <= self._own.confirmed(uid):
            return
        if previous.placement == newest.placement:
            self._own.confirm(uid, newest.revision)
            return
        log.warning("revision %d is undone: %s", newest.revision, why, extra={"uid": uid})
        self._failed[uid] = FailedRevision(newest.revision, why)

    async def move_memory(self, pid: int, placement: PodPlacement) -> str:
        """Move the memory of a VM's QEMU to the NUMA nodes of a placement; returns what failed, or nothing.

        What is not bound strictly may stay elsewhere, so it is never a failure.
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
        if why and wanted.numa_memory is not NumaMemory.STRICT:
            log.warning("memory stays: %s", why, extra={"uid": placement.pod_uid})
            return ""
        return why

    def _is_over(self, placement: PodPlacement) -> bool:
        """Whether an agent before this one has carried a placement out."""
        claim = self._own.ledger.claims.get(placement.pod_uid)
        return (
            placement.pod_uid not in self._in_force
            and claim is not None
            and claim.relocation is None
            and claim.revision >= placement.revision
        )

    def _previous(self, uid: PodUid) -> PodPlacement | None:
        if uid in self._in_force:
            return self._in_force[uid]
        claim = self._own.ledger.claims.get(uid)
        return claim.relocation.previous if claim is not None and claim.relocation is not None else None

    def _forget_ended(self) -> None:
        for uid in [uid for uid in self._in_force | self._failed if self._own.placement(uid) is None]:
            self._in_force.pop(uid, None)
            self._failed.pop(uid, None)


def _move(process: Path, targets: tuple[NumaId, ...]) -> None:
    sources = [node for node, amount in memory_of_process(process).items() if amount and node not in targets]
    if sources:
        migrate_memory(int(process.name), sources, targets)
