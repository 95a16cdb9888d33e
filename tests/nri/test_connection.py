"""Frames: every message arrives whole however it is cut, and nothing else is taken for one."""

from __future__ import annotations

from contextlib import suppress
from struct import pack, unpack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.nri.connection import (
    MAX_MESSAGE_BYTES,
    Channel,
    FrameReader,
    Message,
    MessageType,
    write_message,
)
from kvplace.nri.messages import BadPeer
from tests.nri import wire

messages = st.builds(
    Message,
    st.sampled_from(Channel),
    st.integers(0, 2**32 - 1),
    st.sampled_from(MessageType),
    st.binary(max_size=9000),
)


def _sizes_of(written: bytes) -> list[int]:
    sizes = []
    while written:
        _, size = unpack(">II", written[:8])
        sizes.append(size)
        written = written[8 + size :]
    return sizes


@given(st.lists(messages, max_size=6), st.lists(st.integers(1, 5000)))
def test_messages_are_read_as_they_were_written_however_the_stream_is_cut(
    sent: list[Message], pieces: list[int]
) -> None:
    stream = b"".join(map(write_message, sent))
    reader = FrameReader()
    received: list[Message] = []
    for size in pieces:
        received += reader.receive(stream[:size])
        stream = stream[size:]
    received += reader.receive(stream)
    assert received == sent


@given(messages)
def test_no_frame_is_longer_than_one_read_of_a_runtime(message: Message) -> None:
    sizes = _sizes_of(write_message(message))
    assert max(sizes) <= 4096
    assert sum(sizes) == 10 + len(message.body)


def test_a_message_may_come_in_one_frame_of_4_mib_or_in_frames_of_a_byte() -> None:
    body = b"x" * MAX_MESSAGE_BYTES
    assert list(FrameReader().receive(wire.frames(1, wire.ttrpc(1, 1, body)))) == [
        Message(Channel.PLUGIN, 1, MessageType.REQUEST, body)
    ]
    small = wire.frames(2, wire.ttrpc(3, 2, b"abc"), sizes=[1] * 12)
    assert [message.body for message in FrameReader().receive(small)] == [b"abc"]


def test_messages_of_the_two_channels_may_be_interleaved() -> None:
    first, second = wire.ttrpc(1, 1, b"plugin"), wire.ttrpc(1, 2, b"runtime")
    stream = wire.frames(1, first[:7]) + wire.frames(2, second[:12])
    stream += wire.frames(1, first[7:]) + wire.frames(2, second[12:])
    assert [message.body for message in FrameReader().receive(stream)] == [b"plugin", b"runtime"]


def test_frames_of_other_connections_are_skipped_as_nri_itself_does() -> None:
    stream = wire.frames(7, b"what is this") + wire.frames(1, wire.ttrpc(1, 1, b"call"))
    assert [message.body for message in FrameReader().receive(stream)] == [b"call"]


@pytest.mark.parametrize(
    ("junk", "sentence"),
    [
        (pack(">II", 1, MAX_MESSAGE_BYTES + 11), "frame of 4194315 bytes"),
        (b"HTTP/1.1 400 Bad Request\r\n", "frame of 791752241 bytes"),
        (wire.frames(1, pack(">IIBB", MAX_MESSAGE_BYTES + 1, 1, 1, 0)), "message of 4194305 bytes"),
        (wire.frames(1, wire.ttrpc(1, 3, b"")), "message of type 3"),
    ],
)
def test_bytes_that_are_not_nri_are_refused_before_they_are_stored(junk: bytes, sentence: str) -> None:
    with pytest.raises(BadPeer, match=sentence):
        list(FrameReader().receive(junk))


@given(st.binary(max_size=300))
def test_any_bytes_give_messages_or_a_refusal(junk: bytes) -> None:
    with suppress(BadPeer):
        assert all(message.type in MessageType for message in FrameReader().receive(junk))


def test_a_message_above_the_limit_is_not_sent() -> None:
    with pytest.raises(ValueError, match="longer than 4194304"):
        write_message(Message(Channel.PLUGIN, 1, MessageType.RESPONSE, bytes(MAX_MESSAGE_BYTES + 1)))
