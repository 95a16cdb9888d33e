"""A rollout survives passing faults, gives up at lasting ones, and names the program that it waits for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import pytest

from kvplace.core.errors import ExitCode, KvplaceError
from kvplace.kube.api_errors import ApiUnavailable, Denied
from kvplace.kube.reported_vms import VMI_PHASES
from kvplace.kube.watches import EVERYTHING, Interrupted, Kind, Selector, WatchEvent
from kvplace.rollout.report import Report
from kvplace.rollout.run import RolloutRun
from tests.rollout.examples import advance, everywhere, moving, rollout
from tests.rollout.memory_rollouts import MemoryRollouts
from tests.virtual_time import JumpingLoop

K = TypeVar("K")
R = TypeVar("R")
T = TypeVar("T")

DENIED = Denied("watch", "virtualmachineinstances", 'User "ada" cannot watch resource')
NAMES = [f"web-{number:02}" for number in range(1, 7)]
NO_SERVE = (
    'Internal error occurred: failed calling webhook "vm.kvplace.io": failed to call webhook: Post '
    '"https://kvplace-serve.kvplace-system.svc:443/admit/vm?timeout=10s": connect: connection refused'
)
SENTENCE = (
    "`kvplace serve` does not answer the API server (webhook vm.kvplace.io): connect: connection refused"
)


class Away(MemoryRollouts):
    """An API server whose webhooks do not answer about some VMs."""

    def __init__(self, about: Callable[[str], bool]) -> None:
        super().__init__()
        self.about = about

    async def apply_vm(self, vm: Mapping[str, Any], *, dry_run: bool = False) -> None:
        if self.about(vm["metadata"]["name"]):
            raise ApiUnavailable(NO_SERVE, status=500)
        await super().apply_vm(vm, dry_run=dry_run)


class Deaf(MemoryRollouts):
    """An API server with a watch of VMIs that fails as `why` decides; its events come later."""

    def __init__(self, why: Callable[[float], KvplaceError | None]) -> None:
        super().__init__()
        self.why = why

    async def watch(self, kind: Kind[K, R], selector: Selector = EVERYTHING) -> AsyncIterator[WatchEvent[R]]:
        async for event in super().watch(kind, selector):
            while kind is VMI_PHASES and (why := self.why(asyncio.get_running_loop().time())) is not None:
                yield Interrupted(why)
                await asyncio.sleep(1)
            yield event


def run_of(cluster: MemoryRollouts, **keys: Any) -> RolloutRun:
    return RolloutRun(cluster, rollout(**keys), everywhere, clock=asyncio.get_running_loop().time)


def in_no_time(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(work)


def test_an_outage_of_a_minute_fails_no_vm_and_is_named_while_it_lasts() -> None:
    async def work() -> tuple[Report, str]:
        loop = asyncio.get_running_loop()
        cluster = Away(lambda name: 0 < loop.time() < 60 and name > "web-02")
        run = run_of(cluster, maxInFlight=2)
        async with moving(cluster, pause_s=0.1):
            running = asyncio.create_task(run.run())
            await asyncio.sleep(40)
            said = run.waits_for
            return await running, said

    report, said = in_no_time(work())
    assert report.exit_code is ExitCode.DONE
    assert said.startswith(f"2 VMs still without an answer ({SENTENCE}; ")


def test_vms_whose_creation_is_never_answered_are_given_up_while_the_others_come_up() -> None:
    async def work() -> Report:
        cluster = Away(lambda name: name.endswith("3"))
        async with moving(cluster, pause_s=0.1):
            report = await run_of(cluster).run()
        assert 115 < asyncio.get_running_loop().time() < 130
        return report

    report = in_no_time(work())
    assert report.exit_code is ExitCode.PARTLY_DONE
    assert [(one.name, one.reason) for one in report.failed] == [("web-03", NO_SERVE)]
    assert report.ready == tuple(name for name in NAMES if name != "web-03")


def test_a_run_that_is_stopped_in_an_outage_ends_at_once_and_states_why_vms_are_not_made() -> None:
    async def work() -> Report:
        loop = asyncio.get_running_loop()
        run = run_of(Away(lambda name: True))
        loop.call_later(10, run.stop)
        report = await run.run()
        assert loop.time() < 11
        return report

    report = in_no_time(work())
    assert (report.exit_code, report.failed) == (ExitCode.INTERRUPTED, ())
    assert [(one.name, one.reason) for one in report.unfinished] == [
        (name, f"not made: {NO_SERVE}") for name in NAMES
    ]


def test_the_timeout_ends_an_outage_and_vms_that_were_not_made_are_among_the_failed() -> None:
    async def work() -> Report:
        return await run_of(Away(lambda name: True), timeout="20s").run()

    report = in_no_time(work())
    assert report.exit_code is ExitCode.TIMED_OUT
    assert report.document()["failed"][0] == {"name": "web-01", "reason": f"not made after 20 s: {NO_SERVE}"}


def test_vms_that_are_late_are_among_the_failed_with_the_reason_of_the_wait() -> None:
    def step(cluster: MemoryRollouts, name: str) -> None:
        if name == "web-03":
            cluster.keep_waiting(name, "0/1 nodes are available: 1 too few cores.")
        else:
            advance(cluster, name)

    async def work() -> Report:
        cluster = MemoryRollouts()
        async with moving(cluster, step, pause_s=0.01):
            return await run_of(cluster, timeout="1s").run()

    report = in_no_time(work())
    assert report.exit_code is ExitCode.TIMED_OUT
    reason = "created, not pinned after 1 s: 0/1 nodes are available: 1 too few cores."
    assert report.document()["failed"] == [{"name": "web-03", "reason": reason}]


def away_and_then_denied(now: float) -> KvplaceError | None:
    return ApiUnavailable("connection refused") if 5 < now < 200 else DENIED if 200 < now < 260 else None


@pytest.mark.parametrize("why", [lambda now: DENIED if 5 < now < 65 else None, away_and_then_denied])
def test_a_right_that_lacks_for_a_minute_while_a_rollout_runs_does_not_end_it(
    why: Callable[[float], KvplaceError | None],
) -> None:
    async def work() -> Report:
        async with moving(cluster := Deaf(why), pause_s=10):
            return await run_of(cluster, maxInFlight=2).run()

    assert in_no_time(work()).exit_code is ExitCode.DONE


@pytest.mark.parametrize(("lost_at", "told_at"), [(-1, 0), (5, 130)])
def test_a_right_that_lacks_from_the_start_is_reported_at_once_and_one_that_was_lost_after_two_minutes(
    lost_at: float, told_at: float
) -> None:
    async def work() -> float:
        async with moving(cluster := Deaf(lambda now: DENIED if now > lost_at else None), pause_s=10):
            with pytest.raises(Denied):
                await run_of(cluster, maxInFlight=2).run()
        return asyncio.get_running_loop().time()

    assert told_at <= in_no_time(work()) < told_at + 5


@pytest.mark.parametrize(
    ("why", "lasts_s", "fails"),
    [
        (NO_SERVE, 60, False),
        (NO_SERVE, 600, True),
        ('pods "virt-launcher-web-03" is forbidden: exceeded quota: small', 600, True),
        ('admission webhook "v.example.org" denied the request: not on Mondays', 600, True),
    ],
)
def test_a_vm_whose_pod_cannot_be_made_is_waited_for_only_if_that_may_pass(
    why: str, lasts_s: float, *, fails: bool
) -> None:
    def step(cluster: MemoryRollouts, name: str) -> None:
        if name != "web-03":
            advance(cluster, name)
        else:
            cluster.keep_unmade(name, why)
            asyncio.get_running_loop().call_later(lasts_s, come, cluster, name)

    def come(cluster: MemoryRollouts, name: str) -> None:
        cluster.make_pod(name)
        advance(cluster, name)

    async def work() -> tuple[Report, float]:
        cluster = MemoryRollouts()
        async with moving(cluster, step, pause_s=0.1):
            report = await run_of(cluster).run()
        return report, asyncio.get_running_loop().time()

    report, seconds = in_no_time(work())
    assert [(one.name, one.reason) for one in report.failed] == ([("web-03", why)] if fails else [])
    assert report.exit_code is (ExitCode.PARTLY_DONE if fails else ExitCode.DONE)
    assert seconds < (125 if why == NO_SERVE else 2)
