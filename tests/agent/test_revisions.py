"""A relocation on its node: memory that follows, and revisions that fail."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from kvplace.agent import memory
from kvplace.agent.memory import MemoryMoves
from kvplace.agent.node_objects import NodeObjects
from kvplace.core.claim_changes import claim_while_relocating, way_back
from kvplace.core.ledger import Ledger, LedgerChange, Relocation, claim_of
from kvplace.core.placement import PodPlacement
from kvplace.core.request import NumaMemory
from kvplace.core.request_json import PodRequest, write_request
from kvplace.core.scalars import NumaId, ResourceName
from kvplace.kube.object_records import LedgerRecord, PodRecord
from kvplace.kube.watches import Apply
from tests.agent.nodes_in_use import NODE, VM, machine_of, placed
from tests.core.requests import request_with

BEFORE = placed(VM, "2", strict=(NumaId(0),))
AFTER = placed(VM, "3", strict=(NumaId(1),), revision=2)
PID = 4711


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """The moves that the kernel was asked for, from where to where."""
    asked: list[tuple[list[int], list[int]]] = []

    def move(_pid: int, sources: Iterable[NumaId], targets: Iterable[NumaId]) -> int:
        asked.append((list(sources), list(targets)))
        return 0

    monkeypatch.setattr(memory, "migrate_memory", move)
    return asked


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """The processes of a host: a QEMU with 4 MiB on either NUMA node."""
    (tmp_path / str(PID)).mkdir()
    (tmp_path / str(PID) / "numa_maps").write_text("7f00 default anon=2048 N0=1024 N1=1024\n")
    return tmp_path


def restarted_agent(
    proc: Path, ledger: Ledger, devices: Mapping[ResourceName, int] = MappingProxyType({})
) -> MemoryMoves:
    own = NodeObjects(NODE, machine_of(range(4)))
    request = write_request(PodRequest(request_with(1, devices=devices), "default/vm"))
    own.pods.apply(Apply(PodRecord("default", "vm", VM, NODE, "Running", request=request)))
    own.ledgers.apply(Apply(LedgerRecord(NODE, ledger, "1")))
    return MemoryMoves(own, proc)


async def test_memory_follows_a_relocation_that_was_under_way_when_the_agent_began(
    proc: Path, moves: list[tuple[list[int], list[int]]]
) -> None:
    claim = claim_while_relocating(claim_of(VM, BEFORE.placement), Relocation(AFTER, BEFORE))
    agent = restarted_agent(proc, Ledger().after(LedgerChange((claim,))))
    assert await agent.move(PID, AFTER) == ""
    assert moves == [([0], [1])]


async def test_an_agent_that_begins_after_a_relocation_moves_no_memory(
    proc: Path, moves: list[tuple[list[int], list[int]]]
) -> None:
    """A restart of the agent must not be felt by a VM."""
    claim = claim_of(VM, AFTER.placement, revision=2)
    agent = restarted_agent(proc, Ledger().after(LedgerChange((claim,))))
    assert await agent.move(PID, AFTER) == ""
    assert moves == []


@pytest.mark.parametrize("devices", [{}, {ResourceName("intel.com/vf"): 1}])
async def test_cores_do_not_leave_memory_that_devices_of_the_host_access(
    proc: Path, moves: list[tuple[list[int], list[int]]], devices: dict[ResourceName, int]
) -> None:
    """A device pins the memory, and QEMU may have started while the revision was written."""
    (proc / str(PID) / "numa_maps").write_text("7f00 default anon=262144 N0=262144\n")
    before, after = (
        replace(one, placement=replace(one.placement, numa_memory=NumaMemory.PREFERRED))
        for one in (BEFORE, AFTER)
    )
    claim = claim_while_relocating(claim_of(VM, before.placement), Relocation(after, before))
    agent = restarted_agent(proc, Ledger().after(LedgerChange((claim,))), devices)
    why = await agent.move(PID, after)
    if devices:
        assert why == "1024 MiB could not be moved to NUMA node 1, because devices of the host access them"
        back = replace(before, revision=3)
        assert await agent.move(PID, back) == ""
    else:
        assert why == ""


def test_a_way_back_that_the_threads_do_not_follow_narrows_the_cpusets_all_the_same() -> None:
    """A VM that sets its threads anew again and again must not keep the CPUs that it was to get."""
    back = replace(BEFORE, revision=3)
    moving = claim_while_relocating(claim_of(VM, BEFORE.placement), Relocation(AFTER, BEFORE))
    own = NodeObjects(NODE, machine_of(range(4)))
    own.ledgers.apply(
        Apply(LedgerRecord(NODE, Ledger().after(LedgerChange((way_back(moving, AFTER),))), "1"))
    )
    own.pods.apply(Apply(PodRecord("default", "vm", VM, NODE, "Running", placement=back.to_json())))
    assert own.state.pods[VM].confirmed < 3
    own.revisions.failed(VM, 3, "vCPU 0 has left its CPU", own.ledger)
    assert (own.state.pods[VM].failure, own.state.pods[VM].confirmed) == ("", 3)


def test_a_revision_that_was_given_up_leaves_the_one_before_in_effect_until_there_is_a_newer_one() -> None:
    own = NodeObjects(NODE, machine_of(range(4)))

    def write(revision: PodPlacement) -> None:
        own.pods.apply(Apply(PodRecord("default", "vm", VM, NODE, "Running", placement=revision.to_json())))

    write(BEFORE)
    own.revisions.succeeded(VM, BEFORE)
    write(AFTER)
    own.revisions.failed(VM, 1, "this was about the one before", own.ledger)
    assert own.state.pods[VM].in_effect(own.ledger) == AFTER
    own.revisions.failed(VM, 2, "CPU 3 cannot be had", own.ledger)
    assert own.state.pods[VM].in_effect(own.ledger) == BEFORE
    own.revisions.succeeded(VM, BEFORE)
    assert own.state.pods[VM].confirmed == 1
    back = replace(BEFORE, revision=3)
    write(back)
    assert (own.state.pods[VM].in_effect(own.ledger), own.state.pods[VM].failure) == (back, "")
