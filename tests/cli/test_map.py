"""`kvplace map` shows whose each thread of a machine is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from kvplace.core.ledger import Claim, ClaimState, Ledger, LedgerChange, merge_patch
from kvplace.core.request import Policy, Request, Scope, Smt
from kvplace.simulate.machine_files import read_machine
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
