"""Every line of `kvplace place` gets one answer, however invalid it is."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.cli.place_session import AnswerKind, PlaceSession
from kvplace.core.request_json import REQUEST_KEYS
from kvplace.machines.machine import Machine
from kvplace.machines.server_types import read_machine
from tests.cli.calls import Caller

MACHINE = read_machine("epyc-7502p")

_WORDS = (
    "any", "one-numa", "one-l3", "spread-numa", "exclusive", "numa", "none", "isolate", "mirror", "float",
    "0-3", "3-0", "0-99999999", "8Gi", "-1Gi", "1e9Gi", "8gb", "", "\ud800", "a\nb", "\0",
)  # fmt: skip
_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, 8, -1, 1_000_000, 1 << 63, 10**400])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(_WORDS),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*_WORDS, "1Gi", "2Mi"]), inner, max_size=3)
    ),
    max_leaves=6,
)
_keys = st.sampled_from([*REQUEST_KEYS, "id", "free", "release", "vCpus", ""])
_objects = st.dictionaries(_keys, _values, max_size=6) | st.dictionaries(_keys, _values, max_size=4).map(
    lambda request: {**request, "vcpus": 2}
)
_lines = (
    st.text()
    | st.binary()
    | _objects.map(json.dumps)
    | st.tuples(_objects.map(json.dumps), st.integers(0, 80)).map(lambda pair: pair[0][: pair[1]])
)


@given(st.lists(_lines, max_size=3), st.booleans())
def test_every_line_gets_an_answer_and_the_lines_after_it_too(
    lines: list[str | bytes], make_room: bool
) -> None:
    session = PlaceSession(Machine("node", MACHINE), keep=True, make_room=make_room)
    for line in lines:
        answer = session.answer(line)
        assert json.loads(json.dumps(answer.document)) == answer.document
        assert answer.sentence.isprintable()
        assert len(answer.sentence) < 1000
        assert (answer.kind is AnswerKind.INVALID) == ("error" in answer.document)
    fresh = session.answer('{"id": "the last one", "vcpus": 1, "cpuSet": "any", "policy": "share"}')
    assert fresh.kind in (AnswerKind.PLACED, AnswerKind.REFUSED)


@given(_lines, st.integers(1, 8))
def test_an_invalid_line_takes_nothing(line: str | bytes, vcpus: int) -> None:
    session, untouched = (PlaceSession(Machine("node", MACHINE), keep=True) for _ in range(2))
    if session.answer(line).kind in (AnswerKind.INVALID, AnswerKind.REFUSED):
        request = json.dumps({"id": "next", "vcpus": vcpus})
        assert session.answer(request) == untouched.answer(request)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"vcpus": 2, "vcpus": 3}', "duplicate key 'vcpus'"),
        ('{"vcpus": NaN}', "NaN is not a JSON number"),
        ('{"vcpus": 1000000}', "vcpus is 1000000; it must be a whole number from 1 to 4096"),
        ('{"vcpus": -3}', "vcpus is -3; it must be a whole number"),
        ('{"vcpus": 8, "memory": 32}', 'memory: 32 is 32 bytes; write "32Gi" if that is meant'),
        ('{"vcpus": 8, "memory": "500m"}', "memory: '500m' is less than a byte; write \"500Mi\" if"),
        ('{"vcpus": 8, "memory": "9Gi", "hugepages": {"2": 8}}', 'hugepages: 2 is 2 bytes; write "2Gi" if'),
        ('{"vcpus": 0}', "vcpus is 0; it must be a whole number"),
        ('{"vcpus": 1' + "0" * 5000 + "}", "the line: it contains a number of 5001 digits"),
        ('{"vcpus": 1' + "0" * 500 + "}", "it must be a whole number from 1 to 4096"),
        ('{"vcpus": 1, "memory": "' + "9" * 500 + 'Gi"}', "is not a quantity such as 8Gi"),
        ('{"vcpus": 1, "memory": "8GB"}', "memory: '8GB' is not a quantity such as 8Gi"),
        ('{"vcpus": 1, "id": "a\\nb"}', "must consist of printable characters"),
        ('{"vcpus": 1, "id": "\\ud800"}', "must consist of printable characters"),
        ('{"vcpus": 1, "' + "k" * 500 + '": 1}', "is not known; known are id, free, vcpus"),
        ('{"vcpus": 1, "hugepages": {"3Q": 1}}', "hugepages: '3Q' is not a quantity"),
        ('{"vcpus": 1, "hugepages": {"1Gi": 1, "1024Mi": 1}}', "has pages of 1Gi twice"),
        (
            '{"vcpus": 1, "hugepages": {"1Gi": 2}, "memory": "1Gi"}',
            "hugepages hold 2Gi, more than the 1Gi of",
        ),
        ('{"vcpus": null}', "vcpus is null; it must be"),
        ('["vcpus"]', "not a list"),
        ('{"a":' * 5_000, "it is nested too deeply"),
    ],
)
def test_an_error_names_the_mistake_and_is_short(line: str, words: str) -> None:
    answer = PlaceSession(Machine("node", MACHINE)).answer(line)
    assert answer.kind is AnswerKind.INVALID
    assert words in answer.document["error"]
    assert len(answer.document["error"]) < 400


def test_an_invalid_line_without_an_id_is_named_by_its_number(kvplace: Caller) -> None:
    stdin = '{"vcpus": 1}\n\n{"vcpus": 0}\n{"id": "db", "vcpus": 0}\n'
    shown = kvplace("place", "--topology", "epyc-7502p", stdin=stdin).out.splitlines()
    assert shown[1].startswith("line 3: vcpus is 0; it must be a whole number")
    assert shown[2].startswith("db: vcpus is 0; it must be a whole number")
    written = kvplace("place", "--topology", "epyc-7502p", "-o", "json", stdin=stdin).out.splitlines()
    assert [json.loads(line).get("line") for line in written] == [None, 3, None]


@pytest.mark.parametrize("memory", ["2Gi", "2048Mi", "1500Mi", 0])
def test_huge_pages_may_hold_the_memory_rounded_up_to_whole_pages(memory: str | int) -> None:
    line = json.dumps({"vcpus": 1, "memory": memory, "hugepages": {"1Gi": 2}})
    assert PlaceSession(Machine("node", MACHINE)).answer(line).kind is not AnswerKind.INVALID


def test_a_byte_order_mark_is_ignored() -> None:
    assert PlaceSession(Machine("node", MACHINE)).answer('\ufeff{"vcpus": 1}').kind is AnswerKind.PLACED


def test_the_exit_code_states_whether_all_some_or_none_were_placed(kvplace: Caller) -> None:
    refused, invalid, placed, released = (
        '{"vcpus": 61}\n',
        "{}\n",
        '{"id": "a", "vcpus": 1}\n',
        '{"release": "a"}\n',
    )
    for lines, code in (
        (placed, 0),
        (placed + released, 0),
        (refused, 3),
        (refused + refused, 3),
        (refused + placed, 4),
        (placed + refused + released, 4),
        (refused + invalid, 2),
        (invalid + placed, 2),
        (refused + placed + invalid, 2),
    ):
        called = kvplace("place", "--topology", "epyc-7502p", "--keep", stdin=lines)
        assert (called.code, called.out.count("\n")) == (code, lines.count("\n")), lines
        assert called.err == ""
