"""`kvplace place` answers requests line by line, as documented for other programs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.cli.place_session import AnswerKind, PlaceSession
from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.placement import PodPlacement
from kvplace.machines.machine import Machine
from kvplace.machines.server_types import machine_names, read_machine
from tests.cli.calls import COMMAND, Caller, on_a_terminal

MACHINE = read_machine("2x-epyc-9354")


def _ask(session: PlaceSession, **request: Any) -> dict[str, Any]:
    return session.answer(json.dumps(request)).document


def _session(**settings: Any) -> PlaceSession:
    return PlaceSession(Machine("node", MACHINE), **settings)


def test_a_placement_names_vcpus_sockets_numa_nodes_and_l3_caches(kvplace: Caller) -> None:
    called = kvplace(
        "place", "--topology", "2x-epyc-9354", "-o", "json", stdin='{"vcpus": 8, "memory": "8Gi"}\n'
    )
    assert called.code == 0
    placement = json.loads(called.out)["placement"]
    assert placement["vcpus"] == [4, 68, 5, 69, 6, 70, 7, 71]
    assert placement["cpus"] == placement["owned"] == "4-7,68-71"
    assert (placement["sockets"], placement["numaNodes"], placement["l3"]) == ([0], [0], [1])
    assert placement["cpuMap"] == {"socket0": ["4", "68", "5", "69", "6", "70", "7", "71"]}
    assert placement["memory"] == {"0": 8 << 30}


def test_a_placement_is_also_the_annotation_that_the_hook_reads() -> None:
    document = _ask(_session(), id="db", vcpus=4, smt="require")["placement"]
    read = PodPlacement.from_json(json.dumps(document))
    assert (read.pod_uid, read.node, read.topology) == ("db", "node", MACHINE.fingerprint)
    assert list(read.placement.vcpus) == document["vcpus"]


def test_a_refusal_names_the_reason_and_the_numbers(kvplace: Caller) -> None:
    called = kvplace(
        "place", "--topology", "2x-epyc-9354", "-o", "json", stdin='{"vcpus":61,"cpuSet":"one-numa"}'
    )
    assert called.code == 3
    refusal = json.loads(called.out)["refusal"]
    suggestions = refusal.pop("suggestions")
    assert refusal == {
        "reason": "NoNumaNodeFits",
        "message": "no NUMA node with 61 free CPUs, best 60 on numa 0",
        "shortfall": {"needed": 61, "best": 60, "missing": 1, "where": "numa 0"},
        "never": True,
    }
    assert suggestions[-1] == {
        "change": "vcpus",
        "value": 60,
        "message": "with 60 vCPUs it fits on NUMA node 0",
    }


def test_a_table_has_one_sentence_for_each_request(kvplace: Caller) -> None:
    called = kvplace("place", "--topology", "epyc-7502p", stdin='{"id":"a","vcpus":2}\n\n{"vcpus":99}\n')
    assert called.out == (
        "a: CPUs 2,34 (socket 0, NUMA node 0, L3 0)\n"
        "request-3: no socket with 99 free CPUs, best 60 on socket 0; with 60 vCPUs it fits on socket 0\n"
    )
    assert called.code == 4


def test_each_answer_comes_before_the_next_request_is_written() -> None:
    with subprocess.Popen(
        [*COMMAND, "place", "--topology", "epyc-7502p", "--keep", "-o", "json"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        given: list[dict[str, Any]] = []
        for request in (
            '{"id":"a","vcpus":60}',
            '{"id":"b","vcpus":1}',
            '{"release":"a"}',
            '{"id":"b","vcpus":1}',
        ):
            process.stdin.write(request + "\n")
            process.stdin.flush()
            given.append(json.loads(process.stdout.readline()))
        process.stdin.close()
        assert process.wait() == 4
    assert [next(key for key in answer if key != "id") for answer in given] == [
        "placement",
        "refusal",
        "released",
        "placement",
    ]
    assert given[2] == {"released": "a", "cpus": given[0]["placement"]["owned"]}


def test_without_keep_every_request_finds_the_machine_as_it_was() -> None:
    session = _session()
    assert _ask(session, vcpus=60) == _ask(session, vcpus=60)
    assert "nothing is kept" in _ask(session, release="a")["error"]


def test_free_cpus_are_those_of_the_line_or_the_option_without_kept_ones() -> None:
    session = _session(free=parse_cpu_list("8-11,72-75"), keep=True)
    assert _ask(session, id="a", vcpus=4)["placement"]["cpus"] == "8-9,72-73"
    assert _ask(session, id="b", vcpus=4)["placement"]["cpus"] == "10-11,74-75"
    assert _ask(session, id="c", vcpus=1)["refusal"]["reason"] == "NoSocketFits"
    assert _ask(session, id="d", vcpus=2, free="11-12,75-76")["placement"]["cpus"] == "12,76"
    assert "no CPU 128" in _ask(session, vcpus=1, free="127-128")["error"]


def test_cpus_of_the_kubelet_are_never_free() -> None:
    held = Machine("node", MACHINE, kubelet_cpus=parse_cpu_list("8-9"))
    session = PlaceSession(held, keep=True)
    assert _ask(session, vcpus=3, free="8-11")["refusal"]["shortfall"]["best"] == 2
    assert _ask(session, vcpus=2, free="8-11")["placement"]["cpus"] == "10-11"


@pytest.mark.parametrize("options", [(), ("--keep", "--make-room")])
def test_memory_that_an_agent_has_measured_is_not_free(
    kvplace: Caller, tmp_path: Path, options: tuple[str, ...]
) -> None:
    document = json.loads(kvplace("topology", "2x-epyc-9354", "-o", "json").out)
    document["status"] = {"kubeletCpus": "1", "inUse": {"0": {"memory": "380Gi", "hugePages": {}}}}
    (tmp_path / "saved.json").write_text(json.dumps(document))
    printed = kvplace("topology", str(tmp_path / "saved.json"), "-o", "json").out
    assert json.loads(printed)["status"] == document["status"]
    (tmp_path / "printed.json").write_text(printed)
    requests = [{"id": name, "vcpus": 2, "cpuSet": "one-numa", "memory": "60Gi"} for name in "abcd"]
    stdin = "".join(json.dumps(request) + "\n" for request in requests)
    called = kvplace(
        "place", "--topology", str(tmp_path / "printed.json"), *options, "-o", "json", stdin=stdin
    )
    answers = [json.loads(line) for line in called.out.splitlines()]
    assert [answer["placement"]["numaNodes"] for answer in answers[:3]] == [[1]] * 3
    assert ("placement" in answers[3]) == (not options)


def test_the_placement_repeats_on_failure() -> None:
    session = _session()
    assert _ask(session, vcpus=1)["placement"]["onFailure"] == "wait"
    assert _ask(session, vcpus=1, onFailure="float")["placement"]["onFailure"] == "float"


def test_huge_pages_are_counted_by_numa_node() -> None:
    session = _session(keep=True)
    request = {"vcpus": 2, "cpuSet": "one-numa", "memory": "100Gi", "hugepages": {"1Gi": 100}}
    first, second = (_ask(session, id=name, **request)["placement"]["numaNodes"] for name in "ab")
    assert sorted(first + second) == [0, 1]
    assert _ask(session, id="c", **request)["refusal"]["reason"] == "NotEnoughHugePages"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "the line is not valid JSON"),
        ("[1]", "must be a JSON object"),
        ("null", "must be a JSON object"),
        ("{}", "vcpus is missing; it must be a whole number from 1 to 4096"),
        ('{"vcpus": true}', "vcpus is true; it must be a whole number"),
        ('{"vcpus": 5000}', "it must be a whole number from 1 to 4096"),
        ('{"vcpus": 1.5}', "vcpus is 1.5"),
        ('{"vcpus": 1, "cpuset": "any"}', "'cpuset' is not known; did you mean 'cpuSet'?"),
        ('{"vcpus": 1, "cpuSet": "one-sock"}', "cpuSet is 'one-sock'; it must be one of one-socket"),
        ('{"vcpus": 1, "policy": "share", "smt": "isolate"}', "smt: 'isolate' contradicts policy: 'share': "),
        ('{"vcpus": 1, "policy": "none"}', "policy is 'none', which requests no CPUs"),
        ('{"vcpus": 1, "cpu-set": "0-3"}', "any; it names a scope, not CPUs: kvplace chooses the CPUs"),
        ('{"vcpus": 1, "cpuSet": 4}', "cpuSet is 4; it must be one of one-socket"),
        ('{"vcpus": 1, "smt": ["prefer"]}', "smt is ['prefer']; it must be one of"),
        ('{"vcpus": 1, "memory": "8 gigs"}', "memory: '8 gigs' is not a quantity"),
        ('{"vcpus": 1, "memory": -1}', "memory: -1 is negative"),
        ('{"vcpus": 1, "memory": "2Ei"}', "is more than 1Ei"),
        ('{"vcpus": 1, "hugepages": 8}', "hugepages is 8; it must be an object"),
        ('{"vcpus": 1, "hugepages": {"0": 8}}', "is not a page size"),
        ('{"vcpus": 1, "hugepages": {"1Gi": "8"}}', "hugepages['1Gi'] is '8'"),
        ('{"vcpus": 1, "free": 3}', "free is 3"),
        ('{"vcpus": 1, "free": "3-1"}', "runs backwards"),
        ('{"vcpus": 1, "id": ""}', "id must be a string"),
        ('{"release": "nobody"}', "id 'nobody' holds no CPUs"),
        ('{"release": "a", "vcpus": 3}', "'vcpus' is not known"),
        ("[" * 100_000, "the line is not valid JSON"),
    ],
)
def test_an_invalid_line_gets_an_error_and_the_next_one_is_answered(
    kvplace: Caller, line: str, words: str
) -> None:
    called = kvplace(
        "place", "--topology", "epyc-7502p", "--keep", "-o", "json", stdin=f'{line}\n{{"vcpus": 1}}\n'
    )
    wrong, right = (json.loads(answer) for answer in called.out.splitlines())
    assert words in wrong["error"]
    assert "placement" in right
    assert called.code == 2


def test_invalid_utf_8_and_endless_lines_get_an_error_and_the_next_line_is_answered(
    kvplace: Caller,
) -> None:
    called = kvplace(
        "place",
        "--topology",
        "epyc-7502p",
        "-o",
        "json",
        stdin=b'{"id":"\xff"}\n{"id": "' + b"x" * 3_000_000 + b'"}\n{"vcpus":1}\n',
    )
    no_text, too_long, right = map(json.loads, called.out.splitlines())
    assert no_text == {"line": 1, "error": "the line is not valid UTF-8: byte 0xff at position 8"}
    assert too_long == {
        "line": 2,
        "error": "the line is longer than 1048576 bytes; write one request per line",
    }
    assert "placement" in right
    assert called.code == 2


def test_an_id_that_holds_cpus_cannot_be_used_again() -> None:
    session = _session(keep=True)
    _ask(session, id="a", vcpus=1)
    assert _ask(session, id="a", vcpus=1) == {
        "id": "a",
        "error": "id 'a' holds CPUs already; release it first, or use another id",
    }


def test_a_request_without_an_id_is_named_by_its_line(kvplace: Caller) -> None:
    stdin = '\n{"release": "x"}\n{"vcpus": 2}\n{"vcpus": 0}\n{"release": "request-3"}\n'
    called = kvplace("place", "--topology", "epyc-7502p", "--keep", stdin=stdin)
    assert [line.partition(": ")[0] for line in called.out.splitlines()] == [
        "x",
        "request-3",
        "line 4",
        "request-3",
    ]
    answers = kvplace("place", "--topology", "epyc-7502p", "--keep", "-o", "json", stdin=stdin).out
    _, placed, invalid, released = map(json.loads, answers.splitlines())
    assert (placed["id"], placed["placement"]["podUid"]) == ("request-3", "request-3")
    assert invalid["line"] == 4
    assert released == {"released": "request-3", "cpus": "2,34"}


def test_an_answer_has_no_id_where_none_was_given_and_nothing_is_kept() -> None:
    assert list(_ask(_session(), vcpus=2)) == ["placement"]


@pytest.mark.parametrize("stdin", ["", "\n \n"])
def test_without_requests_there_are_no_answers_and_a_message_on_stderr(kvplace: Caller, stdin: str) -> None:
    called = kvplace("place", "--topology", "epyc-7502p", "-o", "json", stdin=stdin)
    assert (called.code, called.out) == (0, "")
    assert called.err == 'kvplace: <stdin> contains no requests; write one per line, such as {"vcpus": 8}\n'


def test_on_a_terminal_it_reports_that_it_waits_for_requests() -> None:
    seen = on_a_terminal("place", "--topology", "epyc-7502p", typed='{"vcpus": 2}\n')
    assert "kvplace: reading the requests from the terminal, one JSON object per line; Ctrl-D ends it" in seen
    assert "request-1: CPUs 2,34" in seen


_requests = st.fixed_dictionaries(
    {"vcpus": st.integers(1, 24)},
    optional={
        "cpuSet": st.sampled_from(["one-socket", "one-numa", "one-l3", "any"]),
        "smt": st.sampled_from(["prefer", "require", "isolate"]),
        "emulatorThreads": st.sampled_from(["shared", "isolate", "with-vcpus"]),
        "memory": st.sampled_from(["1Gi", "64Gi", 1 << 33]),
    },
)


@given(st.sampled_from(machine_names()), st.lists(st.tuples(_requests, st.booleans()), max_size=14))
def test_kept_cpus_have_one_owner_and_released_ones_come_back(
    name: str, requests: list[tuple[dict[str, Any], bool]]
) -> None:
    machine = read_machine(name)
    session = PlaceSession(Machine(name, machine), keep=True)
    held: dict[str, int] = {}
    for number, (request, leaves) in enumerate(requests):
        answer = session.answer(json.dumps({**request, "id": str(number)}))
        if answer.kind is AnswerKind.PLACED:
            owned = parse_cpu_list(answer.document["placement"]["owned"])
            assert not any(owned & others for others in held.values())
            assert not owned & machine.reserved
            held[str(number)] = owned
        if leaves and held:
            oldest = next(iter(held))
            assert session.answer(json.dumps({"release": oldest})).kind is AnswerKind.RELEASED
            del held[oldest]
    for name in held:
        session.answer(json.dumps({"release": name}))
    everything = session.answer(json.dumps({"vcpus": machine.allocatable.bit_count(), "cpuSet": "any"}))
    assert everything.kind is AnswerKind.PLACED
