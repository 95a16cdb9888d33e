"""Many changes of a node's ledger become few writes, and none is decided on a state that is not true."""

from __future__ import annotations

import asyncio

import pytest

from kvplace.core.claim_changes import reserve
from kvplace.core.cpuset import mask_of
from kvplace.core.errors import Conflict, KvplaceError, Misconfigured, Refused, Unavailable
from kvplace.core.ledger import Ledger, LedgerChange
from kvplace.core.scalars import NO_CPUS, NodeName, PodUid
from kvplace.kube.ledgers import ENOUGH, Ledgers
from tests.kube.example_claims import claim
from tests.kube.example_claims import taking as claiming
from tests.kube.faults import Operation
from tests.kube.ledger_process import (
    ALL,
    CPUS,
    N,
    Recording,
    process,
    releasing,
    settled,
    taking,
)


@pytest.fixture
def cluster() -> Recording:
    return Recording()


def current(ledgers: Ledgers) -> Ledger:
    """The ledger as a process knows it."""
    record = ledgers.current(N)
    assert record is not None
    return record.ledger


async def test_changes_that_come_while_a_write_is_under_way_go_together_in_the_next(
    cluster: Recording,
) -> None:
    async with process(cluster) as ledgers:
        hold = cluster.faults.hold(Operation.WRITE_LEDGER)
        first = asyncio.create_task(ledgers.change(N, taking("first")))
        await hold.reached.wait()
        others = [asyncio.create_task(ledgers.change(N, taking(f"pod-{i}"))) for i in range(7)]
        await asyncio.sleep(0)
        hold.release()
        taken = await asyncio.gather(first, *others)
        assert ledgers.writes == len(cluster.asked) == 2
        assert ledgers.changes == 8
        assert sorted(taken) == [1 << cpu for cpu in range(8)]
        cluster.stored().check()


async def test_a_change_some_time_after_the_last_write_is_written_at_once(cluster: Recording) -> None:
    async with process(cluster, gather_seconds=0.01) as ledgers:
        for number in range(4):
            await ledgers.change(N, taking(f"pod-{number}"))
            await asyncio.sleep(0.03)
        assert ledgers.writes == 4


async def test_changes_soon_after_a_write_gather_a_moment_and_then_go_together(cluster: Recording) -> None:
    async with process(cluster, gather_seconds=0.2) as ledgers:
        await ledgers.change(NodeName("another"), taking("before"))
        early = asyncio.create_task(ledgers.change(N, taking("early")))
        await asyncio.sleep(0.01)
        late = asyncio.create_task(ledgers.change(N, taking("late")))
        await asyncio.gather(early, late)
        assert ledgers.writes == 2


async def test_a_change_for_which_others_wait_is_written_at_once_with_the_gathered_changes(
    cluster: Recording,
) -> None:
    async with process(cluster, gather_seconds=3600.0) as ledgers:
        await ledgers.change(N, taking("before"))
        gathering = asyncio.create_task(ledgers.change(N, taking("gathering")))
        await asyncio.sleep(0)
        assert await ledgers.change(N, taking("urgent"), at_once=True) == 0b100
        assert await gathering == 0b10
        assert ledgers.writes == 2


async def test_changes_gather_no_longer_once_no_other_one_comes(cluster: Recording) -> None:
    async with process(cluster, gather_seconds=3600.0, quiet_seconds=0.05) as ledgers:
        await ledgers.change(N, taking("before"))
        await asyncio.gather(ledgers.change(N, taking("a")), ledgers.change(N, taking("b")))
        assert ledgers.writes == 2


async def test_changes_of_a_node_gather_while_changes_of_others_come(cluster: Recording) -> None:
    async with process(cluster, gather_seconds=3600.0, quiet_seconds=1.0) as ledgers:
        await ledgers.change(N, taking("before"))
        changing = [asyncio.create_task(ledgers.change(N, taking("gathering")))]
        for number in range(6):
            await asyncio.sleep(0.25)
            changing.append(asyncio.create_task(ledgers.change(NodeName(f"n-{number}"), taking("other"))))
        assert not any(change.done() for change in changing)
        await asyncio.gather(*changing)


async def test_changes_that_are_enough_for_a_write_gather_no_longer(cluster: Recording) -> None:
    async with process(cluster, gather_seconds=3600.0) as ledgers:
        await ledgers.change(N, taking("before"))
        assert ENOUGH <= CPUS
        many = (ledgers.change(N, releasing(f"pod-{number}")) for number in range(ENOUGH - 1))
        assert await asyncio.gather(ledgers.change(N, taking("a")), *many) == [0b10, *[False] * (ENOUGH - 1)]
        assert ledgers.writes == 2


async def test_nodes_do_not_wait_for_each_other(cluster: Recording) -> None:
    async with process(cluster) as ledgers:
        hold = cluster.faults.hold(Operation.WRITE_LEDGER)
        slow = asyncio.create_task(ledgers.change(NodeName("slow"), taking("a")))
        await hold.reached.wait()
        assert await ledgers.change(NodeName("other"), taking("b")) == 1
        hold.release()
        assert await slow == 1


async def test_of_two_pods_that_want_the_last_core_in_one_write_the_second_is_refused(
    cluster: Recording,
) -> None:
    async with process(cluster) as ledgers:
        await ledgers.change(N, taking("big", CPUS - 1))
        answers = await asyncio.gather(
            *(ledgers.change(N, taking(uid)) for uid in ("a", "b")), return_exceptions=True
        )
        assert answers[0] == 1 << (CPUS - 1)
        assert isinstance(answers[1], Refused)
        assert str(answers[1]) == "no CPUs for b"


async def test_a_pod_that_was_refused_is_asked_again_when_a_release_of_its_group_makes_room(
    cluster: Recording,
) -> None:
    async with process(cluster) as ledgers:
        await ledgers.change(N, taking("old", CPUS))
        cluster.asked.clear()
        taken, released = await asyncio.gather(
            ledgers.change(N, taking("new", CPUS)), ledgers.change(N, releasing("old"))
        )
        assert (taken, released) == (ALL, True)
        assert [change.releases for _, change in cluster.asked] == [("old",), ()]
        assert cluster.stored().claims.keys() == {"new"}


async def test_released_cores_go_first_to_the_pod_for_which_they_are_reserved(
    cluster: Recording,
) -> None:
    async with process(cluster, gather_seconds=3600.0) as ledgers:
        await ledgers.change(N, taking("old", CPUS))
        whole = claim("waits", 0, 1)
        kept = reserve(cluster.stored(), whole, but=NO_CPUS, until="2026-01-02T03:05:00Z")
        cluster.put_ledger("n", cluster.stored().after(claiming(kept)))
        await settled(lambda: "waits" in (current(ledgers).claims))
        before = ledgers.writes
        hold = cluster.faults.hold(Operation.WRITE_LEDGER)
        releases = [ledgers.change(N, releasing(uid)) for uid in ("old", *(f"x{n}" for n in range(ENOUGH)))]
        released = asyncio.gather(*releases)
        await hold.reached.wait()
        late = asyncio.create_task(ledgers.change(N, taking("late", CPUS - 2)))
        await asyncio.sleep(0)
        hold.release()
        await released
        assert await late == ALL & ~whole.owned
        assert current(ledgers).claims[whole.uid].owned == whole.owned
        assert ledgers.writes == before + 2


async def test_the_next_write_gives_a_waiting_pod_the_cores_released_for_it(
    cluster: Recording,
) -> None:
    async with process(cluster) as ledgers:
        await ledgers.change(N, taking("old", CPUS))
        whole = claim("waits", 0, 1)
        kept = reserve(cluster.stored(), whole, but=NO_CPUS, until="2026-01-02T03:05:00Z")
        freed = cluster.stored().after(claiming(kept)).after(LedgerChange(releases=(PodUid("old"),)))
        cluster.put_ledger("n", freed)
        await settled(lambda: "waits" in (current(ledgers).claims))
        assert await ledgers.change(N, taking("new", CPUS - 2)) == ALL & ~whole.owned
        assert cluster.stored().claims[whole.uid].owned == whole.owned
        cluster.stored().check()


async def test_a_reservation_that_cannot_be_written_is_not_tried_for_ever(cluster: Recording) -> None:
    async with process(cluster) as ledgers:
        await ledgers.change(N, taking("old", CPUS))
        kept = reserve(cluster.stored(), claim("waits", 0), but=NO_CPUS, until="2026-01-02T03:05:00Z")
        cluster.put_ledger("n", cluster.stored().after(claiming(kept)))
        await settled(lambda: "waits" in (current(ledgers).claims))
        cluster.invalid.add("waits")
        asked = len(cluster.asked)
        assert await ledgers.change(N, releasing("old"))
        await ledgers.drain()
        assert len(cluster.asked) == asked + 2


async def test_a_release_before_a_claim_in_one_group_leaves_its_cores_to_the_next_write(
    cluster: Recording,
) -> None:
    async with process(cluster) as ledgers:
        await ledgers.change(N, taking("old", CPUS))
        cluster.asked.clear()
        released, taken = await asyncio.gather(
            ledgers.change(N, releasing("old")), ledgers.change(N, taking("new", CPUS))
        )
        assert (released, taken) == (True, ALL)
        assert [(change.releases, len(change.claims)) for _, change in cluster.asked] == [
            (("old",), 0),
            ((), 1),
        ]


async def test_a_release_and_a_claim_on_other_cores_go_in_one_write(cluster: Recording) -> None:
    async with process(cluster) as ledgers:
        await ledgers.change(N, taking("old"))
        cluster.asked.clear()
        await asyncio.gather(ledgers.change(N, releasing("old")), ledgers.change(N, taking("new")))
        assert [(change.releases, len(change.claims)) for _, change in cluster.asked] == [(("old",), 1)]
        assert cluster.stored().owners == {1: "new"}


@pytest.mark.parametrize("lost", [Conflict("changed"), Unavailable("timeout")])
async def test_a_pod_that_was_refused_gets_no_claim_when_the_write_of_its_group_is_lost(
    cluster: Recording, lost: KvplaceError
) -> None:
    async with process(cluster) as ledgers:
        cluster.put_ledger("n", Ledger().after(claiming(claim("foreign", 0))))
        await settled(lambda: ledgers.current(N) is not None)
        hold = cluster.faults.hold(Operation.WRITE_LEDGER)
        cluster.faults.fail(Operation.WRITE_LEDGER, lost)
        refused = asyncio.create_task(ledgers.change(N, taking("refused", CPUS)))
        granted = asyncio.create_task(ledgers.change(N, taking("granted")))
        await hold.reached.wait()
        cluster.put_ledger("n", Ledger())  # Now the refused change would succeed.
        hold.release()
        with pytest.raises(Refused):
            await refused
        assert await granted == 0b1
        assert cluster.stored().claims.keys() == {"granted"}


async def test_a_core_is_never_released_and_claimed_in_one_write(cluster: Recording) -> None:
    async with process(cluster) as ledgers:
        for round_ in range(12):
            wishes = [ledgers.change(N, taking(f"{round_}-{i}", 2)) for i in range(4)]
            wishes += [ledgers.change(N, releasing(f"{round_ - 1}-{i}")) for i in range(4)]
            await asyncio.gather(*wishes)
        for before, change in cluster.asked:
            freed = mask_of(cpu for cpu, owner in before.owners.items() if owner in change.releases)
            assert not any(claim.owned & freed for claim in change.claims)
        assert cluster.stored().claims.keys() == {f"11-{i}" for i in range(4)}


async def test_a_pod_that_is_released_and_claims_again_in_one_group_ends_with_its_claim(
    cluster: Recording,
) -> None:
    async with process(cluster) as ledgers:
        await ledgers.change(N, taking("a", 3))
        released, taken = await asyncio.gather(
            ledgers.change(N, releasing("a")), ledgers.change(N, taking("a", 3))
        )
        assert released
        assert cluster.stored().claims[PodUid("a")].owned == taken
        cluster.stored().check()


async def test_a_pod_that_claims_and_is_released_in_one_group_ends_without(cluster: Recording) -> None:
    async with process(cluster) as ledgers:
        await ledgers.change(N, taking("other"))
        _, released = await asyncio.gather(
            ledgers.change(N, taking("a", 3)), ledgers.change(N, releasing("a"))
        )
        assert released
        assert cluster.stored().claims.keys() == {"other"}


async def test_a_claim_that_the_api_server_finds_invalid_does_not_take_the_others_with_it(
    cluster: Recording,
) -> None:
    async with process(cluster) as ledgers:
        cluster.invalid = {"bad"}
        good, bad, also_good = await asyncio.gather(
            *(ledgers.change(N, taking(uid)) for uid in ("good", "bad", "fine")), return_exceptions=True
        )
        assert isinstance(good, int)
        assert isinstance(also_good, int)
        assert isinstance(bad, Misconfigured)
        assert cluster.stored().claims.keys() == {"good", "fine"}


async def test_a_decision_that_breaks_does_not_stop_those_that_came_after_it(cluster: Recording) -> None:
    def broken(_: Ledger) -> tuple[LedgerChange, None]:
        raise ZeroDivisionError("a bug")

    async with process(cluster) as ledgers:
        hold = cluster.faults.hold(Operation.READ_LEDGER)
        first = asyncio.create_task(ledgers.change(N, broken))
        await hold.reached.wait()
        second = asyncio.create_task(ledgers.change(N, taking("a")))
        await asyncio.sleep(0)
        hold.release()
        with pytest.raises(Unavailable, match="a bug"):
            await first
        assert await second == 1
