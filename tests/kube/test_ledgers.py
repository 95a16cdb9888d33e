"""Many changes of a node's ledger become few writes, and nobody decides on what is no longer true."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest

from kvplace.core.cpuset import lowest, mask_of
from kvplace.core.errors import Conflict, Corrupt, KvplaceError, Misconfigured, Refused, Unavailable
from kvplace.core.ledger import Claim, ClaimState, Ledger, LedgerChange, confirmed
from kvplace.core.request import Policy
from kvplace.kube.faults import Moment, Operation
from kvplace.kube.ledgers import Ledgers
from kvplace.kube.memory_cluster import MemoryCluster
from kvplace.kube.pending_changes import Decision
from kvplace.kube.records import LedgerRecord
from kvplace.kube.store import Store
from kvplace.kube.watches import LEDGERS, Apply, Delete

CPUS = 8
ALL = mask_of(range(CPUS))


class Recording(MemoryCluster):
    """A cluster that remembers every write it was asked for, and may find a pod's claim invalid."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[Ledger, LedgerChange]] = []
        self.invalid: set[str] = set()

    async def write_ledger(self, before: LedgerRecord, change: LedgerChange) -> LedgerRecord:
        self.asked.append((before.ledger, change))
        if any(claim.uid in self.invalid for claim in change.claims):
            raise Misconfigured("the API server rejects it, HTTP 422 (spec.claims: too long)")
        return await super().write_ledger(before, change)

    def stored(self, node: str = "n") -> Ledger:
        return self._ledgers.records[node].ledger


@pytest.fixture
def cluster() -> Recording:
    return Recording()


@contextlib.asynccontextmanager
async def process(
    cluster: MemoryCluster,
    *,
    attempts: int = 8,
    lazy_seconds: float = 3.0,
    gather_seconds: float = 0.0,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> AsyncIterator[Ledgers]:
    """The ledgers of one process, following the cluster."""
    store: Store[str, LedgerRecord] = Store(LEDGERS)
    ledgers = Ledgers(
        cluster,
        store,
        attempts=attempts,
        lazy_seconds=lazy_seconds,
        gather_seconds=gather_seconds,
        sleep=sleep,
    )
    following = asyncio.create_task(store.run(cluster))
    await store.wait_until_synced()
    try:
        yield ledgers
    finally:
        await ledgers.stop()
        following.cancel()


class Gate:
    """A sleep that ends when the test says so."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()

    async def __call__(self, seconds: float) -> None:
        self.reached.set()
        await self.opened.wait()


async def settled(condition: Callable[[], bool]) -> None:
    """Let everybody work until the condition holds."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def delivered(cluster: MemoryCluster, ledgers: Ledgers) -> None:
    """Wait until the watch has brought everything so far: what is written to another node after it."""
    cluster.put_ledger("last", Ledger())
    await settled(lambda: ledgers.current("last") is not None)


def claim_of(uid: str, owned: int) -> Claim:
    return Claim(
        uid,
        "default",
        uid,
        "",
        Policy.EXCLUSIVE,
        ClaimState.CLAIMED,
        owned,
        owned,
        {},
        {},
        "2026-01-01T00:00:00Z",
    )


def taking(uid: str, count: int = 1) -> Decision[int]:
    """Claim the lowest free CPUs for a pod, as a bind does: what it has already is its answer."""

    def decide(ledger: Ledger) -> tuple[LedgerChange, int]:
        if uid in ledger.claims:
            return LedgerChange(), ledger.claims[uid].owned
        free = ALL & ~ledger.owned
        if free.bit_count() < count:
            raise Refused(f"no room for {uid}")
        claim = claim_of(uid, lowest(free, count))
        return LedgerChange((claim,)), claim.owned

    return decide


def giving(uid: str) -> Decision[bool]:
    """Release a pod; answers whether it had a claim."""
    return lambda ledger: (
        LedgerChange(releases=(uid,) if uid in ledger.claims else ()),
        uid in ledger.claims,
    )


def confirming(uid: str) -> Decision[None]:
    return lambda ledger: (LedgerChange((confirmed(ledger.claims[uid]),)), None)


async def test_the_first_change_of_a_node_makes_its_ledger(cluster: Recording) -> None:
    async with process(cluster) as ledgers:
        assert ledgers.current("n") is None
        assert await ledgers.change("n", taking("a", 2)) == 0b11
        record = ledgers.current("n")
        assert record is not None
        assert record.ledger == cluster.stored()
        assert ledgers.nodes_claimed_by("a") == {"n"}


async def test_changes_that_come_while_a_write_is_under_way_go_together_in_the_next(
    cluster: Recording,
) -> None:
    async with process(cluster) as ledgers:
        hold = cluster.faults.hold(Operation.WRITE_LEDGER)
        first = asyncio.create_task(ledgers.change("n", taking("first")))
        await hold.reached.wait()
        others = [asyncio.create_task(ledgers.change("n", taking(f"pod-{i}"))) for i in range(7)]
        await asyncio.sleep(0)
        hold.release()
        taken = await asyncio.gather(first, *others)
        assert ledgers.writes == len(cluster.asked) == 2
        assert ledgers.changes == 8
        assert sorted(taken) == [1 << cpu for cpu in range(8)]
        cluster.stored().check()


async def test_changes_one_after_the_other_never_wait_to_gather(cluster: Recording) -> None:
    async with process(cluster, gather_seconds=3600.0) as ledgers, asyncio.timeout(10):
        for number in range(4):
            await ledgers.change("n", taking(f"pod-{number}"))
        assert ledgers.writes == 4


async def test_changes_of_a_burst_gather_a_moment_and_then_go_together(cluster: Recording) -> None:
    gate = Gate()
    async with process(cluster, gather_seconds=3600.0, sleep=gate) as ledgers:
        await ledgers.change("n", taking("before"))
        burst = [asyncio.create_task(ledgers.change("n", taking(f"pod-{i}"))) for i in range(2)]
        await gate.reached.wait()
        late = [asyncio.create_task(ledgers.change("n", taking(f"late-{i}"))) for i in range(3)]
        await asyncio.sleep(0)
        gate.opened.set()
        await asyncio.gather(*burst, *late)
        assert ledgers.writes == 2


async def test_nodes_do_not_wait_for_each_other(cluster: Recording) -> None:
    async with process(cluster) as ledgers:
        hold = cluster.faults.hold(Operation.WRITE_LEDGER)
        slow = asyncio.create_task(ledgers.change("slow", taking("a")))
        await hold.reached.wait()
        assert await ledgers.change("other", taking("b")) == 1
        hold.release()
        assert await slow == 1


async def test_of_two_pods_that_want_the_last_core_in_one_write_the_second_hears_no(
    cluster: Recording,
) -> None:
    async with process(cluster) as ledgers:
        await ledgers.change("n", taking("big", CPUS - 1))
        answers = await asyncio.gather(
            *(ledgers.change("n", taking(uid)) for uid in ("a", "b")), return_exceptions=True
        )
        assert answers[0] == 1 << (CPUS - 1)
        assert isinstance(answers[1], Refused)
        assert str(answers[1]) == "no room for b"


async def test_a_pod_that_was_refused_is_asked_again_when_a_release_of_its_group_makes_room(
    cluster: Recording,
) -> None:
    async with process(cluster) as ledgers:
        await ledgers.change("n", taking("old", CPUS))
        cluster.asked.clear()
        taken, released = await asyncio.gather(
            ledgers.change("n", taking("new", CPUS)), ledgers.change("n", giving("old"))
        )
        assert (taken, released) == (ALL, True)
        assert [change.releases for _, change in cluster.asked] == [("old",), ()]
        assert cluster.stored().claims.keys() == {"new"}


async def test_a_release_before_a_claim_in_one_group_leaves_its_cores_to_the_next_write(
    cluster: Recording,
) -> None:
    async with process(cluster) as ledgers:
        await ledgers.change("n", taking("old", CPUS))
        cluster.asked.clear()
        released, taken = await asyncio.gather(
            ledgers.change("n", giving("old")), ledgers.change("n", taking("new", CPUS))
        )
        assert (released, taken) == (True, ALL)
        assert [(change.releases, len(change.claims)) for _, change in cluster.asked] == [
            (("old",), 0),
            ((), 1),
        ]


async def test_a_release_and_a_claim_on_other_cores_go_in_one_write(cluster: Recording) -> None:
    async with process(cluster) as ledgers:
        await ledgers.change("n", taking("old"))
        cluster.asked.clear()
        await asyncio.gather(ledgers.change("n", giving("old")), ledgers.change("n", taking("new")))
        assert [(change.releases, len(change.claims)) for _, change in cluster.asked] == [(("old",), 1)]
        assert cluster.stored().owners == {1: "new"}


@pytest.mark.parametrize("lost", [Conflict("changed"), Unavailable("timeout")])
async def test_a_pod_that_was_refused_gets_no_claim_when_the_write_of_its_group_is_lost(
    cluster: Recording, lost: KvplaceError
) -> None:
    async with process(cluster) as ledgers:
        cluster.put_ledger("n", Ledger().after(LedgerChange((claim_of("foreign", 0b1),))))
        await settled(lambda: ledgers.current("n") is not None)
        hold = cluster.faults.hold(Operation.WRITE_LEDGER)
        cluster.faults.fail(Operation.WRITE_LEDGER, lost)
        refused = asyncio.create_task(ledgers.change("n", taking("refused", CPUS)))
        granted = asyncio.create_task(ledgers.change("n", taking("granted")))
        await hold.reached.wait()
        cluster.put_ledger("n", Ledger())  # Now there is room for the one that was refused.
        hold.release()
        with pytest.raises(Refused):
            await refused
        assert await granted == 0b1
        assert cluster.stored().claims.keys() == {"granted"}


async def test_a_core_is_never_released_and_claimed_in_one_write(cluster: Recording) -> None:
    async with process(cluster) as ledgers:
        for round_ in range(12):
            wishes = [ledgers.change("n", taking(f"{round_}-{i}", 2)) for i in range(4)]
            wishes += [ledgers.change("n", giving(f"{round_ - 1}-{i}")) for i in range(4)]
            await asyncio.gather(*wishes)
        for before, change in cluster.asked:
            freed = mask_of(cpu for cpu, owner in before.owners.items() if owner in change.releases)
            assert not any(claim.owned & freed for claim in change.claims)
        assert cluster.stored().claims.keys() == {f"11-{i}" for i in range(4)}


async def test_a_pod_that_is_released_and_claims_again_in_one_group_ends_with_its_claim(
    cluster: Recording,
) -> None:
    async with process(cluster) as ledgers:
        await ledgers.change("n", taking("a", 3))
        released, taken = await asyncio.gather(
            ledgers.change("n", giving("a")), ledgers.change("n", taking("a", 3))
        )
        assert released
        assert cluster.stored().claims["a"].owned == taken
        cluster.stored().check()


async def test_a_pod_that_claims_and_is_released_in_one_group_ends_without(cluster: Recording) -> None:
    async with process(cluster) as ledgers:
        await ledgers.change("n", taking("other"))
        _, released = await asyncio.gather(
            ledgers.change("n", taking("a", 3)), ledgers.change("n", giving("a"))
        )
        assert released
        assert cluster.stored().claims.keys() == {"other"}


@pytest.mark.parametrize("moment", list(Moment))
async def test_a_write_without_an_answer_is_looked_at_and_never_done_twice(
    cluster: Recording, moment: Moment
) -> None:
    async with process(cluster) as ledgers:
        cluster.faults.fail(Operation.WRITE_LEDGER, Unavailable("timeout"), moment=moment)
        assert await ledgers.change("n", taking("a", 2)) == 0b11
        assert cluster.stored().owners == {0: "a", 1: "a"}
        cluster.faults.fail(Operation.WRITE_LEDGER, Unavailable("timeout"), moment=moment)
        await ledgers.change("n", giving("a"))
        assert cluster.stored() == Ledger()


@pytest.mark.parametrize("moment", list(Moment))
@pytest.mark.parametrize("operation", [Operation.CREATE_LEDGER, Operation.READ_LEDGER])
async def test_a_ledger_that_could_not_be_made_at_once_is_made_a_little_later(
    cluster: Recording, operation: Operation, moment: Moment
) -> None:
    async with process(cluster) as ledgers:
        cluster.faults.fail(operation, Unavailable("busy"), moment=moment, times=2)
        assert await ledgers.change("n", taking("a")) == 1
        assert cluster.stored().owners == {0: "a"}


async def test_whoever_loses_against_another_process_decides_again_on_what_is_true_then(
    cluster: Recording,
) -> None:
    async with process(cluster) as one, process(cluster) as other:
        await one.change("n", taking("first"))
        cluster.pause_watches(LEDGERS)
        assert await one.change("n", taking("a", 2)) == 0b0110
        assert await other.change("n", taking("b", 2)) == 0b11000
        assert await one.change("n", taking("c")) == 0b100000
        cluster.stored().check()
        cluster.resume_watches(LEDGERS)


async def test_many_processes_that_race_for_one_node_never_share_a_core(cluster: Recording) -> None:
    async with contextlib.AsyncExitStack() as stack:
        processes = [await stack.enter_async_context(process(cluster)) for _ in range(4)]
        answers = await asyncio.gather(
            *(processes[i % 4].change("n", taking(f"pod-{i}")) for i in range(12)), return_exceptions=True
        )
        taken = [answer for answer in answers if isinstance(answer, int)]
        assert len(set(taken)) == len(taken) == CPUS
        assert sum(isinstance(answer, Refused) for answer in answers) == 12 - CPUS
        cluster.stored().check()


async def test_when_others_always_win_the_asker_is_told_after_a_while(cluster: Recording) -> None:
    async with process(cluster, attempts=3) as ledgers:
        cluster.faults.fail(Operation.WRITE_LEDGER, Conflict("changed since it was read"), times=3)
        with pytest.raises(Conflict, match="changed since it was read"):
            await ledgers.change("n", taking("a"))
        assert await ledgers.change("n", taking("a")) == 1


async def test_a_ledger_that_was_deleted_meanwhile_is_made_anew(cluster: Recording) -> None:
    async with process(cluster) as ledgers:
        await ledgers.change("n", taking("a"))
        cluster.pause_watches(LEDGERS)
        cluster._ledgers.remove("n")
        assert await ledgers.change("n", taking("b")) == 1
        assert cluster.stored().owners == {0: "b"}
        cluster.resume_watches(LEDGERS)
        await delivered(cluster, ledgers)
        assert ledgers.nodes_claimed_by("a") == frozenset()
        assert ledgers.nodes_claimed_by("b") == {"n"}


async def test_what_is_current_is_never_older_than_our_own_last_write(cluster: Recording) -> None:
    async with process(cluster) as ledgers:
        cluster.pause_watches(LEDGERS)
        for number in range(3):
            await ledgers.change("n", taking(f"pod-{number}"))
            record = ledgers.current("n")
            assert record is not None
            assert record.ledger == cluster.stored()
        changed: list[str] = []
        ledgers.subscribe(changed.append)
        cluster.resume_watches(LEDGERS)
        await delivered(cluster, ledgers)
        assert changed == ["last"]


async def test_late_news_of_a_ledger_that_is_gone_does_not_hide_the_one_made_after_it(
    cluster: Recording,
) -> None:
    store: Store[str, LedgerRecord] = Store(LEDGERS)
    ledgers = Ledgers(cluster, store, gather_seconds=0.0)
    old = cluster.put_ledger("n", Ledger().after(LedgerChange((claim_of("old", 1),))))
    cluster._ledgers.remove("n")
    await ledgers.change("n", taking("new"))
    store.apply(Apply(old))
    assert ledgers.nodes_claimed_by("new") == {"n"}
    store.apply(Delete(old))
    assert ledgers.nodes_claimed_by("new") == {"n"}
    assert ledgers.nodes_claimed_by("old") == frozenset()
    await ledgers.stop()


async def test_a_ledger_that_cannot_be_read_is_not_written(cluster: Recording) -> None:
    async with process(cluster) as ledgers:
        made = await cluster.create_ledger("n")
        cluster._ledgers.put(
            "n", replace(made, problem="the claim of pod a cannot be read", resource_version="99")
        )
        with pytest.raises(Corrupt, match="the ledger of node n cannot be read: the claim of pod a"):
            await ledgers.change("n", taking("b"))
        assert cluster.asked == []


async def test_bookkeeping_goes_along_with_the_next_write(cluster: Recording) -> None:
    async with process(cluster, lazy_seconds=3600.0) as ledgers:
        await ledgers.change("n", taking("a"))
        ledgers.change_later("n", confirming("a"))
        await ledgers.change("other", taking("c"))
        assert cluster.stored().claims["a"].state is ClaimState.CLAIMED
        await ledgers.change("n", taking("b"))
        assert cluster.stored().claims["a"].state is ClaimState.BOUND
        assert ledgers.writes == 3


async def test_bookkeeping_that_nobody_follows_is_written_alone_after_a_while(cluster: Recording) -> None:
    async with process(cluster, lazy_seconds=0.01) as ledgers:
        await ledgers.change("n", taking("a"))
        ledgers.change_later("n", confirming("a"))
        await settled(lambda: cluster.stored().claims["a"].state is ClaimState.BOUND)


async def test_bookkeeping_that_fails_is_logged_since_nobody_hears_of_it(
    cluster: Recording, caplog: pytest.LogCaptureFixture
) -> None:
    def refusing(_: Ledger) -> tuple[LedgerChange, None]:
        raise Refused("the moon is full")

    with caplog.at_level(logging.WARNING):
        async with process(cluster, lazy_seconds=0.0) as ledgers:
            ledgers.change_later("n", refusing)
            await settled(lambda: "the moon is full" in caplog.text)


async def test_a_claim_that_the_api_server_finds_invalid_does_not_take_the_others_with_it(
    cluster: Recording,
) -> None:
    async with process(cluster) as ledgers:
        cluster.invalid = {"bad"}
        good, bad, also_good = await asyncio.gather(
            *(ledgers.change("n", taking(uid)) for uid in ("good", "bad", "fine")), return_exceptions=True
        )
        assert isinstance(good, int)
        assert isinstance(also_good, int)
        assert isinstance(bad, Misconfigured)
        assert cluster.stored().claims.keys() == {"good", "fine"}


async def test_a_change_goes_on_when_its_asker_gives_up(cluster: Recording) -> None:
    async with process(cluster) as ledgers:
        hold = cluster.faults.hold(Operation.WRITE_LEDGER)
        asking = asyncio.create_task(ledgers.change("n", taking("a")))
        await hold.reached.wait()
        asking.cancel()
        hold.release()
        await ledgers.drain()
        assert cluster.stored().owners == {0: "a"}


async def test_a_process_that_ends_tells_who_waits_and_writes_no_more(cluster: Recording) -> None:
    async with process(cluster) as ledgers:
        hold = cluster.faults.hold(Operation.WRITE_LEDGER)
        writing = asyncio.create_task(ledgers.change("n", taking("a")))
        await hold.reached.wait()
        gathered = asyncio.create_task(ledgers.change("n", taking("b")))
        await asyncio.sleep(0)
        await ledgers.stop()
        for waiting in (writing, gathered, ledgers.change("n", taking("c"))):
            with pytest.raises(Unavailable):
                await waiting
        assert len(cluster.asked) == 1


async def test_a_process_that_ends_before_a_write_begins_tells_who_waits(cluster: Recording) -> None:
    async with process(cluster) as ledgers:
        waiting = asyncio.create_task(ledgers.change("n", taking("a")))
        await settled(lambda: bool(ledgers._queues))
        await ledgers.stop()
        with pytest.raises(Unavailable):
            await waiting
        assert cluster.asked == []


async def test_a_decision_that_breaks_does_not_stop_those_that_came_after_it(cluster: Recording) -> None:
    def broken(_: Ledger) -> tuple[LedgerChange, None]:
        raise ZeroDivisionError("a bug")

    async with process(cluster) as ledgers:
        hold = cluster.faults.hold(Operation.READ_LEDGER)
        first = asyncio.create_task(ledgers.change("n", broken))
        await hold.reached.wait()
        second = asyncio.create_task(ledgers.change("n", taking("a")))
        await asyncio.sleep(0)
        hold.release()
        with pytest.raises(Unavailable, match="a bug"):
            await first
        assert await second == 1


async def test_of_nodes_that_are_gone_nothing_stays(cluster: Recording) -> None:
    async with process(cluster) as ledgers:
        for number in range(20):
            await ledgers.change(f"n{number}", taking("a"))
            await ledgers.change(f"n{number}", giving("a"))
        for number in range(20):
            cluster._ledgers.remove(f"n{number}")
        await delivered(cluster, ledgers)
        assert [record.node for record in ledgers.all()] == ["last"]
        assert not ledgers._queues
        assert not ledgers._claimed_on


async def test_a_change_that_changes_nothing_costs_no_write(cluster: Recording) -> None:
    async with process(cluster) as ledgers:
        await ledgers.change("n", taking("a"))
        assert await ledgers.change("n", taking("a")) == 1
        assert await ledgers.change("n", giving("b")) is False
        assert ledgers.writes == 1
