"""`kvplace topology` and `kvplace map` read every kind of machine and show the same one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from kvplace.core.ledger import Claim, ClaimState, Ledger, LedgerChange, merge_patch
from kvplace.core.request import Policy, Request, Scope, Smt
from kvplace.core.topology_document import read_topology
from kvplace.simulate.machine_files import read_machine
from tests.captured import captured_folder
from tests.cli.calls import Caller
from tests.core.claims import with_vm

MACHINE = read_machine("2x-epyc-9354-nps2")


def _ledger_file(folder: Path, ledger: Ledger) -> Path:
    path = folder / "ledger.yaml"
    change = LedgerChange(claims=tuple(ledger.claims.values()))
    document = {
        "apiVersion": "kvplace.io/v1alpha1",
        "kind": "NodeLedger",
        "spec": merge_patch(Ledger(), change),
    }
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def test_a_printed_machine_can_be_given_back_and_is_the_same(kvplace: Caller, tmp_path: Path) -> None:
    printed = kvplace("topology", "2x-epyc-9354-nps2", "-o", "json")
    document = json.loads(printed.out)
    assert (document["kind"], document["metadata"]) == ("NodeTopology", {"name": "2x-epyc-9354-nps2"})
    assert read_topology(document) == MACHINE
    path = tmp_path / "machine.json"
    path.write_text(printed.out, encoding="utf-8")
    assert kvplace("topology", str(path), "-o", "json").out == printed.out
    path.write_text(json.dumps(document["spec"]), encoding="utf-8")
    bare = json.loads(kvplace("topology", str(path), "-o", "json").out)
    assert (bare["metadata"], bare["spec"]) == ({"name": "machine"}, document["spec"])


def test_this_machine_is_shown_without_a_file(kvplace: Caller) -> None:
    document = json.loads(kvplace("topology", "-o", "json").out)
    assert read_topology(document).cpus
    assert document["metadata"]["name"]


def test_a_captured_machine_is_read_and_what_its_kernel_did_not_say_goes_to_stderr(kvplace: Caller) -> None:
    path = captured_folder("topologies") / "lscpu" / "s390-nested-virt.tar.gz"
    called = kvplace("topology", str(path), "-o", "json")
    assert json.loads(called.out)["metadata"]["name"] == "s390-nested-virt"
    assert called.err == (
        "kvplace: the kernel says nothing about the L3 caches: the NUMA node stands in for them\n"
    )


def test_reserved_cpus_replace_those_of_the_description(kvplace: Caller) -> None:
    document = json.loads(kvplace("topology", "epyc-7502p", "--reserved", "0,32", "-o", "json").out)
    assert document["spec"]["reserved"] == "0,32"


def test_the_table_has_a_line_for_every_numa_node(kvplace: Caller) -> None:
    lines = kvplace("topology", "2x-xeon-8480plus-snc4").out.splitlines()
    assert lines[0] == "2x-xeon-8480plus-snc4: 2 sockets, 8 NUMA nodes, 2 L3 caches, 112 cores, 224 CPUs"
    assert lines[-1].split() == [
        *("7", "1", "98-111,210-223", "14", "1", "126.0", "GiB", "64", "x", "1Gi"),
        *("21", "21", "21", "21", "12", "12", "12", "10"),
    ]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"{}", b"[1, 2]", b'{"spec": 3}', b"\x1f\x8b broken", b"{\xff}"]
)
def test_a_file_that_is_no_machine_is_named(kvplace: Caller, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "machine.json"
    path.write_bytes(content)
    called = kvplace("topology", str(path))
    assert called.code == 2
    assert str(path) in called.err
    assert called.err.count("\n") == 1


def test_the_map_shows_owners_idle_siblings_sharers_reserved_and_free(
    kvplace: Caller, tmp_path: Path
) -> None:
    ledger = with_vm(MACHINE, Ledger(), "quiet", Request(2, scope=Scope.ONE_L3, smt=Smt.ISOLATE))
    ledger = with_vm(MACHINE, ledger, "loud", Request(4, scope=Scope.ONE_L3))
    ledger = with_vm(MACHINE, ledger, "shared", Request(2, scope=Scope.ONE_L3, policy=Policy.SHARE))
    out = kvplace("map", "2x-epyc-9354-nps2", "--ledger", str(_ledger_file(tmp_path, ledger))).out
    assert out.splitlines()[0] == (
        "2x-epyc-9354-nps2: 128 CPUs, 110 free, 8 reserved, 6 owned, 2 idle, 2 shared"
    )
    assert "L3 0  ## Aa Aa" in out
    assert "default/quiet" in out
    assert "exclusive" in out
    assert "share" in out
    assert [line for line in out.splitlines() if "NUMA" in line and "of 189 GiB free" in line]


def test_the_drawing_is_had_as_json(kvplace: Caller, tmp_path: Path) -> None:
    ledger = with_vm(MACHINE, Ledger(), "db", Request(2))
    path = _ledger_file(tmp_path, ledger)
    document = json.loads(kvplace("map", "2x-epyc-9354-nps2", "--ledger", str(path), "-o", "json").out)
    assert [socket["id"] for socket in document["sockets"]] == [0, 1]
    assert document["legend"][0]["vmi"] == "db"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is no NodeLedger"),
        ("[]", "is no NodeLedger"),
        ("{", "is neither JSON nor YAML"),
        ("spec: {claims: {u: {pod: x}}}", "the claim of pod u cannot be read"),
        ('spec: {owners: {"999": u}}', "names CPU 999, which the machine lacks"),
    ],
)
def test_a_ledger_that_cannot_be_meant_is_refused(
    kvplace: Caller, tmp_path: Path, content: str, words: str
) -> None:
    path = tmp_path / "ledger.json"
    path.write_text(content, encoding="utf-8")
    called = kvplace("map", "epyc-7502p", "--ledger", str(path))
    assert (called.code, called.out) == (2, "")
    assert words in called.err
    assert "Traceback" not in called.err


def test_many_vms_get_two_letters_and_the_cells_stay_in_line(kvplace: Caller, tmp_path: Path) -> None:
    claims = [
        Claim(
            uid=f"u{number}",
            namespace="default",
            pod=f"vm-{number}",
            vmi="",
            policy=Policy.EXCLUSIVE,
            state=ClaimState.BOUND,
            cpus=1 << number,
            owned=1 << number,
            memory={},
            huge_pages={},
            since="",
        )
        for number in range(4, 40)
    ]
    ledger = Ledger().after(LedgerChange(claims=tuple(claims)))
    out = kvplace("map", "altra-max-m128-30", "--ledger", str(_ledger_file(tmp_path, ledger))).out
    assert "#  #  .  .  A  B  C" in out
    assert "Z  AA AB AC" in out
    assert max(map(len, out.splitlines())) <= 100
