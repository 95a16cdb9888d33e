"""Placements are read from every form that kvplace and kubectl print, or refused in one sentence."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvplace.cli.claims_by_node import NodeClaims, read_placements
from kvplace.cli.map_command import read_found
from kvplace.core.cpuset import format_cpu_list
from kvplace.core.errors import BadBody
from kvplace.core.ledger import Ledger, LedgerChange, merge_patch
from kvplace.core.placement import PodPlacement
from kvplace.core.request import PinningOptions, Request, Scope, Smt
from kvplace.core.scalars import NodeName, PodUid
from kvplace.core.well_known_names import PLACEMENT
from tests.cli.calls import Caller
from tests.cli.placed import MACHINE, NAME, answer, lines, placement, pod
from tests.core.example_ledgers import with_vm
from tests.core.invalid_input import DEEP_OR_LONG, answer_or_sentence, disturbed, json_values


def read(text: str, tmp_path: Path) -> NodeClaims:
    file = tmp_path / "placements"
    file.write_text(text, encoding="utf-8")
    return read_placements(str(file), NAME, MACHINE.fingerprint)


def held(claims: NodeClaims) -> dict[str, str]:
    return {claim.vmi or claim.pod: format_cpu_list(claim.cpus) for claim in claims.ledger.claims.values()}


def test_answers_of_place_are_read_with_their_releases(kvplace: Caller, tmp_path: Path) -> None:
    requests = lines(
        {"id": "db", "vcpus": 4},
        {"id": "web", "vcpus": 2, "smt": "isolate"},
        {"id": "huge", "vcpus": 4000},
        {"release": "db"},
        {"id": "ci", "vcpus": 4, "policy": "share"},
        {"vcpus": 2},
        "junk",
    )
    answers = kvplace("place", "--topology", NAME, "--keep", "-o", "json", stdin=requests).out
    claims = read(answers, tmp_path)
    assert list(held(claims)) == ["web", "ci", "request-6"]
    web = claims.ledger.claims[PodUid("web")]
    assert (web.cpus.bit_count(), web.owned.bit_count()) == (2, 4)
    assert claims.ledger.claims[PodUid("ci")].owned == 0
    assert claims.notes == ()
    claims.ledger.check()


@given(st.lists(st.sampled_from(["db", "web", "ci", "-db", "-web"]), min_size=1, max_size=12))
def test_after_any_answers_of_place_the_claims_are_those_of_place(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str]
) -> None:
    ledger, answers = Ledger(), []
    for step in steps:
        if step.startswith("-"):
            ledger = ledger.after(LedgerChange(releases=(PodUid(f"uid-{step[1:]}"),)))
            answers.append({"released": step[1:], "cpus": ""})
        elif f"uid-{step}" not in ledger.claims:
            ledger = with_vm(
                MACHINE, ledger, step, Request(3, PinningOptions(scope=Scope.ANY, smt=Smt.ISOLATE))
            )
            claim = ledger.claims[PodUid(f"uid-{step}")]
            document = answer(step, *range(64))["placement"]
            document |= {"cpus": format_cpu_list(claim.cpus), "owned": format_cpu_list(claim.owned)}
            answers.append({"id": step, "placement": document | {"vcpus": [min_of(claim.cpus)]}})
    claims = read(lines(*answers), tmp_path_factory.mktemp("answers"))
    assert {f"uid-{uid}": (claim.cpus, claim.owned) for uid, claim in claims.ledger.claims.items()} == {
        uid: (claim.cpus, claim.owned) for uid, claim in ledger.claims.items()
    }
    claims.ledger.check()


def min_of(cpus: int) -> int:
    return (cpus & -cpus).bit_length() - 1


def test_a_vm_that_was_moved_to_make_room_is_where_it_went(tmp_path: Path) -> None:
    moved = answer("big", 4, 5) | {"moves": [{"from": "4-5", "to": "34-35"} | answer("db", 34, 35)]}
    claims = read(lines(answer("db", 4, 5), moved), tmp_path)
    assert held(claims) == {"db": "34-35", "big": "4-5"}
    claims.ledger.check()


def test_a_release_or_move_of_a_vm_that_was_not_placed_gets_a_note(tmp_path: Path) -> None:
    moved = answer("big", 4) | {"moves": [{"from": "4-5", "to": "34-35"} | answer("no", 34, 35)]}
    claims = read(lines({"released": "nobody", "cpus": ""}, moved), tmp_path)
    assert claims.notes == (
        "line 1: 'nobody' is released but was not placed",
        "line 2: 'no' is moved but was not placed",
    )


def test_an_id_that_is_placed_twice_is_drawn_twice(tmp_path: Path) -> None:
    claims = read(lines(answer("db", 4), answer("db", 5)), tmp_path)
    assert held(claims) == {"db": "4", "db (line 2)": "5"}
    assert claims.notes == ("line 2: 'db' is placed again without a release; both are drawn",)


@pytest.mark.parametrize("dump", [yaml.safe_dump, json.dumps], ids=["yaml", "json"])
def test_the_ledger_of_the_node_is_found_in_a_list(dump: Any, tmp_path: Path) -> None:
    ledger = with_vm(MACHINE, Ledger(), "db", Request(4))
    spec = merge_patch(Ledger(), LedgerChange(claims=tuple(ledger.claims.values())))
    mine, others = (
        {"kind": "NodeLedger", "metadata": {"name": name}, "spec": given}
        for name, given in ((NAME, spec), ("other", {}))
    )
    claims = read(dump({"kind": "List", "items": [others, mine]}), tmp_path)
    assert claims.ledger == ledger
    assert len(claims.notes) == 1
    assert "also describes 1 other node, not drawn" in claims.notes[0]
    asked = read_placements(str(tmp_path / "placements"), "worker-7", MACHINE.fingerprint, node=NAME)
    assert (asked.ledger, asked.notes) == (ledger, ())
    assert read(dump(mine), tmp_path).ledger == ledger
    elsewhere = read(dump(mine | {"metadata": {"name": "worker-7"}}), tmp_path)
    assert elsewhere.ledger == ledger
    assert "describes node worker-7, drawn on epyc-7502p" in elsewhere.notes[0]


def test_ledgers_of_other_nodes_alone_are_refused(tmp_path: Path) -> None:
    both = [{"kind": "NodeLedger", "metadata": {"name": name}, "spec": {}} for name in ("a", "b")]
    with pytest.raises(BadBody, match="describes the nodes a, b, none of them named epyc-7502p; choose"):
        read(json.dumps({"kind": "List", "items": both}), tmp_path)


def test_pods_are_read_by_their_annotations(tmp_path: Path) -> None:
    pods = [
        pod("db", 4, 5),
        pod("gone", 6, phase="Succeeded"),
        pod("away", 7, node="other"),
        pod("foreign-tool", **{"cpu-map": '{"socket0": ["8", "9"]}'}),
        pod("plain", unrelated="x"),
        pod(
            "floats",
            **{PLACEMENT: PodPlacement.floating(pod_uid=PodUid("uid-floats"), node=NodeName(NAME)).to_json()},
        ),
        pod("heir", **{PLACEMENT: placement((10,), uid="uid-of-another", node=NAME).to_json()}),
    ]
    claims = read(json.dumps({"kind": "PodList", "items": pods}), tmp_path)
    assert held(claims) == {"db": "4-5", "foreign-tool": "8-9"}
    assert claims.ledger.claims[PodUid("uid-foreign-tool")].owned == 0b11 << 8
    assert claims.notes[0] == (
        "items[6]: pod virt-launcher-heir carries the placement of another pod; it is left out"
    )
    assert claims.find("shop/db").uid == claims.find("virt-launcher-db").uid == "uid-db"


def test_a_vm_that_runs_unpinned_is_left_out_and_one_without_a_name_is_drawn(tmp_path: Path) -> None:
    floats = PodPlacement.floating(pod_uid=PodUid("u"), node=NodeName(NAME))
    text = lines(json.loads(floats.to_json()), answer("db", 4))
    assert held(read(text, tmp_path)) == {"db": "4"}
    assert held(read(placement((4,)).to_json(), tmp_path)) == {"unnamed": "4"}
    assert held(read(lines(answer("", 4)), tmp_path)) == {"unnamed": "4"}


def test_a_sentence_about_a_single_document_names_no_position(tmp_path: Path) -> None:
    claims = read(lines({"placed": [], "moves": [answer("db", 4)]}), tmp_path)
    assert claims.notes[0] == "'db' is moved but was not placed"
    with pytest.raises(BadBody, match=r"placements: is not a valid Pod: metadata: expected object, got int"):
        read('{"kind": "Pod", "metadata": 3}', tmp_path)


def test_annotations_alone_are_read_by_the_uid_of_their_pod(tmp_path: Path) -> None:
    text = "".join(placement(cpus, uid=f"u{cpus[0]}").to_json() + "\n" for cpus in ((4, 5), (6,)))
    assert held(read(text, tmp_path)) == {"u4": "4-5", "u6": "6"}


def test_placements_for_another_machine_get_a_note(tmp_path: Path) -> None:
    document = answer("db", 4)
    document["placement"]["topology"] = "sha256:0000"
    assert read(lines(document), tmp_path).notes == (
        f"{tmp_path / 'placements'} contains 1 placement made for a machine with another fingerprint",
    )


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_without_placements_no_free_machine_is_drawn(kvplace: Caller, tmp_path: Path, text: str) -> None:
    """An empty pipe is what is left of a command that failed."""
    called = kvplace("map", NAME, "--placements", "-", stdin=text)
    assert (called.code, called.out) == (2, "")
    assert called.err.startswith(
        "kvplace: <stdin> contains no placements; give answers of `kvplace place --keep -o json`, a plan"
    )
    file = tmp_path / "empty"
    file.write_text(text)
    called = kvplace("map", NAME, "--placements", str(file))
    assert (called.code, called.out) == (2, "")
    assert called.err.startswith(f"kvplace: {file} contains no placements; give ")


@pytest.mark.parametrize(
    "document",
    [
        {"kind": "List", "items": []},
        {"kind": "PodList", "items": [pod("db", 4, phase="Succeeded")]},
        {"placed": [], "running": [], "moves": []},
        {"id": "db", "refusal": {"reason": "NoSocketFits"}},
        {"kind": "NodeLedger", "metadata": {"name": NAME}, "spec": {}},
    ],
)
def test_a_document_without_any_vm_is_drawn_and_stated_to_have_none(
    kvplace: Caller, document: dict[str, Any]
) -> None:
    called = kvplace("map", NAME, "--placements", "-", stdin=json.dumps(document))
    assert (called.code, called.err) == (0, "kvplace: <stdin> contains no VM on this machine\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "contains a list; it must be a mapping"),
        ("{", "JSON"),
        ("a: [", "is not valid YAML"),
        ("{}", "this is not a known form of placements; give answers of `kvplace place --keep -o json`"),
        ("db: CPUs 2,34 (socket 0)", "this is not a known form of placements"),
        ("spec: {claims: {u: {pod: x}}}", "the claim of pod u cannot be read"),
        ("spec: 3", "owners or claims"),
        ("kind: NodeLedger\nspec: {claimz: {}}", ": spec: 'claimz' is not known; did you mean 'claims'?"),
        (
            "apiVersion: kvplace.io/v9\nspec: {}",
            ": apiVersion is 'kvplace.io/v9'; it must",
        ),
        ('{"kind":"List","items":[3]}', ": items[0]: must be a mapping, not a number"),
        ('{"kind":"List","items":3}', ": items must be a list, not a number"),
        ('{"kind":"Pod","metadata":3}', ": is not a valid Pod: metadata: expected object, got int"),
        (lines(answer("db", 4)) + "junk\n", "line 2 is"),
        (lines(answer("db", 4)) + '{"id": 1, "id": 2}\n', ": line 2: "),
        (lines(answer("db", 4)) + "3\n", "line 2 must be a JSON object, not a number"),
        (lines(answer("db", 4), {"placement": 3}), ": line 2: placement must be a mapping, not a number"),
        (lines(answer("db", 4), {"placement": {}}), "line 2: the placement has version null"),
        (lines(answer("db", 4)["placement"] | {"podUid": ["x" * 60_000]}), "the placement podUid is ['xxx"),
        (lines(answer("db", 4), {"moves": 3}), ": line 2: moves must be a list, not a number"),
        (lines({"placed": 3}), ": placed must be a list, not a number"),
        (lines({"placed": [], "running": None}), ": running must be a list, not null"),
        (lines({"placed": [answer("db", 4), {"id": "web"}]}), ": placed[1]: placement must be a mapping"),
        (lines({}, {"placed": [3]}), "line 1: this is not a known form of placements"),
        (lines({"released": "x"}, {"placed": [3]}), ": line 2 placed[0]: must be a mapping, not a number"),
        (lines({"moves": [{"id": "db", "to": "4"}]}), ": moves[0]: placement must be a mapping, not null"),
        (lines(pod("x", **{"cpu-map": "{}"})), "the cpu-map names no CPU"),
    ],
)
def test_an_invalid_document_is_refused_in_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(BadBody) as error:
        read(text, tmp_path)
    assert words in str(error.value)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


def test_bytes_that_are_not_utf_8_are_refused(kvplace: Caller) -> None:
    called = kvplace("map", NAME, "--placements", "-", stdin=b"\xff\xfe\0")
    assert called.code == 2
    assert called.err.startswith("kvplace: <stdin> is not valid UTF-8: it is UTF-16")


LEDGER = {
    "kind": "NodeLedger",
    "spec": merge_patch(
        Ledger(), LedgerChange(claims=tuple(with_vm(MACHINE, Ledger(), "db", Request(2)).claims.values()))
    ),
}
MOVED = {"moves": [{"from": "1", "to": "2"} | answer("a", 2)]}
PLAN = {"running": [answer("a", 1)], "placed": [answer("db", 4, 5)], **MOVED}
DOCUMENTS = (answer("db", 4, 5) | MOVED, pod("db", 4), LEDGER, PLAN)


@given(st.lists(st.one_of(*map(disturbed, DOCUMENTS)) | json_values, min_size=1, max_size=3), st.booleans())
def test_whatever_is_read_can_be_drawn_or_is_refused_in_one_sentence(
    documents: list[Any], listed: bool
) -> None:
    text = json.dumps({"kind": "List", "items": documents}) if listed else lines(*documents)
    _drawn_or_refused(text.encode())


@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "replace")))
def test_junk_is_one_sentence_or_nothing(content: bytes) -> None:
    _drawn_or_refused(content)


@pytest.mark.parametrize("text", DEEP_OR_LONG)
def test_deep_and_long_documents_are_one_sentence(text: str) -> None:
    for content in (text, f"{{}}\n{text}", f"- {text}"):
        _drawn_or_refused(content.encode())


def _drawn_or_refused(content: bytes) -> None:
    from kvplace.core.drawing.core_map import draw
    from kvplace.core.drawing.core_map_json import core_map_document
    from kvplace.core.drawing.svg_map import svg_map

    before, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(content))
    try:
        claims, _ = answer_or_sentence(
            lambda source: read_placements(source, NAME, MACHINE.fingerprint), "-", BadBody
        )
    finally:
        sys.stdin = before
    if claims is None:
        return
    drawing = draw(NAME, MACHINE, claims.ledger)
    assert svg_map(drawing)
    assert json.dumps(core_map_document(drawing))


def test_where_threads_were_found_is_read_by_any_name_of_the_vm(tmp_path: Path) -> None:
    claims = read(json.dumps({"kind": "List", "items": [pod("db", 4), pod("a=b", 5)]}), tmp_path)
    assert read_found(["db=4-5", "shop/db=9", "uid-a=b=7"], claims) == {
        "uid-db": 0b1000110000,
        "uid-a=b": 1 << 7,
    }
    twins = [pod("db", 4), pod("db", 5) | {"metadata": pod("db", 5)["metadata"] | {"uid": "uid-new"}}]
    twins[1]["metadata"]["annotations"] = {PLACEMENT: placement((5,), uid="uid-new", node=NAME).to_json()}
    with pytest.raises(
        BadBody, match="'db' is the name of several VMs; give one of the UIDs uid-db, uid-new"
    ):
        read_found(["db=4"], read(json.dumps({"kind": "List", "items": twins}), tmp_path))
    with pytest.raises(BadBody, match="did you mean 'db'"):
        read_found(["dbb=4"], claims)


@given(st.text(max_size=20))
def test_any_text_for_found_is_read_or_one_sentence(text: str) -> None:
    claims = NodeClaims(with_vm(MACHINE, Ledger(), "db", Request(2)))
    for given_text in (text, f"db={text}", f"{text}=4"):
        answer_or_sentence(lambda text: read_found([text], claims), given_text, BadBody)
