"""Lists and watches: over a scripted source, then every fault over real connections."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import pytest

from kvplace.core.errors import KvplaceError
from kvplace.kube import session as session_module
from kvplace.kube.api_cluster import ApiCluster
from kvplace.kube.api_errors import Backoff, Expired, UnusableAnswer
from kvplace.kube.list_watch import (
    Change,
    Page,
    follow,
)
from kvplace.kube.session import Limits, open_session
from kvplace.kube.watches import (
    LEDGERS,
    NAME_FIELD,
    NODE_FIELD,
    PLACED_PODS,
    PODS,
    Alive,
    Apply,
    Delete,
    Init,
    InitApply,
    InitDone,
    Interrupted,
    Selector,
)
from tests.kube.api_stub import ApiStub, api_stub, broken, lines, status
from tests.kube.scripted_watches import (
    Pauses,
    Script,
    StopTest,
    line,
    page,
    pod,
    reported,
    run_out,
    unavailable,
)

# Over a scripted source


async def test_a_list_of_several_pages_is_complete_with_the_last() -> None:
    source = Script(Page(("a",), "more", "7"), Page(("b",), "", "7"))
    assert await run_out(source, Pauses()) == [Init(), InitApply("a"), InitApply("b"), InitDone()]
    assert source.asked == [("list", ""), ("list", "more"), ("watch", "7")]


@pytest.mark.parametrize("failure", [Expired("410"), unavailable(), UnusableAnswer("what?")])
async def test_a_list_that_fails_on_any_page_begins_again(failure: KvplaceError) -> None:
    source = Script(failure, Page(("a",), "more", "7"), failure)
    assert await run_out(source, Pauses()) == [Init(), InitApply("a")]
    assert source.asked == [("list", ""), ("list", ""), ("list", "more"), ("list", "")]


async def test_a_list_without_a_version_is_not_believed() -> None:
    source = Script(Page(("a",), "", ""))
    assert await run_out(source, Pauses()) == []
    assert source.asked == [("list", ""), ("list", "")]


@pytest.mark.parametrize(
    ("end", "next_call"),
    [
        (None, ("watch", "9")),
        (unavailable(), ("watch", "9")),
        (Expired("410"), ("list", "")),
        (UnusableAnswer("what?"), ("list", "")),
    ],
)
async def test_a_watch_resumes_where_it_was_unless_the_past_is_gone(
    end: KvplaceError | None, next_call: tuple[str, str]
) -> None:
    source = Script(Page((), "", "7"), None, Change(Apply("a"), "9"), end)
    assert (await run_out(source, Pauses()))[2:] == [Apply("a")]
    assert source.asked[-1] == next_call
    assert source.closed == 1


@pytest.mark.parametrize(
    ("failure", "next_call"), [(unavailable(), ("watch", "7")), (Expired("410"), ("list", ""))]
)
async def test_a_watch_that_cannot_be_opened_is_tried_again_unless_the_past_is_gone(
    failure: KvplaceError, next_call: tuple[str, str]
) -> None:
    source = Script(Page((), "", "7"), failure)
    await run_out(source, Pauses())
    assert source.asked[-1] == next_call


async def test_bookmarks_move_the_version_and_nothing_else() -> None:
    source = Script(Page((), "", "7"), None, Change(None, "12"), None)
    assert await run_out(source, Pauses()) == [Init(), InitDone()]
    assert source.asked[-1] == ("watch", "12")


async def test_a_reader_that_leaves_closes_the_watch() -> None:
    source = Script(Page((), "", "7"), None, Change(Apply("a"), "9"))
    async with aclosing(cast(Any, follow(source, pause=Pauses()))) as events:
        assert [type(await anext(events)) for _ in range(4)] == [Init, InitDone, Alive, Apply]
    assert source.closed == 1


async def test_between_changes_it_reports_whether_the_api_server_still_speaks() -> None:
    failure = unavailable()
    source = Script(Page((), "", "7"), None, Change(None, "8"), failure, None, Change(Apply("a"), "9"), None)
    events = follow(source, pause=Pauses(), backoff=Backoff(jitter=lambda: 1.0), clock=lambda: 0.0)
    received = [await anext(events) for _ in range(7)]
    opened = bookmark = Alive()
    assert received == [
        *(Init(), InitDone(), opened, bookmark, Interrupted(failure)),
        *(opened, Apply("a")),
    ]
    with pytest.raises(StopTest):  # the end of a watch is usual and means nothing
        await anext(events)


async def test_pauses_grow_while_nothing_works_and_respect_the_pause_that_the_server_asks_for() -> None:
    pauses = Pauses()
    failures = [unavailable() for _ in range(6)]
    await run_out(Script(*failures, unavailable(retry_after=7)), pauses)
    assert pauses.seconds == [1, 2, 4, 8, 16, 16, 23]


async def test_a_server_that_lists_but_forgets_at_once_is_not_hammered() -> None:
    pauses = Pauses()
    turn = [Page(("a",), "", "7"), Expired("410")]
    await run_out(Script(*turn, *turn, *turn, *turn), pauses)
    assert pauses.seconds == [1, 2, 4, 8]


async def test_streams_that_end_without_a_word_are_not_reopened_in_a_hurry() -> None:
    pauses = Pauses()
    source = Script(Page((), "", "7"), *([None, None] * 4))
    await run_out(source, pauses)
    assert pauses.seconds == [1, 2, 4, 8]
    assert source.asked.count(("watch", "7")) == 5


async def test_an_event_makes_pauses_short_again() -> None:
    pauses = Pauses()
    source = Script(
        Page((), "", "7"),
        None,
        unavailable(),
        None,
        Change(Apply("a"), "8"),
        unavailable(),
        None,
        unavailable(),
    )
    events = await run_out(source, pauses)
    assert events[2:] == [Apply("a")]
    assert pauses.seconds == [1, 1, 2]


async def test_a_quiet_stream_that_lived_is_reopened_soon() -> None:
    pauses = Pauses()
    source = Script(Page((), "", "7"), *([None, Change(None, "9"), None] * 3))
    ticks = iter(range(0, 10_000, 40))
    await run_out(source, pauses, clock=lambda: float(next(ticks)))
    assert pauses.seconds == [1, 1, 1]


# Over real connections


@pytest.fixture
async def stub() -> AsyncIterator[ApiStub]:
    async with api_stub() as running:
        yield running


def queries(stub: ApiStub) -> list[dict[str, str]]:
    return [dict(request.query) for request in stub.asked]


async def test_a_list_is_read_page_by_page_and_watched_from_its_version(
    stub: ApiStub, tmp_path: Path
) -> None:
    stub.script = [
        page(pod("a", 1), version=5, more="token+/="),
        page(pod("b", 2), version=5),
        stub.forever(line("ADDED", pod("c", 6)), line("DELETED", pod("a", 7))),
    ]
    on_mine = Selector({**PLACED_PODS.labels, "zone": ""}, {NODE_FIELD: "mine", NAME_FIELD: "a"})
    assert await reported(stub, tmp_path, 6, selector=on_mine) == [
        (Init, ""),
        (InitApply, "a"),
        (InitApply, "b"),
        (InitDone, ""),
        (Apply, "c"),
        (Delete, "a"),
    ]
    selector = {
        "labelSelector": "kvplace.io/placed=true,zone=",
        "fieldSelector": "spec.nodeName=mine,metadata.name=a",
    }
    assert queries(stub) == [
        {"limit": "250", **selector},
        {"limit": "250", "continue": "token+/=", **selector},
        {
            "watch": "1",
            "resourceVersion": "5",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": "290",
            **selector,
        },
    ]
    await stub.gone.wait()


async def test_an_expired_page_begins_the_list_again(stub: ApiStub, tmp_path: Path) -> None:
    stub.script = [
        page(pod("a", 1), version=5, more="token"),
        status(410, "The provided continue parameter is too old"),
        page(pod("b", 2), version=9),
        stub.forever(),
    ]
    assert await reported(stub, tmp_path, 5) == [
        (Init, ""),
        (InitApply, "a"),
        (Init, ""),
        (InitApply, "b"),
        (InitDone, ""),
    ]


@pytest.mark.parametrize(
    "expired",
    [
        status(410, "too old resource version"),
        lines(line("ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"})),
    ],
    ids=["as HTTP status", "inside the stream"],
)
async def test_an_expired_version_leads_to_a_new_list(stub: ApiStub, tmp_path: Path, expired: Any) -> None:
    stub.script = [page(version=5), expired, page(pod("a", 8), version=9), stub.forever()]
    assert await reported(stub, tmp_path, 5) == [
        (Init, ""),
        (InitDone, ""),
        (Init, ""),
        (InitApply, "a"),
        (InitDone, ""),
    ]


async def test_another_error_inside_the_stream_is_resumed_from(stub: ApiStub, tmp_path: Path) -> None:
    stub.script = [
        page(version=5),
        lines(line("ADDED", pod("a", 6)), line("ERROR", {"kind": "Status", "code": 500, "message": "etcd"})),
        stub.forever(line("ADDED", pod("b", 7))),
    ]
    assert (await reported(stub, tmp_path, 4))[2:] == [(Apply, "a"), (Apply, "b")]
    assert queries(stub)[2]["resourceVersion"] == "6"


async def test_a_stream_that_just_ends_is_resumed_after_its_last_bookmark(
    stub: ApiStub, tmp_path: Path
) -> None:
    stub.script = [
        page(version=5),
        lines(
            line("ADDED", pod("a", 6)),
            line("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": "42"}}),
        ),
        stub.forever(line("MODIFIED", pod("a", 43))),
    ]
    assert (await reported(stub, tmp_path, 4))[2:] == [(Apply, "a"), (Apply, "a")]
    assert queries(stub)[2]["resourceVersion"] == "42"


@pytest.mark.parametrize("end", [lines, broken])
async def test_a_line_cut_off_in_the_middle_is_asked_for_again(
    stub: ApiStub, tmp_path: Path, end: Any
) -> None:
    whole = line("ADDED", pod("b", 7))
    stub.script = [page(version=5), end(line("ADDED", pod("a", 6)), whole[:40]), stub.forever(whole)]
    assert (await reported(stub, tmp_path, 4))[2:] == [(Apply, "a"), (Apply, "b")]
    assert queries(stub)[2]["resourceVersion"] == "6"


async def test_lines_come_whole_however_the_network_cuts_them(stub: ApiStub, tmp_path: Path) -> None:
    text = b"".join(line("ADDED", pod(name, number)) for number, name in enumerate("abcde", 6))
    pieces = [text[start : start + 97] for start in range(0, len(text), 97)]
    stub.script = [page(version=5), stub.forever(*pieces)]
    assert [name for _, name in (await reported(stub, tmp_path, 7))[2:]] == list("abcde")


async def test_a_line_that_is_not_an_event_leads_to_a_new_list(stub: ApiStub, tmp_path: Path) -> None:
    stub.script = [page(version=5), lines(b'{"type":"ADDED","obj\n'), page(version=9), stub.forever()]
    assert [kind for kind, _ in await reported(stub, tmp_path, 4)] == [Init, InitDone, Init, InitDone]


async def test_an_event_without_measure_leads_to_a_new_list(
    stub: ApiStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "LINE_LIMIT", 1 << 16)
    stub.script = [page(version=5), stub.forever(b"x" * (1 << 20)), page(version=9), stub.forever()]
    assert [kind for kind, _ in await reported(stub, tmp_path, 4)] == [Init, InitDone, Init, InitDone]


async def test_a_silent_stream_is_taken_for_dead(stub: ApiStub, tmp_path: Path) -> None:
    spoken = stub.forever(line("ADDED", pod("a", 6)))
    stub.script = [page(version=5), spoken, stub.forever(line("ADDED", pod("b", 7)))]
    assert (await reported(stub, tmp_path, 4, limits=Limits(silence_s=0.2)))[2:] == [
        (Apply, "a"),
        (Apply, "b"),
    ]
    assert queries(stub)[2]["resourceVersion"] == "6"


async def test_a_busy_server_is_given_the_time_it_asks_for(stub: ApiStub, tmp_path: Path) -> None:
    stub.script = [status(429, "slow down", retry_after=3), page(version=5), stub.forever()]
    session = await open_session(stub.kubeconfig(tmp_path, token="t"))
    pauses = Pauses()
    session.pause = pauses  # type: ignore[method-assign]
    async with session, aclosing(cast(Any, ApiCluster(session).watch(PODS))) as events:
        assert isinstance(await anext(events), Init)
    assert len(pauses.seconds) == 1
    assert pauses.seconds[0] >= 3


async def test_a_ledger_that_cannot_be_read_is_reported_with_its_problem(
    stub: ApiStub, tmp_path: Path
) -> None:
    metadata = {"name": "worker", "uid": "u", "resourceVersion": "3"}
    bad = {"metadata": metadata, "spec": {"owners": {"1": "a"}, "claims": {"a": {"policy": "mine"}}}}
    stub.script = [page(bad, version=5), stub.forever()]
    session = await open_session(stub.kubeconfig(tmp_path, token="t"))
    async with session, aclosing(cast(Any, ApiCluster(session).watch(LEDGERS))) as events:
        await anext(events)
        events = await anext(events)
    assert events.record.node == "worker"
    assert events.record.problem
    assert not events.record.ledger.owners


async def test_closing_the_session_ends_a_watch_that_waits(stub: ApiStub, tmp_path: Path) -> None:
    stub.script = [page(version=5), stub.forever()]
    session = await open_session(stub.kubeconfig(tmp_path, token="t"))
    seen = []
    async for event in ApiCluster(session).watch(PODS):
        seen.append(event)
        if isinstance(event, InitDone):
            await session.close()
    assert seen == [Init(), InitDone()]
