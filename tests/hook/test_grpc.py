"""gRPC on one connection, with everything HTTP/2 lets a peer do to the bytes in between."""

from __future__ import annotations

import contextlib
import itertools
import random

import pytest
from h2.exceptions import ProtocolError
from hpack import Encoder
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.errors import GrpcStatus
from kvplace.core.protobuf import MAX_MESSAGE_BYTES
from kvplace.hook.grpc import MAX_STREAMS, Cancelled, GrpcCall, GrpcConnection
from tests.hook.grpc_client import HEADERS, INFO, Answer, Caller, framed

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def pump(caller: Caller, server: GrpcConnection, *, echo: bool = True) -> list[GrpcCall | Cancelled]:
    """Carry bytes both ways until no client has more; the server answers every call with its message."""
    heard: list[GrpcCall | Cancelled] = []
    while True:
        sent = caller.http.data_to_send()
        said = server.receive(sent) if sent else []
        heard += said
        for call in said if echo else []:
            if isinstance(call, GrpcCall):
                server.reply(call.stream, call.message)
        back = server.output()
        if not sent and not back:
            return heard
        if back:
            caller.receive(back)


def echoed(message: bytes, initial_window: int | None = None) -> Answer:
    caller, server = Caller(initial_window), GrpcConnection()
    stream = caller.call(INFO, message)
    pump(caller, server)
    return caller.answers[stream]


@pytest.mark.parametrize("size", [0, 1, 16_379, 65_535, 65_536, 1_000_003, MAX_MESSAGE_BYTES])
def test_a_message_of_any_size_passes_both_ways_through_windows_of_64_kib(size: int) -> None:
    message = random.Random(size).randbytes(size)
    answer = echoed(message)
    assert answer.message == message
    assert answer.headers[":status"] == "200"
    assert answer.headers["content-type"] == "application/grpc"
    assert answer.ended


@pytest.mark.parametrize("window", [1, 7, 100, 1 << 20])
def test_answers_fit_through_any_window_of_the_caller(window: int) -> None:
    assert echoed(b"x" * 3000, window).message == b"x" * 3000


def test_an_answer_waits_for_the_window_and_goes_on_when_it_opens() -> None:
    caller, server = Caller(), GrpcConnection()
    caller.acknowledge = False
    stream = caller.call(INFO, b"x" * 200_000)
    pump(caller, server)
    assert len(caller.answers[stream].body) == 65_535
    caller.http.increment_flow_control_window(300_000)
    pump(caller, server)
    assert len(caller.answers[stream].body) == 65_535  # the stream's own window is still shut
    caller.http.increment_flow_control_window(300_000, stream)
    pump(caller, server)
    assert caller.answers[stream].message == b"x" * 200_000


def test_a_larger_initial_window_in_mid_stream_lets_the_answer_go_on() -> None:
    caller, server = Caller(), GrpcConnection()
    caller.acknowledge = False
    caller.http.increment_flow_control_window(1 << 20)
    stream = caller.call(INFO, b"x" * 200_000)
    pump(caller, server)
    caller.http.update_settings({4: 1 << 20})  # SETTINGS_INITIAL_WINDOW_SIZE
    pump(caller, server)
    assert caller.answers[stream].message == b"x" * 200_000


def test_several_calls_share_a_connection() -> None:
    caller, server = Caller(), GrpcConnection()
    streams = {caller.call(INFO, bytes([number]) * 100_000): number for number in range(MAX_STREAMS)}
    pump(caller, server)
    for stream, number in streams.items():
        assert caller.answers[stream].message == bytes([number]) * 100_000


def test_the_client_gets_the_limit_of_concurrent_calls() -> None:
    caller, server = Caller(), GrpcConnection()
    pump(caller, server)
    assert caller.http.remote_settings.max_concurrent_streams == MAX_STREAMS


# A caller made of bare frames, for what a well-behaved library never sends.


def header_block(path: str = INFO, **changed: str) -> bytes:
    pairs = [(name, changed.pop(name.strip(":").replace("-", "_"), value)) for name, value in HEADERS]
    pairs += [(name.replace("_", "-"), value) for name, value in changed.items()]
    return Encoder().encode([*pairs[:1], (":path", path), *pairs[1:]])


def headers(block: bytes, *flags: str, stream: int = 1, **more: int) -> HeadersFrame:
    return HeadersFrame(stream, data=block, flags=["END_HEADERS", *flags], **more)


def whole_call(message: bytes = b"hello") -> list[Frame]:
    return [headers(header_block()), DataFrame(1, data=framed(message), flags=["END_STREAM"])]


def spoken(*frames: Frame | bytes) -> tuple[GrpcConnection, list[GrpcCall | Cancelled]]:
    """Send the frames to a server, as one piece after preface and SETTINGS."""
    server = GrpcConnection()
    rest = b"".join(frame if isinstance(frame, bytes) else frame.serialize() for frame in frames)
    return server, server.receive(PREFACE + SettingsFrame(0).serialize() + rest)


def frames_of(server: GrpcConnection) -> list[Frame]:
    found, rest = [], memoryview(server.output())
    while rest:
        frame, length = Frame.parse_frame_header(rest[:9])
        frame.parse_body(rest[9 : 9 + length])
        found.append(frame)
        rest = rest[9 + length :]
    return found


def answer_of(server: GrpcConnection, stream: int = 1) -> Answer:
    """Decode the answer on one stream from the server's frames."""
    from hpack import Decoder

    decoder, answer = Decoder(), Answer()
    for frame in frames_of(server):
        if isinstance(frame, HeadersFrame):
            pairs = decoder.decode(frame.data)
            if frame.stream_id == stream:
                answer.headers.update({str(name): str(value) for name, value in pairs})
        if isinstance(frame, RstStreamFrame) and frame.stream_id == stream:
            answer.reset = frame.error_code
        if frame.stream_id == stream and "END_STREAM" in frame.flags:
            answer.ended = True
    return answer


HELLO = [GrpcCall(1, INFO, b"hello")]


def test_header_blocks_may_be_cut_into_continuations() -> None:
    block = header_block()
    pieces = [ContinuationFrame(1, data=block[cut : cut + 9]) for cut in range(10, len(block), 9)]
    pieces[-1].flags.add("END_HEADERS")
    first = HeadersFrame(1, data=block[:10])
    assert spoken(first, *pieces, whole_call()[1])[1] == HELLO


def test_padding_and_priorities_are_taken_off() -> None:
    first = headers(header_block(), "PADDED", "PRIORITY", pad_length=17, depends_on=0, stream_weight=15)
    body = framed(b"hello")
    frames = [
        DataFrame(1, data=body[:3], flags=["PADDED"], pad_length=200),
        DataFrame(1, data=body[3:], flags=["PADDED", "END_STREAM"], pad_length=0),
    ]
    assert spoken(first, *frames)[1] == HELLO


def test_padding_is_given_back_to_the_flow_control_window() -> None:
    body = framed(b"x" * 300)
    frames = [DataFrame(1, data=body[cut : cut + 1], flags=["PADDED"], pad_length=255) for cut in range(305)]
    server, _ = spoken(headers(header_block()), *frames[:250])
    assert any(isinstance(frame, WindowUpdateFrame) and frame.stream_id == 0 for frame in frames_of(server))
    rest = b"".join(frame.serialize() for frame in frames[250:])
    assert server.receive(rest + DataFrame(1, flags=["END_STREAM"]).serialize()) == [
        GrpcCall(1, INFO, b"x" * 300)
    ]


def test_settings_pings_and_window_updates_in_mid_stream_are_answered_and_change_nothing() -> None:
    body = framed(b"hello")
    server, heard = spoken(
        headers(header_block()),
        DataFrame(1, data=body[:4]),
        SettingsFrame(0, settings={1: 0, 4: 100, 5: 20_000}),
        PingFrame(0, opaque_data=b"12345678"),
        WindowUpdateFrame(0, window_increment=5),
        DataFrame(1, data=body[4:], flags=["END_STREAM"]),
    )
    assert heard == HELLO
    frames = frames_of(server)
    assert sum(isinstance(frame, SettingsFrame) and "ACK" in frame.flags for frame in frames) == 2
    assert [frame.opaque_data for frame in frames if isinstance(frame, PingFrame)] == [b"12345678"]


def test_empty_data_frames_are_allowed() -> None:
    empty = DataFrame(1)
    assert (
        spoken(
            *whole_call()[:1],
            empty,
            DataFrame(1, data=framed(b"hello")),
            empty,
            DataFrame(1, flags=["END_STREAM"]),
        )[1]
        == HELLO
    )


def test_trailers_after_the_message_end_the_call_too() -> None:
    block = Encoder().encode([("x-checksum", "1")])
    body, trailers = DataFrame(1, data=framed(b"hello")), headers(block, "END_STREAM")
    assert spoken(headers(header_block()), body, trailers)[1] == HELLO


def test_a_caller_that_resets_its_stream_is_not_answered() -> None:
    server, heard = spoken(*whole_call(), RstStreamFrame(1, error_code=8))
    assert heard == [*HELLO, Cancelled(1)]
    server.output()
    server.reply(1, b"late")
    server.fail(1, GrpcStatus.INTERNAL, "late")
    assert server.output() == b""
    assert not server.closed


def test_a_reset_in_the_middle_of_an_answer_drops_the_rest_of_it() -> None:
    caller, server = Caller(), GrpcConnection()
    caller.acknowledge = False
    stream = caller.call(INFO, b"x" * 200_000)
    pump(caller, server)
    caller.http.reset_stream(stream, 8)
    pump(caller, server)
    caller.acknowledge = True
    caller.http.increment_flow_control_window(65_535)
    second = caller.call(INFO, b"still here")
    pump(caller, server)
    assert caller.answers[second].message == b"still here"


def test_goaway_ends_the_connection() -> None:
    server, heard = spoken(*whole_call(), GoAwayFrame(0, last_stream_id=0, error_code=0))
    assert heard == HELLO
    assert server.closed
    server.reply(1, b"nobody reads this")
    assert server.receive(b"more") == []


@pytest.mark.parametrize(
    ("changed", "status", "sentence"),
    [
        (
            {"grpc_encoding": "gzip"},
            GrpcStatus.UNIMPLEMENTED,
            "compression 'gzip' is not supported; use identity",
        ),
        ({"grpc_encoding": "identity"}, None, ""),
        ({"content_type": "application/grpc+proto"}, None, ""),
    ],
)
def test_compressed_calls_are_refused(
    changed: dict[str, str], status: GrpcStatus | None, sentence: str
) -> None:
    server, heard = spoken(headers(header_block(**changed)), whole_call()[1])
    answer = answer_of(server)
    assert heard == ([] if status else HELLO)
    assert answer.status == status
    assert sentence in answer.sentence


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        (b"\1" + framed(b"hello")[1:], GrpcStatus.UNIMPLEMENTED, "compressed messages are not supported"),
        (b"\7" + framed(b"hello")[1:], GrpcStatus.UNIMPLEMENTED, "compressed messages are not supported"),
        (
            b"\0\xff\xff\xff\xff",
            GrpcStatus.RESOURCE_EXHAUSTED,
            f"4294967295 bytes is above the limit of {MAX_MESSAGE_BYTES}",
        ),
        (framed(b"hello") + b"\0", GrpcStatus.UNIMPLEMENTED, "exactly one message"),
        (framed(b"hello")[:-1], GrpcStatus.INTERNAL, "ended before its message was complete"),
        (b"\0\0\0", GrpcStatus.INTERNAL, "ended before its message was complete"),
        (b"", GrpcStatus.INTERNAL, "ended before its message was complete"),
    ],
)
def test_a_broken_message_gets_a_status_and_the_connection_goes_on(
    body: bytes, status: GrpcStatus, sentence: str
) -> None:
    server, heard = spoken(headers(header_block()), DataFrame(1, data=body, flags=["END_STREAM"]))
    assert heard == []
    answer = answer_of(server)
    assert (answer.status, answer.ended) == (status, True)
    assert sentence in answer.sentence
    again = (
        headers(header_block(), stream=3).serialize()
        + DataFrame(3, data=framed(b"hello"), flags=["END_STREAM"]).serialize()
    )
    assert server.receive(again) == [GrpcCall(3, INFO, b"hello")]


def test_an_oversized_message_is_refused_at_its_first_bytes_and_the_caller_stopped() -> None:
    server, _ = spoken(headers(header_block()), DataFrame(1, data=b"\0\x7f\0\0\0"))
    answer = answer_of(server)
    assert (answer.status, answer.reset) == (GrpcStatus.RESOURCE_EXHAUSTED, 0)
    on_its_way = DataFrame(1, data=b"x" * 16_000).serialize()
    assert server.receive(on_its_way * 3) == []
    assert not server.closed
    fresh = (
        headers(header_block(), stream=3).serialize()
        + DataFrame(3, data=framed(b""), flags=["END_STREAM"]).serialize()
    )
    assert server.receive(fresh) == [GrpcCall(3, INFO, b"")]


@pytest.mark.parametrize(
    ("changed", "http_status"), [({"method": "GET"}, "405"), ({"content_type": "text/html"}, "415")]
)
def test_a_request_that_is_not_grpc_gets_an_http_status(changed: dict[str, str], http_status: str) -> None:
    server, heard = spoken(headers(header_block(**changed), "END_STREAM"))
    assert heard == []
    assert answer_of(server).headers[":status"] == http_status


def test_error_messages_with_any_characters_reach_the_client() -> None:
    caller, server = Caller(), GrpcConnection()
    stream = caller.call(INFO, b"")
    pump(caller, server, echo=False)
    server.fail(stream, GrpcStatus.FAILED_PRECONDITION, "100% füll\nof ☃")
    pump(caller, server)
    assert caller.answers[stream].status == GrpcStatus.FAILED_PRECONDITION
    assert caller.answers[stream].sentence == "100% füll\nof ☃"


# Fuzz.


@given(
    cuts=st.lists(st.integers(0, 60_000), max_size=40),
    sizes=st.lists(st.integers(0, 30_000), min_size=1, max_size=4),
)
def test_the_bytes_may_be_cut_anywhere(cuts: list[int], sizes: list[int]) -> None:
    caller, server = Caller(), GrpcConnection()
    messages = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    for message in messages:
        caller.call(INFO, message)
    heard: list[GrpcCall | Cancelled] = []
    while sent := caller.http.data_to_send():
        edges = sorted({0, len(sent), *(cut for cut in cuts if cut < len(sent))})
        for start, end in itertools.pairwise(edges):
            heard += server.receive(sent[start:end])
        caller.receive(server.output())
    assert sorted(call.message for call in heard if isinstance(call, GrpcCall)) == sorted(messages)


streams = st.sampled_from([0, 1, 1, 1, 2, 3, 5])
frames = st.one_of(
    st.builds(
        lambda stream, data, flags: DataFrame(stream or 1, data=data, flags=flags),
        streams,
        st.binary(max_size=30),
        st.lists(st.sampled_from(["END_STREAM"]), max_size=1),
    ),
    st.builds(
        lambda stream, flags: headers(header_block(), *flags, stream=stream or 1),
        streams,
        st.lists(st.just("END_STREAM"), max_size=1),
    ),
    st.builds(
        lambda stream, data: HeadersFrame(stream or 1, data=data, flags=["END_HEADERS"]),
        streams,
        st.binary(max_size=30),
    ),
    st.builds(
        lambda stream, data, flags: ContinuationFrame(stream or 1, data=data, flags=flags),
        streams,
        st.binary(max_size=20),
        st.lists(st.just("END_HEADERS"), max_size=1),
    ),
    st.builds(lambda stream, code: RstStreamFrame(stream or 1, error_code=code), streams, st.integers(0, 20)),
    st.builds(
        lambda settings: SettingsFrame(0, settings=settings),
        st.dictionaries(st.integers(1, 8), st.integers(0, 2**32 - 1), max_size=3),
    ),
    st.builds(
        lambda stream, more: WindowUpdateFrame(stream, window_increment=more),
        streams,
        st.integers(1, 2**31 - 1),
    ),
    st.builds(lambda data: PingFrame(0, opaque_data=data), st.binary(min_size=8, max_size=8)),
    st.builds(lambda code: GoAwayFrame(0, last_stream_id=1, error_code=code), st.integers(0, 20)),
)


@given(st.lists(frames, max_size=12), st.binary(max_size=20))
def test_any_frames_in_any_order_leave_a_server_that_answers_or_has_closed(
    sent: list[Frame], junk: bytes
) -> None:
    server, heard = spoken(*whole_call(b"first"), *sent, junk)
    for call in heard:
        if isinstance(call, GrpcCall):
            server.reply(call.stream, call.message * 1000)
    server.output()
    if not server.closed:
        server.receive(b"\0" * 9)
        server.output()


@given(st.binary(max_size=200))
def test_bytes_that_are_not_http2_close_the_connection_quietly(junk: bytes) -> None:
    server = GrpcConnection()
    assert server.receive(junk) == []
    assert server.closed or len(junk) < len(PREFACE)
    with contextlib.suppress(ProtocolError):
        server.output()
