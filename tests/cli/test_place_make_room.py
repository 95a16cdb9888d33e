"""`kvplace place --make-room` moves kept VMs, one safe step at a time, so that a new one fits well."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

from kvplace.cli.place_session import AnswerKind, PlaceSession
from kvplace.core.cpuset import cpus_of, mask_of, parse_cpu_list
from kvplace.core.placement import PodPlacement
from kvplace.core.scalars import Bytes, NumaId, PackageId
from kvplace.core.topology import Topology
from kvplace.machines.machine import Machine
from kvplace.machines.server_types import read_machine
from tests.cli.calls import Caller
from tests.core.machines import make_numa_node, make_package, make_topology

MACHINE = read_machine("2x-epyc-9354")  # two sockets of 60 CPUs to give out each


def _ask(session: PlaceSession, **request: Any) -> dict[str, Any]:
    return session.answer(json.dumps(request)).document


def _crowd(session: PlaceSession, small: Mapping[str, Any] = MappingProxyType({})) -> list[dict[str, Any]]:
    """Leave 12 CPUs free on each socket, between VMs of 8 and one of 40."""
    answers = []
    for name, vcpus, free in (
        ("big-0", 40, "4-23,68-87"),
        ("small-0", 8, "24-27,88-91"),
        ("big-1", 40, "36-55,100-119"),
        ("small-1", 8, "56-59,120-123"),
    ):
        request = {"vcpus": vcpus, **(small if name.startswith("small") else {})}
        answers.append(_ask(session, id=name, cpuSet="one-numa", memory="8Gi", free=free, **request))
        assert "placement" in answers[-1]
    return answers


def test_the_smallest_vm_moves_and_is_released_from_its_new_cpus() -> None:
    session = PlaceSession(Machine("node", MACHINE), keep=True, make_room=True)
    _crowd(session)
    answer = _ask(session, id="new", vcpus=20, cpuSet="one-numa", memory="8Gi")
    (move,) = answer["moves"]
    assert (move["id"], move["from"], move["bytes"]) == ("small-0", "24-27,88-91", 8 << 30)
    assert answer["placement"]["numaNodes"] == [0]
    released = _ask(session, release="small-0")
    assert released == {"released": "small-0", "cpus": move["to"]}
    assert parse_cpu_list(move["to"]) & ~MACHINE.numa_nodes[1].cpus == 0


def test_a_refusal_after_a_search_that_stopped_at_its_bound_reports_it() -> None:
    session = PlaceSession(Machine("node", MACHINE), keep=True, make_room=True, explain=False)
    _crowd(session)
    line = json.dumps({"id": "new", "vcpus": 20, "cpuSet": "one-numa", "memory": "8Gi"})
    with patch("kvplace.cli.place_session.MAX_STEPS", 10):
        answer = session.answer(line)
    stopped = "no moves found within 10 search steps; there may be some"
    assert answer.document["refusal"]["searchStopped"] == stopped
    assert answer.sentence.endswith(stopped)
    never = _ask(session, vcpus=70, cpuSet="one-numa")["refusal"]
    assert "searchStopped" not in never
    assert session.answer(line).kind is AnswerKind.PLACED


def test_a_move_has_the_whole_new_placement_and_map_draws_it(kvplace: Caller, tmp_path: Path) -> None:
    session = PlaceSession(Machine("2x-epyc-9354", MACHINE), keep=True, make_room=True)
    answers = [
        *_crowd(session, small={"vcpus": 4, "smt": "isolate"}),
        _ask(session, id="new", vcpus=20, cpuSet="one-numa", memory="8Gi"),
    ]
    (move,) = answers[-1]["moves"]
    after = PodPlacement.from_json(json.dumps(move["placement"]))
    assert (after.pod_uid, after.placement.numa_nodes, dict(after.placement.memory)) == (
        "small-0",
        (1,),
        {1: 8 << 30},
    )
    assert after.placement.owned == parse_cpu_list(move["to"])
    assert len(after.placement.vcpus) == after.placement.cpus.bit_count() == 4  # of 8 that it owns
    answers_file = tmp_path / "answers"
    answers_file.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    drawn = json.loads(kvplace("map", "2x-epyc-9354", "--placements", str(answers_file), "-o", "json").out)
    moved = next(vm for vm in drawn["legend"] if vm["pod"] == "small-0")
    assert (moved["cpus"], moved["owned"]) == (move["placement"]["cpus"], move["to"])
    assert drawn["faults"] == []


def test_a_move_names_the_vm_as_the_answer_to_it_did() -> None:
    session = PlaceSession(Machine("node", MACHINE), keep=True, make_room=True)
    kept = [
        session.answer(json.dumps({"cpuSet": "one-numa", "memory": "8Gi", **request}), number).document
        for number, request in enumerate(
            (
                {"vcpus": 40, "free": "4-23,68-87"},
                {"vcpus": 8, "free": "24-27,88-91"},
                {"vcpus": 40, "free": "36-55,100-119"},
                {"vcpus": 8, "free": "56-59,120-123"},
            ),
            start=1,
        )
    ]
    answer = session.answer('{"vcpus": 20, "cpuSet": "one-numa", "memory": "8Gi"}', 5).document
    (move,) = answer["moves"]
    assert move["id"] == kept[1]["id"] == move["placement"]["podUid"] == "request-2"


def test_moves_are_searched_once() -> None:
    session = PlaceSession(Machine("node", MACHINE), keep=True, make_room=True)
    _crowd(session)
    with patch("kvplace.core.moves.suggestions.make_room", side_effect=AssertionError("searched again")):
        refusal = _ask(session, vcpus=70, cpuSet="one-numa")["refusal"]
    assert [suggestion["change"] for suggestion in refusal["suggestions"]] == ["vcpus"]


def test_without_make_room_nothing_moves_and_the_refusal_suggests_the_move() -> None:
    session = PlaceSession(Machine("node", MACHINE), keep=True)
    _crowd(session)
    refusal = _ask(session, id="new", vcpus=20, cpuSet="one-numa", memory="8Gi")["refusal"]
    first = refusal["suggestions"][0]
    assert first["change"] == "moves"
    assert [(move["id"], move["from"]) for move in first["moves"]] == [("small-0", "24-27,88-91")]
    assert first["message"].startswith("move small-0 from 24-27,88-91 to ")
    assert "with 8Gi of memory, and it fits on NUMA node 0" in first["message"]
    assert [fix["change"] for fix in refusal["suggestions"]] == ["moves", "cpuSet", "vcpus"]


def test_a_vm_that_fits_well_moves_no_vm() -> None:
    session = PlaceSession(Machine("node", MACHINE), keep=True, make_room=True)
    _crowd(session)
    answer = _ask(session, vcpus=12, cpuSet="one-numa")
    assert answer["moves"] == []


def test_where_no_move_helps_the_vm_is_spread_or_refused() -> None:
    session = PlaceSession(Machine("node", MACHINE), keep=True, make_room=True)
    for name, free in (("a", "4-23,68-87"), ("b", "36-55,100-119")):
        answer = _ask(session, id=name, vcpus=40, policy="immovable", cpuSet="one-numa", free=free)
        assert "placement" in answer
    strewn = _ask(session, id="new", vcpus=30, cpuSet="any")
    assert (strewn["placement"]["numaNodes"], strewn["moves"]) == ([0, 1], [])
    assert "refusal" in _ask(session, vcpus=30, cpuSet="one-numa")


def test_make_room_needs_kept_vms(kvplace: Caller) -> None:
    called = kvplace("place", "--topology", "epyc-7502p", "--make-room", stdin="")
    assert called.code == 2
    assert "--keep" in called.err


def _small_machine() -> Topology:
    """Two sockets with two L3 caches each, of four cores with two threads: 32 CPUs."""
    cores = tuple(mask_of((core, core + 16)) for core in range(16))
    caches = tuple(
        mask_of(cpu for core in cores[first : first + 4] for cpu in cpus_of(core))
        for first in range(0, 16, 4)
    )
    sockets = (caches[0] | caches[1], caches[2] | caches[3])
    return make_topology(
        packages=tuple(make_package(PackageId(number), cpus) for number, cpus in enumerate(sockets)),
        numa_nodes=tuple(
            make_numa_node(NumaId(number), cpus, Bytes(64 << 30)) for number, cpus in enumerate(sockets)
        ),
        l3_groups=caches,
        cores=cores,
    )


def test_no_cpu_has_two_owners_while_vms_move() -> None:
    """A full machine gives some VMs back, and larger VMs come: most of them need moves."""
    machine = _small_machine()
    moves = 0
    for seed in range(30):
        chance = Random(seed)
        session = PlaceSession(Machine("node", machine), keep=True, make_room=True, explain=False)
        held: dict[str, int] = {}
        requests: dict[str, dict[str, Any]] = {}
        for number in range(28):
            if number > 14 and held:
                leaving = chance.choice(sorted(held))
                released = _ask(session, release=leaving)
                assert parse_cpu_list(released["cpus"]) == held.pop(leaving)
            uid = str(number)
            requests[uid] = {
                "vcpus": chance.choice((1, 2, 3) if number <= 14 else (4, 6, 8)),
                "cpuSet": chance.choice(("any", "one-l3", "one-numa")),
                "policy": chance.choice(("exclusive", "exclusive", "share", "immovable")),
                "memory": chance.choice(("1Gi", "8Gi")),
            }
            answer = session.answer(json.dumps({**requests[uid], "id": uid}))
            if answer.kind is not AnswerKind.PLACED:
                continue
            for move in answer.document["moves"]:
                moves += 1
                assert requests[move["id"]]["policy"] != "immovable"
                assert held.pop(move["id"]) == parse_cpu_list(move["from"])
                _take(held, requests, move["id"], parse_cpu_list(move["to"]))
            placement = answer.document["placement"]
            _take(held, requests, uid, parse_cpu_list(placement["cpus"]) | parse_cpu_list(placement["owned"]))
    assert moves >= 50


def _take(held: dict[str, int], requests: dict[str, dict[str, Any]], uid: str, cpus: int) -> None:
    """Give CPUs to a VM; only CPUs of sharing VMs may be held twice."""
    for other, theirs in held.items():
        if {requests[uid]["policy"], requests[other]["policy"]} & {"exclusive"}:
            assert not cpus & theirs
    held[uid] = cpus


def test_options_of_moves_need_the_options_that_they_depend_on(kvplace: Caller) -> None:
    for given_, sentence in (
        (["--make-room"], "--make-room moves the VMs that --keep has kept; give both"),
        (["--keep", "--thorough"], "--thorough is an option of --make-room; give both"),
    ):
        called = kvplace("place", "--topology", "2x-epyc-9354", *given_, stdin="")
        assert called.code == 2
        assert sentence in called.err
