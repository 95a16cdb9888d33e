"""Ledgers stay true through lost answers, other writers, late watches and the end of the process."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace

import pytest

from kvplace.core.errors import Conflict, Corrupt, Refused, Unavailable
from kvplace.core.ledger import Ledger, LedgerChange, OwnershipConflict
from kvplace.core.scalars import CpuId, NodeName, PodUid
from kvplace.kube.ledgers import LEDGER_CONFLICTS, LEDGER_LAST_WRITE, Ledgers
from kvplace.kube.object_records import LedgerRecord
from kvplace.kube.store import Store
from kvplace.kube.watches import LEDGERS, Apply, Delete
from tests.kube.example_claims import claim
from tests.kube.example_claims import taking as claiming
from tests.kube.faults import Moment, Operation
from tests.kube.ledger_process import (
    CPUS,
    N,
    Recording,
    delivered,
    process,
    releasing,
    settled,
    taking,
)


@pytest.fixture
def cluster() -> Recording:
    return Recording()


async def test_the_first_change_of_a_node_makes_its_ledger(cluster: Recording) -> None:
    async with process(cluster) as ledgers:
        assert ledgers.current(N) is None
        assert await ledgers.change(N, taking("a", 2)) == 0b11
        record = ledgers.current(N)
        assert record is not None
        assert record.ledger == cluster.stored()
        assert ledgers.nodes_claimed_by(PodUid("a")) == {"n"}


@pytest.mark.parametrize("moment", list(Moment))
async def test_a_write_without_an_answer_is_checked_and_never_done_twice(
    cluster: Recording, moment: Moment
) -> None:
    async with process(cluster) as ledgers:
        cluster.faults.fail(Operation.WRITE_LEDGER, Unavailable("timeout"), moment=moment)
        assert await ledgers.change(N, taking("a", 2)) == 0b11
        assert cluster.stored().owners == {0: "a", 1: "a"}
        cluster.faults.fail(Operation.WRITE_LEDGER, Unavailable("timeout"), moment=moment)
        await ledgers.change(N, releasing("a"))
        assert cluster.stored() == Ledger()


@pytest.mark.parametrize("moment", list(Moment))
@pytest.mark.parametrize("operation", [Operation.CREATE_LEDGER, Operation.READ_LEDGER])
async def test_a_ledger_that_could_not_be_made_at_once_is_made_a_little_later(
    cluster: Recording, operation: Operation, moment: Moment
) -> None:
    async with process(cluster) as ledgers:
        cluster.faults.fail(operation, Unavailable("busy"), moment=moment, times=2)
        assert await ledgers.change(N, taking("a")) == 1
        assert cluster.stored().owners == {0: "a"}


async def test_a_change_that_loses_against_another_process_is_decided_again_on_the_new_ledger(
    cluster: Recording,
) -> None:
    async with process(cluster) as one, process(cluster) as other:
        await one.change(N, taking("first"))
        cluster.pause_watches(LEDGERS)
        assert await one.change(N, taking("a", 2)) == 0b0110
        assert await other.change(N, taking("b", 2)) == 0b11000
        assert await one.change(N, taking("c")) == 0b100000
        cluster.stored().check()
        cluster.resume_watches(LEDGERS)


async def test_many_processes_that_race_for_one_node_never_share_a_core(cluster: Recording) -> None:
    async with contextlib.AsyncExitStack() as stack:
        processes = [await stack.enter_async_context(process(cluster)) for _ in range(4)]
        answers = await asyncio.gather(
            *(processes[i % 4].change(N, taking(f"pod-{i}")) for i in range(12)), return_exceptions=True
        )
        taken = [answer for answer in answers if isinstance(answer, int)]
        assert len(set(taken)) == len(taken) == CPUS
        assert sum(isinstance(answer, Refused) for answer in answers) == 12 - CPUS
        cluster.stored().check()


async def test_a_change_that_always_loses_ends_in_a_conflict(cluster: Recording) -> None:
    async with process(cluster, attempts=3) as ledgers:
        cluster.faults.fail(Operation.WRITE_LEDGER, Conflict("changed since it was read"), times=3)
        with pytest.raises(Conflict, match="changed since it was read"):
            await ledgers.change(N, taking("a"))
        assert await ledgers.change(N, taking("a")) == 1


async def test_a_ledger_that_was_deleted_meanwhile_is_created_again(cluster: Recording) -> None:
    async with process(cluster) as ledgers:
        await ledgers.change(N, taking("a"))
        cluster.pause_watches(LEDGERS)
        cluster._ledgers.remove("n")
        assert await ledgers.change(N, taking("b")) == 1
        assert cluster.stored().owners == {0: "b"}
        cluster.resume_watches(LEDGERS)
        await delivered(cluster, ledgers)
        assert ledgers.nodes_claimed_by(PodUid("a")) == frozenset()
        assert ledgers.nodes_claimed_by(PodUid("b")) == {"n"}


async def test_the_current_ledger_is_never_older_than_our_own_last_write(cluster: Recording) -> None:
    async with process(cluster) as ledgers:
        cluster.pause_watches(LEDGERS)
        for number in range(3):
            await ledgers.change(N, taking(f"pod-{number}"))
            record = ledgers.current(N)
            assert record is not None
            assert record.ledger == cluster.stored()
        changed: list[str] = []
        ledgers.subscribe(changed.append)
        cluster.resume_watches(LEDGERS)
        await delivered(cluster, ledgers)
        assert changed == ["last"]


async def test_late_events_of_a_deleted_ledger_do_not_hide_the_one_created_after_it(
    cluster: Recording,
) -> None:
    store: Store[NodeName, LedgerRecord] = Store(LEDGERS)
    ledgers = Ledgers(cluster, store, gather_seconds=0.0)
    old = cluster.put_ledger("n", Ledger().after(claiming(claim("old", 0))))
    cluster._ledgers.remove("n")
    await ledgers.change(N, taking("new"))
    store.apply(Apply(old))
    assert ledgers.nodes_claimed_by(PodUid("new")) == {"n"}
    store.apply(Delete(old))
    assert ledgers.nodes_claimed_by(PodUid("new")) == {"n"}
    assert ledgers.nodes_claimed_by(PodUid("old")) == frozenset()
    await ledgers.stop()


async def test_the_claims_of_a_deleted_ledger_are_gone_and_listeners_are_called_with_its_node(
    cluster: Recording,
) -> None:
    async with process(cluster) as ledgers:
        await ledgers.change(N, taking("a"))
        changed: list[str] = []
        ledgers.subscribe(changed.append)
        cluster._ledgers.remove("n")
        await settled(lambda: bool(changed))
        assert changed == ["n"]
        assert ledgers.nodes_claimed_by(PodUid("a")) == frozenset()


async def test_draining_waits_for_a_write_that_ends_with_an_unexpected_error(cluster: Recording) -> None:
    async with process(cluster) as ledgers:

        def broken(ledger: Ledger) -> tuple[LedgerChange, None]:
            raise ZeroDivisionError

        asking = asyncio.create_task(ledgers.change(N, broken))
        await asyncio.sleep(0)
        await ledgers.drain()
        with pytest.raises(Unavailable, match="writing the ledger of node n ended with ZeroDivisionError"):
            await asking


async def test_a_ledger_that_cannot_be_read_is_not_written(cluster: Recording) -> None:
    async with process(cluster) as ledgers:
        made = await cluster.create_ledger(N)
        cluster._ledgers.put(
            "n", replace(made, problem="the claim of pod a cannot be read", resource_version="99")
        )
        with pytest.raises(Corrupt, match="the ledger of node n cannot be read: the claim of pod a"):
            await ledgers.change(N, taking("b"))
        assert cluster.asked == []


async def test_a_change_goes_on_when_its_asker_gives_up(cluster: Recording) -> None:
    async with process(cluster) as ledgers:
        hold = cluster.faults.hold(Operation.WRITE_LEDGER)
        asking = asyncio.create_task(ledgers.change(N, taking("a")))
        await hold.reached.wait()
        asking.cancel()
        hold.release()
        await ledgers.drain()
        assert cluster.stored().owners == {0: "a"}


async def test_stopping_fails_the_changes_that_wait_and_writes_no_more(cluster: Recording) -> None:
    async with process(cluster) as ledgers:
        hold = cluster.faults.hold(Operation.WRITE_LEDGER)
        writing = asyncio.create_task(ledgers.change(N, taking("a")))
        await hold.reached.wait()
        gathered = asyncio.create_task(ledgers.change(N, taking("b")))
        await asyncio.sleep(0)
        await ledgers.stop()
        for waiting in (writing, gathered, ledgers.change(N, taking("c"))):
            with pytest.raises(Unavailable):
                await waiting
        assert len(cluster.asked) == 1


async def test_stopping_before_a_write_begins_fails_the_changes_that_wait(cluster: Recording) -> None:
    async with process(cluster) as ledgers:
        waiting = asyncio.create_task(ledgers.change(N, taking("a")))
        await settled(lambda: bool(ledgers._queues))
        await ledgers.stop()
        with pytest.raises(Unavailable):
            await waiting
        assert cluster.asked == []


async def test_of_nodes_that_are_gone_nothing_stays(cluster: Recording) -> None:
    async with process(cluster) as ledgers:
        for number in range(20):
            await ledgers.change(NodeName(f"n{number}"), taking("a"))
            await ledgers.change(NodeName(f"n{number}"), releasing("a"))
        for number in range(20):
            cluster._ledgers.remove(f"n{number}")
        await delivered(cluster, ledgers)
        assert [record.node for record in ledgers.all()] == ["last"]
        assert not ledgers._queues
        assert not ledgers._claimed_on


async def test_a_change_that_changes_nothing_costs_no_write(cluster: Recording) -> None:
    async with process(cluster) as ledgers:
        await ledgers.change(N, taking("a"))
        assert await ledgers.change(N, taking("a")) == 1
        assert await ledgers.change(N, releasing("b")) is False
        assert ledgers.writes == 1


async def test_a_conflict_that_is_found_in_an_old_ledger_is_checked_in_the_new_one(
    cluster: Recording,
) -> None:
    def owning(ledger: Ledger) -> tuple[LedgerChange, str]:
        if 0 in ledger.owners:
            raise OwnershipConflict(f"CPU 0 belongs to {ledger.owners[CpuId(0)]}")
        return claiming(claim("b", 0)), "owns it"

    async with process(cluster) as one, process(cluster) as late:
        await one.change(N, taking("a"))
        await settled(lambda: late.nodes_claimed_by(PodUid("a")) == {"n"})
        cluster.pause_watches(LEDGERS)
        await one.change(N, releasing("a"))
        assert await late.change(N, owning) == "owns it"
        await one.change(N, taking("c", 7))
        assert await one.change(N, releasing("b"))
        assert await one.change(N, taking("d")) == 1
        with pytest.raises(OwnershipConflict, match="CPU 0 belongs to d"):
            await late.change(N, owning)
        assert cluster.stored().owners[CpuId(0)] == "d"
        cluster.resume_watches(LEDGERS)


async def test_a_lost_write_is_counted_by_its_cause(cluster: Recording) -> None:
    def counted() -> list[float]:
        return [LEDGER_CONFLICTS.labels(kind)._value.get() for kind in ("version", "owner")]

    async with process(cluster) as ledgers:
        version, owner = counted()
        cluster.faults.fail(Operation.WRITE_LEDGER, Conflict("conflict with another writer"))
        assert await ledgers.change(N, taking("a")) == 1
        assert counted() == [version + 1, owner]
        cluster.faults.fail(Operation.WRITE_LEDGER, OwnershipConflict("CPU 1 belongs to b"))
        assert await ledgers.change(N, taking("c")) == 2
        assert counted() == [version + 1, owner + 1]


async def test_the_time_of_the_last_write_is_that_of_one_which_was_stored(cluster: Recording) -> None:
    async with process(cluster, attempts=1) as ledgers:
        began = time.time()
        await ledgers.change(N, taking("a"))
        written = LEDGER_LAST_WRITE._value.get()
        assert began <= written <= time.time()
        cluster.faults.fail(Operation.WRITE_LEDGER, Conflict("conflict with another writer"))
        with pytest.raises(Conflict):
            await ledgers.change(N, taking("b"))
        assert LEDGER_LAST_WRITE._value.get() == written
