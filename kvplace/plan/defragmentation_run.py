"""Carries out the moves of a defragmentation, one after the other, with the rights of the user.

Inside a node an annotation asks `serve` to place the VM again (`kvplace.io/place-again`), and relocation does
the rest. Between nodes KubeVirt migrates the VM to the node that the move names. Each move is complete before
the next one begins, so the run may end after any of them. A move that is not possible any more ends the run:
the moves after it were found for a cluster with it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvplace.core.annotations import place_again_of
from kvplace.core.cluster.defragmentation import DefragmentingMove
from kvplace.core.errors import BadAnnotation, KvplaceError
from kvplace.core.ledger import Claim
from kvplace.core.placement import PodPlacement
from kvplace.core.scalars import NodeName
from kvplace.core.well_known_names import PLACE_AGAIN, RELOCATED
from kvplace.kube.migrations import START_S, PlannedMigration, read_migration
from kvplace.kube.object_records import LedgerRecord, PodRecord
from kvplace.kube.watches import ListClient

POLL_S = 1.0
BEGIN_S = 30.0
"""How long `serve` may take to begin a move inside a node."""
MOVE_S = 300.0
"""How long a move inside a node may take."""
END_S = 60.0
"""How long the claim on the source may stay after a migration."""


class DefragmentationClient(ListClient, Protocol):
    """The cluster calls of the moves."""

    async def read_pod(self, namespace: str, name: str) -> PodRecord | None:
        """Read a pod as the API server has it now; None if there is none."""
        ...

    async def read_ledger(self, node: NodeName) -> LedgerRecord | None:
        """Read a ledger; None if there is none."""
        ...

    async def annotate_vm(self, pod: PodRecord, key: str, value: str | None) -> None:
        """Write an annotation of the VMI of a pod, or of a plain pod; None removes it."""
        ...

    async def create_migration(self, migration: PlannedMigration, *, dry_run: bool = False) -> None:
        """Create a live migration."""
        ...

    async def delete_migration(self, namespace: str, name: str) -> None:
        """Delete a live migration; one that is gone already is not an error."""
        ...


@dataclass(frozen=True, slots=True)
class MoveResult:
    """The end of one move."""

    move: DefragmentingMove
    error: str = ""
    """The reason why it was not made, in one sentence; empty if it was made."""


class _NotMade(Exception):
    """A move was not made; the message is the reason."""


async def carry_out(
    client: DefragmentationClient,
    moves: Sequence[DefragmentingMove],
    pods: Mapping[str, PodRecord],
    *,
    may_continue: Callable[[], bool],
) -> AsyncIterator[MoveResult]:
    """Make the moves and yield the end of each; `pods` are the pods of the VMs, by the ids of the moves.

    Ends before the next move when `may_continue` answers False, and after a move that was not made.
    """
    for move in moves:
        if not may_continue():
            return
        try:
            if move.is_migration:
                await _migrate(client, move, pods[move.id])
            else:
                await _relocate(client, move, pods[move.id])
        except (_NotMade, KvplaceError) as error:
            yield MoveResult(move, str(error))
            return
        yield MoveResult(move)


async def _live(client: DefragmentationClient, move: DefragmentingMove, pod: PodRecord) -> PodRecord:
    """Read the pod of a VM that is to move; raises _NotMade where it is no longer as the move found it."""
    live = await client.read_pod(pod.namespace, pod.name)
    if live is None or live.uid != pod.uid or live.has_ended or live.deleting:
        raise _NotMade("the VM does not run on this node any more")
    placed = _placed(live)
    if placed is None or placed.placement.cpus != move.before.cpus:
        raise _NotMade("the VM has got other cores since the moves were found")
    return live


async def _relocate(client: DefragmentationClient, move: DefragmentingMove, pod: PodRecord) -> None:
    live = await _live(client, move, pod)
    placed = _placed(live)
    assert placed is not None
    await client.annotate_vm(live, PLACE_AGAIN, place_again_of(live.uid, placed.revision))
    try:
        await _until_relocated(client, move, live, placed.revision)
    finally:
        await client.annotate_vm(live, PLACE_AGAIN, None)


async def _until_relocated(
    client: DefragmentationClient, move: DefragmentingMove, before: PodRecord, revision: int
) -> None:
    began = asyncio.get_running_loop().time()
    while True:
        passed = asyncio.get_running_loop().time() - began
        pod = await client.read_pod(before.namespace, before.name)
        if pod is None or pod.uid != before.uid or pod.has_ended:
            raise _NotMade("the VM has ended")
        placed, answer = _placed(pod), pod.condition(RELOCATED)
        is_new = answer is not None and answer != before.condition(RELOCATED)
        if placed is not None and placed.revision > revision:
            claim = await _claim_of(client, move.node, pod)
            if claim is not None and claim.relocation is None and claim.revision == placed.revision:
                if placed.placement.cpus == move.before.cpus:
                    raise _NotMade(answer.message if answer is not None else "the VM went back to its cores")
                return
        elif answer is not None and is_new and answer.status is False:
            raise _NotMade(answer.message)
        elif passed > BEGIN_S and (
            (claim := await _claim_of(client, move.node, pod)) is None or claim.relocation is None
        ):
            raise _NotMade(f"serve has not begun the move within {BEGIN_S:.0f} s; is it running?")
        if passed > MOVE_S:
            raise _NotMade(
                f"the move was not confirmed within {MOVE_S:.0f} s; relocation continues by itself"
            )
        await asyncio.sleep(POLL_S)


async def _migrate(client: DefragmentationClient, move: DefragmentingMove, pod: PodRecord) -> None:
    live = await _live(client, move, pod)
    planned = PlannedMigration.of(live.namespace, live.vmi, move.target, secrets.token_hex(4))
    name = planned.name
    await client.create_migration(planned)
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        await asyncio.sleep(POLL_S)
        found = await read_migration(client, live.namespace, name)
        if found is None:
            raise _NotMade(f"migration {name} was deleted")
        if found.phase == "Failed":
            raise _NotMade(f"migration {name} failed; `kubectl describe vmim {name}` has the reason")
        if found.has_ended:
            break
        if not found.has_started and loop.time() - began > START_S:
            await client.delete_migration(live.namespace, name)
            raise _NotMade(f"migration {name} has not started within {START_S:.0f} s and was deleted")
    for _ in range(int(END_S / POLL_S)):
        if await _claim_of(client, move.node, live) is None:
            return
        await asyncio.sleep(POLL_S)


def _placed(pod: PodRecord) -> PodPlacement | None:
    try:
        return PodPlacement.from_json(pod.placement) if pod.placement else None
    except BadAnnotation:
        return None


async def _claim_of(client: DefragmentationClient, node: NodeName, pod: PodRecord) -> Claim | None:
    record = await client.read_ledger(node)
    return None if record is None else record.ledger.claims.get(pod.uid)
