"""Watches from versions that the API server does not know, as after a restore of etcd."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from kvplace.core.errors import Corrupt, KvplaceError
from kvplace.kube.api_cluster import ApiCluster
from kvplace.kube.api_errors import (
    ApiUnavailable,
    Denied,
    Expired,
    NotFound,
    Rejected,
    Unauthenticated,
    UnusableAnswer,
)
from kvplace.kube.list_watch import Change, Page, follow, resumes
from kvplace.kube.session import Limits
from kvplace.kube.watches import LEDGERS, Apply, Init, InitApply, InitDone, Interrupted
from tests.kube.api_stub import ApiStub, api_stub, status
from tests.kube.scripted_watches import Pauses, Script, StopTest, page, pod, reported, run_out, unavailable
from tests.kube.worlds import ApiWorld


@pytest.fixture
async def stub() -> AsyncIterator[ApiStub]:
    async with api_stub() as running:
        yield running


@pytest.mark.parametrize(
    "failure",
    [Rejected("400"), NotFound("404", "things"), UnusableAnswer("hush"), ApiUnavailable("500", status=500)],
)
async def test_a_version_that_may_be_at_fault_is_not_asked_for_again(failure: KvplaceError) -> None:
    source = Script(Page((), "", "9"), failure)
    await run_out(source, Pauses())
    assert source.asked == [("list", ""), ("watch", "9"), ("list", "")]


@pytest.mark.parametrize("failure", [Denied("watch", "things", "no"), Unauthenticated("401"), unavailable()])
async def test_a_failure_that_does_not_concern_the_version_leaves_it_in_use(failure: KvplaceError) -> None:
    source = Script(Page((), "", "9"), failure, None, failure)
    await run_out(source, Pauses())
    assert source.asked == [("list", ""), ("watch", "9"), ("watch", "9"), ("next", ""), ("watch", "9")]


async def test_a_watch_that_is_refused_as_such_is_not_repeated_in_a_hurry() -> None:
    pauses = Pauses()
    turn = [Page((), "", "7"), Rejected("what is this selector?")]
    await run_out(Script(*turn, *turn, *turn, *turn), pauses)
    assert pauses.seconds == [1, 2, 4, 8]


@pytest.mark.parametrize(("listed", "goes_back"), [("8", True), ("9", False), ("after-9", False)])
async def test_a_list_that_is_older_than_the_changes_before_it_is_reported(
    listed: str, goes_back: bool
) -> None:
    seen: tuple[Any, ...] = (Page((), "", "7"), None, Change(Apply("a"), "9"), Expired("410"))
    events = follow(Script(*seen, Page((), "", listed)), pause=Pauses(), clock=lambda: 0.0)
    received = [await anext(events) for _ in range(8 if goes_back else 7)]
    with pytest.raises(StopTest):
        await anext(events)
    failures = [type(event.failure) for event in received if isinstance(event, Interrupted)]
    assert failures == ([Expired, Corrupt] if goes_back else [Expired])
    assert received[-2:] == [Init(), InitDone()]


@pytest.mark.parametrize("unknown", ["silence", status(500, 'parsing "abc": invalid syntax')])
async def test_a_version_that_the_server_does_not_know_is_listed_anew(
    stub: ApiStub, tmp_path: Path, unknown: Any
) -> None:
    answer = stub.forever() if unknown == "silence" else unknown
    stub.script = [page(version=5), answer, page(pod("a", 2), version=3), stub.forever()]
    seen = await reported(stub, tmp_path, 5, limits=Limits(silence_s=0.2))
    assert seen[2:] == [(Init, ""), (InitApply, "a"), (InitDone, "")]


async def test_a_version_that_the_api_server_cannot_read_leads_to_a_list(
    api_world: ApiWorld,
) -> None:
    changes = cast(ApiCluster, api_world.cluster).list_watch(LEDGERS).changes("of-another-server")
    with pytest.raises(KvplaceError) as failed:
        await anext(changes)
    assert not resumes(failed.value, was_open=False)
