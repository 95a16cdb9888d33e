"""A bind against an API server that refuses, forgets, or does not answer."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvplace.core.errors import Conflict, Forbidden, KvplaceError, Unavailable
from kvplace.core.ledger import Claim, LedgerChange
from kvplace.core.request import OnFailure
from kvplace.core.scalars import CpuMask, NodeName
from kvplace.core.well_known_names import PLACEMENT
from kvplace.kube.api_errors import ApiUnavailable
from kvplace.kube.object_records import PodRecord
from kvplace.scheduler.extender import ExtenderSettings
from tests.controller.replicas import asking_pod, replica
from tests.kube.faults import Moment, Operation
from tests.nodes.machines import EIGHT
from tests.scheduler.counting import Counting
from tests.scheduler.holding import hold

LIMIT_S = ExtenderSettings().bind_seconds
NO_ANSWER = Unavailable("no answer")


@pytest.fixture
def cluster() -> Counting:
    """Two nodes of eight CPUs."""
    made = Counting()
    for name in ("a", "b"):
        made.create_node(name, topology=EIGHT)
    return made


def claim_of(cluster: Counting, pod: PodRecord) -> Claim | None:
    """Return the claim of a pod on node a."""
    return cluster.ledger("a").claims.get(pod.uid)


async def test_when_the_claim_cannot_be_stored_nothing_is_bound(cluster: Counting) -> None:
    async with replica(cluster, controller=False) as one:
        cluster.faults.fail(Operation.WRITE_LEDGER, Forbidden("denied update on nodeledgers"))
        assert "denied update on nodeledgers" in await one.bind(asking_pod(cluster, "vm"), "a")
        assert cluster.bindings == []


async def test_a_stored_claim_ends_the_hold_and_a_refused_one_does_not(cluster: Counting) -> None:
    async with replica(cluster, controller=False) as one:
        fits, huge = asking_pod(cluster, "vm"), asking_pod(cluster, "huge", 9)
        one.extender.pending.hold(hold("a", fits.uid, 0))
        assert await one.bind(fits, "a") == ""
        one.extender.pending.hold(hold("a", huge.uid, 0))
        assert "9" in await one.bind(huge, "a")
        assert [held.uid for held in one.extender.pending.held_on(NodeName("a"))] == [huge.uid]


# The API server reports no.


@pytest.mark.parametrize("unanswered", [0, 1])
async def test_the_claim_of_a_deleted_pod_is_left_to_the_controller(
    cluster: Counting, unanswered: int
) -> None:
    async with replica(cluster, controller=False) as one:
        pod = asking_pod(cluster, "vm")
        cluster.faults.fail(Operation.BIND, NO_ANSWER, times=unanswered)
        sending = cluster.faults.hold(Operation.BIND, nth=unanswered + 1)
        bind = asyncio.create_task(one.bind(pod, "a"))
        await sending.reached.wait()
        cluster.delete_pod("default", "vm")
        sending.release()
        assert "pod default/vm is gone" in await bind
        assert claim_of(cluster, pod) is not None


@pytest.mark.parametrize("foreign", ["another node", "no cores", "other cores", "another UID"])
async def test_the_claim_of_a_pod_that_another_client_bound_is_released_unless_that_is_a_new_pod(
    cluster: Counting, foreign: str
) -> None:
    async with replica(cluster, controller=False) as one:
        pod = asking_pod(cluster, "vm")
        sending = cluster.faults.hold(Operation.BIND)
        bind = asyncio.create_task(one.bind(pod, "a"))
        await sending.reached.wait()
        other = asking_pod(cluster, "other")
        assert await one.bind(other, "a") == ""
        placement = cluster.pod_annotations("default", "other")[PLACEMENT]
        if foreign == "another UID":
            cluster.delete_pod("default", "vm", force=True)
            cluster.create_pod("vm", request=pod.request, vmi="vm")
        else:
            written = {} if foreign == "no cores" else {PLACEMENT: placement.replace(other.uid, pod.uid)}
            await cluster.bind(
                "default", "vm", pod.uid, NodeName("b" if foreign == "another node" else "a"), written
            )
        sending.release()
        assert "pod default/vm cannot be bound to a: " in await bind
        assert (claim_of(cluster, pod) is not None) == (foreign == "another UID")
        assert claim_of(cluster, other) is not None


async def test_a_bind_that_is_denied_keeps_its_claim_if_another_bound_the_pod_with_these_cores(
    cluster: Counting,
) -> None:
    """The other one's claim was taken out of the ledger by a user, so this bind made it anew."""
    async with replica(cluster, controller=False) as one:
        pod = asking_pod(cluster, "vm")
        cluster.faults.fail(Operation.BIND, Forbidden("denied"), moment=Moment.AFTER)
        assert "denied" in await one.bind(pod, "a")
        assert cluster.pod("vm").node == "a"
        assert claim_of(cluster, pod) is not None


# Several replicas bind one pod.


def taken_over(cluster: Counting, pod: PodRecord) -> Claim:
    """Date the claim of a pod anew, as another replica does that binds the pod now."""
    stored = claim_of(cluster, pod)
    assert stored is not None
    later = replace(stored, since="2026-01-02T00:00:59Z")
    cluster.put_ledger("a", cluster.ledger("a").after(LedgerChange(claims=(later,))))
    return later


@pytest.mark.parametrize("error", [Conflict("gated"), Forbidden("denied")], ids=repr)
async def test_a_bind_that_fails_leaves_its_claim_to_the_replica_that_has_taken_it_over(
    cluster: Counting, error: KvplaceError
) -> None:
    async with replica(cluster, controller=False) as one:
        pod = asking_pod(cluster, "vm")
        cluster.faults.fail(Operation.BIND, error)
        sending = cluster.faults.hold(Operation.BIND)
        bind = asyncio.create_task(one.bind(pod, "a"))
        await sending.reached.wait()
        later = taken_over(cluster, pod)
        sending.release()
        assert str(error) in await bind
        assert claim_of(cluster, pod) == later


@pytest.mark.parametrize("error", [Conflict("gated"), Forbidden("denied")], ids=repr)
async def test_a_bind_that_fails_never_releases_a_claim_that_it_took_over(
    cluster: Counting, error: KvplaceError
) -> None:
    async with replica(cluster, controller=False) as one:
        pod = asking_pod(cluster, "vm")
        cluster.faults.fail(Operation.BIND, NO_ANSWER, times=1000)
        assert "no answer" in await one.bind(pod, "a")
        cluster.faults._faults.clear()
        cluster.faults.fail(Operation.BIND, error)
        assert str(error) in await one.bind(pod, "a")
        assert claim_of(cluster, pod) is not None


async def test_a_claim_whose_release_is_repeated_without_an_answer_is_released_once(
    cluster: Counting,
) -> None:
    """The first write took effect, and another replica has claimed the same cores since."""
    async with replica(cluster, controller=False) as one:
        pod = asking_pod(cluster, "vm")
        cluster.faults.fail(Operation.BIND, Conflict("gated"))
        cluster.faults.fail(Operation.WRITE_LEDGER, NO_ANSWER, moment=Moment.AFTER, nth=2)
        releasing = cluster.faults.hold(Operation.WRITE_LEDGER, moment=Moment.AFTER, nth=2)
        bind = asyncio.create_task(one.bind(pod, "a"))
        sending = cluster.faults.hold(Operation.BIND)
        await sending.reached.wait()
        made = claim_of(cluster, pod)
        assert made is not None
        sending.release()
        await releasing.reached.wait()
        assert claim_of(cluster, pod) is None
        again = replace(made, since="2026-01-02T00:00:59Z")
        cluster.put_ledger("a", cluster.ledger("a").after(LedgerChange(claims=(again,))))
        releasing.release()
        assert "gated" in await bind
        assert claim_of(cluster, pod) == again


async def test_a_claim_stays_after_a_conflict_while_an_unanswered_binding_may_still_arrive(
    cluster: Counting,
) -> None:
    async with replica(cluster, controller=False) as one:
        pod = asking_pod(cluster, "vm")
        cluster.faults.fail(Operation.BIND, NO_ANSWER)
        cluster.faults.fail(Operation.BIND, Conflict("gated"), nth=2)
        assert "gated" in await one.bind(pod, "a")
        assert claim_of(cluster, pod) is not None


async def test_a_binding_that_was_turned_away_for_load_keeps_no_claim_after_a_conflict(
    cluster: Counting,
) -> None:
    async with replica(cluster, controller=False) as one:
        pod = asking_pod(cluster, "vm")
        cluster.faults.fail(Operation.BIND, ApiUnavailable("busy", status=429, untouched=True))
        cluster.faults.fail(Operation.BIND, Conflict("gated"), nth=2)
        assert "gated" in await one.bind(pod, "a")
        assert claim_of(cluster, pod) is None


async def test_attempts_within_one_second_make_claims_of_different_dates(cluster: Counting) -> None:
    async with replica(cluster, controller=False) as one:
        dates = set()
        for _ in range(2):
            pod = asking_pod(cluster, "vm")
            await asyncio.sleep(0.001)
            assert await one.bind(pod, "a") == ""
            made = claim_of(cluster, pod)
            assert made is not None
            dates.add(made.since)
            cluster.delete_pod("default", "vm", force=True)
        assert len(dates) == 2


# The API server does not answer.


@pytest.mark.parametrize("moment", list(Moment))
@pytest.mark.parametrize("times", [1, 4])
async def test_a_binding_without_an_answer_is_repeated_until_one_comes(
    cluster: Counting, moment: Moment, times: int
) -> None:
    async with replica(cluster, controller=False) as one:
        pod = asking_pod(cluster, "vm")
        cluster.faults.fail(Operation.BIND, NO_ANSWER, moment=moment, times=times)
        assert await one.bind(pod, "a") == ""
        stored = claim_of(cluster, pod)
        assert stored is not None
        assert cluster.pod("vm").node == "a"
        assert cluster.placement("vm").placement.cpus == stored.cpus
        # If the first took effect, the second finds the pod bound.
        assert len(cluster.bindings) == (2 if moment is Moment.AFTER else times + 1)


async def test_a_pod_that_was_relocated_before_its_binding_is_repeated_keeps_its_claim(
    cluster: Counting,
) -> None:
    async with replica(cluster, controller=False) as one:
        pod = asking_pod(cluster, "vm")
        cluster.faults.fail(Operation.BIND, NO_ANSWER, moment=Moment.AFTER)
        repeated = cluster.faults.hold(Operation.BIND, nth=2)
        bind = asyncio.create_task(one.bind(pod, "a"))
        await repeated.reached.wait()
        moved = replace(cluster.placement("vm"), revision=2)
        cpus = CpuMask(moved.placement.cpus | 0b1000_0000)
        text = replace(moved, placement=replace(moved.placement, cpus=cpus, owned=cpus)).to_json()
        await cluster.replace_placement("default", "vm", pod.uid, {PLACEMENT: text})
        repeated.release()
        assert await bind == ""
        assert claim_of(cluster, pod) is not None


async def test_after_its_time_limit_a_bind_sends_nothing_more_and_leaves_the_claim(cluster: Counting) -> None:
    async with replica(cluster, controller=False) as one:
        loop = asyncio.get_running_loop()
        pod = asking_pod(cluster, "vm")
        cluster.faults.fail(Operation.BIND, NO_ANSWER, times=1000)
        began = loop.time()
        assert "no answer" in await one.bind(pod, "a")
        assert loop.time() - began <= LIMIT_S
        sent = len(cluster.bindings)
        assert sent > 4
        await asyncio.sleep(60.0)
        assert len(cluster.bindings) == sent
        assert claim_of(cluster, pod) is not None


async def test_a_claim_that_took_too_long_to_store_is_left_and_nothing_is_bound(cluster: Counting) -> None:
    async with replica(cluster, controller=False) as one:
        pod = asking_pod(cluster, "vm")
        storing = cluster.faults.hold(Operation.WRITE_LEDGER, moment=Moment.AFTER)
        bind = asyncio.create_task(one.bind(pod, "a"))
        await storing.reached.wait()
        await asyncio.sleep(LIMIT_S + 0.1)
        storing.release()
        assert "claiming cores of node a took too long; decide again" in await bind
        assert cluster.bindings == []
        assert claim_of(cluster, pod) is not None


@pytest.mark.parametrize(
    "then", [Forbidden("denied"), KvplaceError("odd"), Unavailable("still none")], ids=repr
)
async def test_after_a_lost_answer_the_claim_stays_unless_the_pod_is_known_not_to_be_bound(
    cluster: Counting, then: KvplaceError
) -> None:
    """The first write took effect: the pod runs on these cores, whatever comes after."""
    async with replica(cluster, controller=False) as one:
        pod = asking_pod(cluster, "vm")
        cluster.faults.fail(Operation.BIND, NO_ANSWER, moment=Moment.AFTER)
        cluster.faults.fail(Operation.BIND, then, nth=2, times=1000)
        assert str(then) in await one.bind(pod, "a")
        assert cluster.pod("vm").node == "a"
        assert claim_of(cluster, pod) is not None


async def test_when_the_pod_cannot_be_read_after_a_conflict_its_claim_stays(cluster: Counting) -> None:
    async with replica(cluster, controller=False) as one:
        pod = asking_pod(cluster, "vm")
        cluster.faults.fail(Operation.BIND, NO_ANSWER, moment=Moment.AFTER)
        cluster.faults.fail(Operation.READ_POD, Unavailable("busy"))
        assert "busy" in await one.bind(pod, "a")
        assert cluster.pod("vm").node == "a"
        assert claim_of(cluster, pod) is not None


async def test_a_bind_takes_over_the_claim_of_an_earlier_attempt_and_dates_it_anew_once(
    cluster: Counting,
) -> None:
    async with replica(cluster, controller=False) as one:
        pod = asking_pod(cluster, "vm")
        cluster.faults.fail(Operation.BIND, NO_ANSWER, times=1000)
        assert "no answer" in await one.bind(pod, "a")
        cluster.faults._faults.clear()
        before = claim_of(cluster, pod)
        await asyncio.sleep(30.0 - asyncio.get_running_loop().time())
        # The write that renews it is slow and its answer lost: what is stored then is this attempt's own.
        storing = cluster.faults.hold(Operation.WRITE_LEDGER, moment=Moment.AFTER)
        cluster.faults.fail(Operation.WRITE_LEDGER, NO_ANSWER, moment=Moment.AFTER)
        writes = one.cache.ledgers.writes
        bind = asyncio.create_task(one.bind(pod, "a"))
        await storing.reached.wait()
        await asyncio.sleep(3.0)
        storing.release()
        assert await bind == ""
        after = claim_of(cluster, pod)
        assert before is not None
        assert after == replace(before, since="2026-01-02T00:00:30.000000Z")
        assert one.cache.ledgers.writes == writes


# A pod that may float.


async def test_a_pod_that_may_float_and_cannot_be_bound_costs_no_ledger_write(cluster: Counting) -> None:
    async with replica(cluster, controller=False) as one:
        pod = asking_pod(cluster, "vm", 9, on_failure=OnFailure.FLOAT)
        cluster.faults.fail(Operation.BIND, Forbidden("denied"))
        assert "denied" in await one.bind(pod, "a")
        assert one.cache.ledgers.writes == 0


async def test_a_pod_that_may_float_waits_when_its_claim_could_not_be_stored(cluster: Counting) -> None:
    async with replica(cluster, controller=False) as one:
        pod = asking_pod(cluster, "vm", 2, on_failure=OnFailure.FLOAT)
        cluster.faults.fail(Operation.WRITE_LEDGER, NO_ANSWER, times=1000)
        assert "no answer" in await one.bind(pod, "a")
        assert cluster.bindings == []
