"""HTTP/2 clients that make work without calling: each flood ends its own connection, and soon."""

from __future__ import annotations

import asyncio

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated
from h2.settings import SettingCodes
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from kvplace.scheduler.extender_protocol import MAX_BODY
from kvplace.scheduler.listener import MAX_IDLE_FRAMES, MAX_STREAMS, MAX_UNREAD
from kvplace.service.connections import ConnectionLimits
from tests.scheduler.http2_client import PSEUDO_HEADERS, Calls, Client

HEADERS = [*PSEUDO_HEADERS, (":path", "/v1/filter")]


def send(client: Client, *frames: Frame) -> None:
    """Send frames as they are."""
    client.connection.data_received(b"".join(frame.serialize() for frame in frames))


def is_closed(client: Client) -> bool:
    return client.wire.closed


def how_it_ended(client: Client) -> ErrorCodes | int | None:
    """Return the error of the GOAWAY that the server sent."""
    reader = H2Connection(H2Configuration(client_side=True))
    reader.initiate_connection()
    events = reader.receive_data(Client(Calls()).greeting + bytes(client.wire.sent))
    (ended,) = [event for event in events if isinstance(event, ConnectionTerminated)]
    return ended.error_code


@pytest.mark.parametrize(
    "frame",
    [
        PingFrame(0, opaque_data=b"12345678"),
        SettingsFrame(0, settings={SettingCodes.INITIAL_WINDOW_SIZE: 70_000}),
        SettingsFrame(0, flags=["ACK"]),
        PriorityFrame(1, depends_on=0, stream_weight=10),
        WindowUpdateFrame(0, window_increment=1),
    ],
    ids=["ping", "settings", "acknowledgement", "priority", "tiny window update"],
)
async def test_a_flood_of_frames_that_are_not_calls_ends_the_connection(frame: Frame) -> None:
    client = Client(Calls())
    for _ in range(MAX_IDLE_FRAMES + 1):
        if client.wire.closed:
            break
        send(client, frame)
    assert client.wire.closed
    assert how_it_ended(client) == ErrorCodes.ENHANCE_YOUR_CALM


async def test_a_flood_ends_the_connection_of_a_client_who_calls_now_and_then_too() -> None:
    client = Client(Calls())
    flood = [PingFrame(0, opaque_data=b"12345678")] * (MAX_IDLE_FRAMES // 2)
    answered = 0
    while not is_closed(client) and answered < 10:
        await client.until_complete(client.ask(b"1"))
        answered += 1
        send(client, *flood)
    assert answered < 5
    assert how_it_ended(client) == ErrorCodes.ENHANCE_YOUR_CALM


async def test_a_client_who_takes_large_answers_in_small_pieces_is_not_a_flood() -> None:
    client = Client(Calls())
    for _ in range(5):
        await client.until_complete(client.ask(b"1"))
        send(client, *[WindowUpdateFrame(0, window_increment=4096)] * MAX_IDLE_FRAMES)
    assert not is_closed(client)


async def test_a_flood_of_empty_data_ends_the_connection() -> None:
    client = Client(Calls())
    client.http.send_headers(1, HEADERS)
    client.exchange()
    for _ in range(MAX_IDLE_FRAMES + 1):
        if client.wire.closed:
            break
        send(client, DataFrame(1, b""))
    assert client.wire.closed


async def test_calls_that_are_reset_as_soon_as_they_are_made_do_not_pile_up() -> None:
    calls = Calls()
    calls.may_answer.clear()
    client = Client(calls)
    made = 0
    while not client.wire.closed:
        stream = client.http.get_next_available_stream_id()
        client.http.send_headers(stream, HEADERS, end_stream=True)
        client.http.reset_stream(stream)
        client.connection.data_received(client.http.data_to_send())
        made += 1
        await asyncio.sleep(0)
    assert made <= 2 * MAX_STREAMS + 1
    calls.may_answer.set()
    await asyncio.gather(*client.connection._answering)
    assert len(calls.done) == made  # a bind does not stop half-way


async def test_incomplete_calls_that_are_reset_end_the_connection_too() -> None:
    client = Client(Calls())
    made = 0
    while not client.wire.closed:
        stream = client.http.get_next_available_stream_id()
        client.http.send_headers(stream, HEADERS)
        client.http.reset_stream(stream)
        client.connection.data_received(client.http.data_to_send())
        made += 1
    assert made <= MAX_IDLE_FRAMES + 1


async def test_headers_without_end_end_the_connection() -> None:
    client = Client(Calls())
    block = client.http.encoder.encode(HEADERS)
    send(client, HeadersFrame(1, block))
    sent = 0
    while not client.wire.closed and sent < 10_000:
        send(client, ContinuationFrame(1, b""))
        sent += 1
    assert client.wire.closed
    assert sent < 100


async def test_headers_that_unpack_to_more_than_the_limit_end_the_connection() -> None:
    client = Client(Calls())
    bomb = [*HEADERS, *[("x", "a" * 4000)] * 200]
    block = client.http.encoder.encode(bomb)
    assert len(block) < 10_000
    frame = HeadersFrame(1, block)
    frame.flags |= {"END_HEADERS", "END_STREAM"}
    send(client, frame)
    assert client.wire.closed


async def test_incomplete_bodies_of_one_connection_stay_below_a_limit() -> None:
    client = Client(Calls())
    sent = 0
    while not client.wire.closed and sent < 2 * MAX_UNREAD:
        stream = client.http.get_next_available_stream_id()
        client.http.send_headers(stream, HEADERS)
        client.exchange()
        for _ in range(MAX_BODY // 16_384 - 1):
            if is_closed(client):
                break
            client.http.send_data(stream, bytes(16_384))
            client.exchange()
            sent += 16_384
    assert client.wire.closed
    assert sent <= MAX_UNREAD + 16_384


@pytest.mark.parametrize("state", ["greeting", "body", "answer"])
async def test_who_leaves_something_incomplete_is_overdue_after_the_time_for_requests(state: str) -> None:
    limits = ConnectionLimits(request_s=10, idle_s=300)
    client = Client(Calls(bytes(1 << 20)), limits, greets=state != "greeting")
    now = asyncio.get_running_loop().time()
    if state == "body":
        client.http.send_headers(1, HEADERS)
        client.exchange()
    if state == "answer":
        client.http.send_headers(1, HEADERS, end_stream=True)
        client.exchange()
        await asyncio.sleep(0)
        await asyncio.gather(*client.connection._answering)
        client.exchange(acknowledge=False)
        assert client.connection._unsent
    assert not client.connection.is_overdue(now + 5)
    assert client.connection.is_overdue(now + 11)


async def test_an_idle_connection_is_ended_as_the_protocol_states() -> None:
    client = Client(Calls(), ConnectionLimits(request_s=10, idle_s=300))
    now = asyncio.get_running_loop().time()
    stream = client.ask(b"1")
    await client.until_complete(stream)
    await asyncio.sleep(0)  # the task that has answered is forgotten in the loop's next round
    assert not client.connection.is_overdue(now + 299)
    assert not client.connection.is_overdue(now + 302)
    await client.connection._ending
    assert client.wire.closed
    assert how_it_ended(client) == ErrorCodes.NO_ERROR
