"""Who has which CPUs is read from every form in which it is written down, or refused in one sentence."""

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

from kvplace.cli.map_book import Book, read_found
from kvplace.cli.map_forms import read_book
from kvplace.core.cpuset import format_cpu_list, mask_of
from kvplace.core.errors import BadBody
from kvplace.core.ledger import Ledger, LedgerChange, merge_patch
from kvplace.core.placement import PLACEMENT, Placement, PodPlacement
from kvplace.core.request import NumaMemory, OnFailure, PinningOptions, Policy, Request, Scope, Smt
from kvplace.machines.shipped import read_machine
from tests.cli.calls import Caller
from tests.core.claims import with_vm
from tests.core.junk import DEEP_OR_LONG, answer_or_sentence, disturbed, json_values

NAME = "epyc-7502p"
MACHINE = read_machine(NAME)


def placement(
    cpus: tuple[int, ...], *, uid: str = "", node: str = "", policy: Policy = Policy.EXCLUSIVE
) -> PodPlacement:
    return PodPlacement(
        pod_uid=uid,
        node=node,
        topology="",
        on_failure=OnFailure.WAIT,
        placement=Placement(
            policy=policy,
            vcpus=cpus,
            cpus=mask_of(cpus),
            emulator_cpus=mask_of(cpus),
            io_thread_cpus=(),
            numa_nodes=(0,),
            numa_memory=NumaMemory.OFF,
            memory={},
            owned=mask_of(cpus) if policy is Policy.EXCLUSIVE else 0,
        ),
    )


def answer(uid: str, *cpus: int) -> dict[str, Any]:
    return {"id": uid, "placement": json.loads(placement(cpus).to_json())}


def pod(
    name: str, *cpus: int, node: str = NAME, phase: str = "Running", **annotations: str
) -> dict[str, Any]:
    uid = f"uid-{name}"
    return {
        "kind": "Pod",
        "metadata": {
            "name": f"virt-launcher-{name}",
            "namespace": "shop",
            "uid": uid,
            "annotations": annotations or {PLACEMENT: placement(cpus, uid=uid, node=node).to_json()},
            "ownerReferences": [{"kind": "VirtualMachineInstance", "name": name}],
        },
        "spec": {"nodeName": node},
        "status": {"phase": phase},
    }


def lines(*documents: object) -> str:
    return "".join(json.dumps(document) + "\n" for document in documents)


def read(text: str, tmp_path: Path) -> Book:
    file = tmp_path / "placements"
    file.write_text(text, encoding="utf-8")
    return read_book(str(file), NAME, MACHINE.fingerprint)


def held(book: Book) -> dict[str, str]:
    return {claim.vmi or claim.pod: format_cpu_list(claim.cpus) for claim in book.ledger.claims.values()}


def test_answers_of_place_are_read_with_their_releases(kvplace: Caller, tmp_path: Path) -> None:
    wishes = lines(
        {"id": "db", "vcpus": 4},
        {"id": "web", "vcpus": 2, "smt": "isolate"},
        {"id": "huge", "vcpus": 4000},
        {"release": "db"},
        {"id": "ci", "vcpus": 4, "policy": "share"},
        {"vcpus": 2},
        "junk",
    )
    answers = kvplace("place", "--topology", NAME, "--keep", "-o", "json", stdin=wishes).out
    book = read(answers, tmp_path)
    assert list(held(book)) == ["web", "ci", "line 6"]
    web = book.ledger.claims["web"]
    assert (web.cpus.bit_count(), web.owned.bit_count()) == (2, 4)
    assert book.ledger.claims["ci"].owned == 0
    assert book.notes == ()
    book.ledger.check()


@given(st.lists(st.sampled_from(["db", "web", "ci", "-db", "-web"]), max_size=12))
def test_after_any_answers_of_place_the_book_is_that_of_place(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str]
) -> None:
    ledger, answers = Ledger(), []
    for step in steps:
        if step.startswith("-"):
            ledger = ledger.after(LedgerChange(releases=(f"uid-{step[1:]}",)))
            answers.append({"released": step[1:], "cpus": ""})
        elif f"uid-{step}" not in ledger.claims:
            ledger = with_vm(
                MACHINE, ledger, step, Request(3, PinningOptions(scope=Scope.ANY, smt=Smt.ISOLATE))
            )
            claim = ledger.claims[f"uid-{step}"]
            document = answer(step, *range(64))["placement"]
            document |= {"cpus": format_cpu_list(claim.cpus), "owned": format_cpu_list(claim.owned)}
            answers.append({"id": step, "placement": document | {"vcpus": [min_of(claim.cpus)]}})
    book = read(lines(*answers), tmp_path_factory.mktemp("book"))
    assert {f"uid-{uid}": (claim.cpus, claim.owned) for uid, claim in book.ledger.claims.items()} == {
        uid: (claim.cpus, claim.owned) for uid, claim in ledger.claims.items()
    }
    book.ledger.check()


def min_of(cpus: int) -> int:
    return (cpus & -cpus).bit_length() - 1


def test_a_vm_that_was_moved_to_make_room_is_where_it_went(tmp_path: Path) -> None:
    moved = answer("big", 4, 5) | {"moves": [{"id": "db", "from": "4-5", "to": "34-35"}]}
    book = read(lines(answer("db", 4, 5), moved), tmp_path)
    assert held(book) == {"db": "34-35", "big": "4-5"}
    book.ledger.check()


def test_what_is_released_or_moved_without_having_had_anything_is_told(tmp_path: Path) -> None:
    moved = answer("big", 4) | {"moves": [{"id": "no", "from": "4-5", "to": "34-35"}]}
    book = read(lines({"released": "nobody", "cpus": ""}, moved), tmp_path)
    assert book.notes == (
        "line 1: 'nobody' is released and had nothing",
        "line 2: 'no' is moved and had nothing",
    )


def test_an_id_that_is_placed_twice_is_drawn_twice(tmp_path: Path) -> None:
    book = read(lines(answer("db", 4), answer("db", 5)), tmp_path)
    assert held(book) == {"db": "4", "db (line 2)": "5"}
    assert book.notes == ("line 2: 'db' is placed again without a release; both are drawn",)


@pytest.mark.parametrize("dump", [yaml.safe_dump, json.dumps], ids=["yaml", "json"])
def test_the_ledger_of_the_node_is_found_in_a_list(dump: Any, tmp_path: Path) -> None:
    ledger = with_vm(MACHINE, Ledger(), "db", Request(4))
    spec = merge_patch(Ledger(), LedgerChange(claims=tuple(ledger.claims.values())))
    mine, others = (
        {"kind": "NodeLedger", "metadata": {"name": name}, "spec": given}
        for name, given in ((NAME, spec), ("other", {}))
    )
    book = read(dump({"kind": "List", "items": [others, mine]}), tmp_path)
    assert book.ledger == ledger
    assert len(book.notes) == 1
    assert "is also about 1 other node, not drawn here" in book.notes[0]
    asked = read_book(str(tmp_path / "placements"), "worker-7", MACHINE.fingerprint, node=NAME)
    assert (asked.ledger, asked.notes) == (ledger, ())
    assert read(dump(mine), tmp_path).ledger == ledger
    elsewhere = read(dump(mine | {"metadata": {"name": "worker-7"}}), tmp_path)
    assert elsewhere.ledger == ledger
    assert "is about node worker-7, drawn on epyc-7502p" in elsewhere.notes[0]


def test_ledgers_of_other_nodes_alone_are_refused(tmp_path: Path) -> None:
    both = [{"kind": "NodeLedger", "metadata": {"name": name}, "spec": {}} for name in ("a", "b")]
    with pytest.raises(BadBody, match="is about the nodes a, b, none of them called epyc-7502p; say with"):
        read(json.dumps({"kind": "List", "items": both}), tmp_path)


def test_pods_are_read_by_their_annotations(tmp_path: Path) -> None:
    pods = [
        pod("db", 4, 5),
        pod("gone", 6, phase="Succeeded"),
        pod("away", 7, node="other"),
        pod("foreign-tool", **{"cpu-map": '{"socket0": ["8", "9"]}'}),
        pod("plain", unrelated="x"),
        pod("floats", **{PLACEMENT: PodPlacement.floating(pod_uid="uid-floats", node=NAME).to_json()}),
        pod("heir", **{PLACEMENT: placement((10,), uid="uid-of-another", node=NAME).to_json()}),
    ]
    book = read(json.dumps({"kind": "PodList", "items": pods}), tmp_path)
    assert held(book) == {"db": "4-5", "foreign-tool": "8-9"}
    assert book.ledger.claims["uid-foreign-tool"].owned == 0b11 << 8
    assert book.notes[0] == (
        "items[6]: pod virt-launcher-heir carries the placement of another pod; it is left out"
    )
    assert book.claim_of("shop/db").uid == book.claim_of("virt-launcher-db").uid == "uid-db"


def test_a_vm_that_runs_unpinned_is_in_no_book_and_one_without_a_name_is(tmp_path: Path) -> None:
    floats = PodPlacement.floating(pod_uid="u", node=NAME)
    text = lines(json.loads(floats.to_json()), answer("db", 4))
    assert held(read(text, tmp_path)) == {"db": "4"}
    assert held(read(placement((4,)).to_json(), tmp_path)) == {"unnamed": "4"}
    assert held(read(lines(answer("", 4)), tmp_path)) == {"unnamed": "4"}


def test_a_sentence_about_a_text_of_one_document_names_no_place_in_it(tmp_path: Path) -> None:
    book = read(lines({"placed": [], "moves": [{"id": "db"}]}), tmp_path)
    assert book.notes == ("'db' is moved and had nothing",)
    with pytest.raises(BadBody, match="placements: metadata: is no object but a number"):
        read('{"kind": "Pod", "metadata": 3}', tmp_path)


def test_annotations_alone_are_read_by_the_uid_of_their_pod(tmp_path: Path) -> None:
    text = "".join(placement(cpus, uid=f"u{cpus[0]}").to_json() + "\n" for cpus in ((4, 5), (6,)))
    assert held(read(text, tmp_path)) == {"u4": "4-5", "u6": "6"}


def test_placements_for_another_machine_are_told(tmp_path: Path) -> None:
    document = answer("db", 4)
    document["placement"]["topology"] = "sha256:0000"
    assert read(lines(document), tmp_path).notes == (
        (
            f"--placements {tmp_path / 'placements'} holds 1 placement made for a machine with another "
            "fingerprint than this one"
        ),
    )


def test_nothing_at_all_is_an_empty_book(tmp_path: Path) -> None:
    assert read("\n \n", tmp_path).ledger == Ledger()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "contains a list; it must be a mapping"),
        ("{", "is no JSON"),
        ("a: [", "is not valid YAML"),
        ("{}", "is nothing that says who has which CPUs; give lines of `kvplace place --keep -o json`"),
        ("db: CPUs 2,34 (socket 0)", "is nothing that says who has which CPUs"),
        ("spec: {claims: {u: {pod: x}}}", "the claim of pod u cannot be read"),
        ("spec: 3", "owners or claims"),
        ('{"kind":"List","items":[3]}', "items[0]: is no object but a number"),
        ('{"kind":"Pod","metadata":3}', "metadata: is no object but a number"),
        (lines(answer("db", 4)) + "junk\n", "line 2 is no JSON"),
        (lines(answer("db", 4)) + '{"id": 1, "id": 2}\n', "line 2: the key 'id' stands in it twice"),
        (lines(answer("db", 4)) + "3\n", "line 2 must be a JSON object, not a number"),
        (lines(answer("db", 4), {"placement": 3}), "line 2 placement: is no object but a number"),
        (lines(answer("db", 4), {"placement": {}}), "line 2: the placement has version null"),
        (lines({"version": 1, "podUid": ["x" * 60_000]}), "the placement podUid must be a text, not ['xxx"),
        (lines(answer("db", 4), {"moves": 3}), "line 2: moves must be a list"),
        (lines({"placed": 3}), "placed must be a list"),
        (lines({"placed": [], "running": None}), "running must be a list"),
        (lines({"placed": [answer("db", 4), {"id": "web"}]}), "placed[1] placement: is no object but "),
        (lines({}, {"placed": [3]}), "line 1: is nothing that says who has which CPUs"),
        (lines({"released": "x"}, {"placed": [3]}), "line 2 placed[0]: is no object but a number"),
        (lines(answer("db", 4), {"moves": [{"id": "db", "to": "x"}]}), "line 2: to 'x'"),
        (lines(pod("x", **{"cpu-map": "{}"})), "the cpu-map names no CPU"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(BadBody) as error:
        read(text, tmp_path)
    assert words in str(error.value)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


def test_bytes_that_are_no_text_are_refused(kvplace: Caller) -> None:
    called = kvplace("map", NAME, "--placements", "-", stdin=b"\xff\xfe\0")
    assert (called.code, called.err) == (2, "kvplace: --placements is not valid UTF-8\n")


LEDGER = {
    "kind": "NodeLedger",
    "spec": merge_patch(
        Ledger(), LedgerChange(claims=tuple(with_vm(MACHINE, Ledger(), "db", Request(2)).claims.values()))
    ),
}
MOVED = {"moves": [{"id": "a", "from": "1", "to": "2"}]}
PLAN = {"running": [answer("a", 1)], "placed": [answer("db", 4, 5)], **MOVED}
DOCUMENTS = (answer("db", 4, 5) | MOVED, pod("db", 4), LEDGER, PLAN)


@given(st.lists(st.one_of(*map(disturbed, DOCUMENTS)) | json_values, min_size=1, max_size=3), st.booleans())
def test_whatever_is_read_is_a_book_that_can_be_drawn_or_one_sentence(
    documents: list[Any], listed: bool
) -> None:
    text = json.dumps({"kind": "List", "items": documents}) if listed else lines(*documents)
    _drawn_or_told(text.encode())


@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "replace")))
def test_junk_is_one_sentence_or_nothing(content: bytes) -> None:
    _drawn_or_told(content)


@pytest.mark.parametrize("text", DEEP_OR_LONG)
def test_deep_and_long_documents_are_one_sentence(text: str) -> None:
    for content in (text, f"{{}}\n{text}", f"- {text}"):
        _drawn_or_told(content.encode())


def _drawn_or_told(content: bytes) -> None:
    from kvplace.core.drawing.core_map import core_map_document, draw
    from kvplace.core.drawing.svg_map import svg_map

    before, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(content))
    try:
        book, _ = answer_or_sentence(
            lambda source: read_book(source, NAME, MACHINE.fingerprint), "-", BadBody
        )
    finally:
        sys.stdin = before
    if book is None:
        return
    drawing = draw(NAME, MACHINE, book.ledger)
    assert svg_map(drawing)
    assert json.dumps(core_map_document(drawing))


def test_where_threads_were_found_is_read_by_any_name_of_the_vm(tmp_path: Path) -> None:
    book = read(json.dumps({"kind": "List", "items": [pod("db", 4), pod("a=b", 5)]}), tmp_path)
    assert read_found(["db=4-5", "shop/db=9", "uid-a=b=7"], book) == {
        "uid-db": 0b1000110000,
        "uid-a=b": 1 << 7,
    }
    twins = [pod("db", 4), pod("db", 5) | {"metadata": pod("db", 5)["metadata"] | {"uid": "uid-new"}}]
    twins[1]["metadata"]["annotations"] = {PLACEMENT: placement((5,), uid="uid-new", node=NAME).to_json()}
    with pytest.raises(
        BadBody, match="'db' is the name of several; name one of them by its UID: uid-db, uid-new"
    ):
        read_found(["db=4"], read(json.dumps({"kind": "List", "items": twins}), tmp_path))
    with pytest.raises(BadBody, match="did you mean 'db'"):
        read_found(["dbb=4"], book)


@given(st.text(max_size=20))
def test_any_text_for_found_is_read_or_one_sentence(text: str) -> None:
    book = Book(with_vm(MACHINE, Ledger(), "db", Request(2)))
    for given_text in (text, f"db={text}", f"{text}=4"):
        answer_or_sentence(lambda text: read_found([text], book), given_text, BadBody)
