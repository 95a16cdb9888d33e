"""`kvplace map` shows which VM holds each thread of a machine."""

from __future__ import annotations

import io
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.cells import cell_len
from rich.console import Console

from kvplace.cli.terminal_map import print_map
from kvplace.core.cpuset import format_cpu_list, mask_of
from kvplace.core.drawing.core_map import draw
from kvplace.core.ledger import Claim, Ledger, LedgerChange, merge_patch
from kvplace.core.request import PinningOptions, Policy, Request, Scope, Smt
from kvplace.core.scalars import Bytes, CpuMask, PodUid
from kvplace.core.topology import Topology
from kvplace.machines.server_types import machine_names, read_machine
from tests.captured import CAPTURED_MACHINES, recorded_machine
from tests.cli.calls import Caller
from tests.cli.placed import placement
from tests.core.example_ledgers import claim, ledger_of, with_vm
from tests.core.machines import make_numa_node, make_package, make_topology

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
NAME = "2x-epyc-9354-nps2"
MACHINE = read_machine(NAME)


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
    ledger = with_vm(
        MACHINE, Ledger(), "quiet", Request(2, PinningOptions(scope=Scope.ONE_L3, smt=Smt.ISOLATE))
    )
    ledger = with_vm(MACHINE, ledger, "loud", Request(4, PinningOptions(scope=Scope.ONE_L3)))
    ledger = with_vm(
        MACHINE, ledger, "shared", Request(2, PinningOptions(scope=Scope.ONE_L3, policy=Policy.SHARE))
    )
    out = kvplace("map", "2x-epyc-9354-nps2", "--placements", str(_ledger_file(tmp_path, ledger))).out
    assert out.splitlines()[0] == (
        "2x-epyc-9354-nps2: 128 CPUs, 110 free, 8 reserved, 6 owned, 2 idle, 2 shared"
    )
    assert "L3 0   # #  A a  A a  B+B+" in out
    assert "!" not in out
    assert "default/quiet" in out
    assert "exclusive" in out
    assert "share" in out
    assert [line for line in out.splitlines() if "NUMA" in line and "of 189 GiB free" in line]


def _key_of(drawing_lines: list[str]) -> dict[str, str]:
    """The key below a map: meanings by mark."""
    end = max(number for number, line in enumerate(drawing_lines) if line.startswith("╰"))
    table = next(number for number, line in enumerate(drawing_lines) if " POLICY " in line)
    entries = [entry for line in drawing_lines[end + 1 : table] for entry in line.split("   ")]
    return dict(entry.strip().split(" ", 1) for entry in entries)


def test_every_state_has_its_own_mark_and_the_key_is_true_of_the_vms_shown() -> None:
    shared = [claim(name, cpus, owned=0) for name, cpus in (("pool-1", 0b0110), ("pool-2", 0b0100))]
    quiet = claim("quiet", 1 << 8, owned=1 << 8 | 1 << 40)
    lines = _drawn(100, "epyc-7502p", ledger=ledger_of(*shared, quiet))
    assert _key_of(lines) == {
        "C": "owned by VM C",
        "c": "kept idle by VM C",
        "A+": "shared, used by VM A",
        "2+": "shared by 2 VMs",
        ".": "free",
        "#": "reserved for the host",
    }
    assert "C c" in "\n".join(lines)
    crowd = [claim(f"vm-{number}", 1 << 5, owned=0) for number in range(12)]
    assert _key_of(_drawn(100, "epyc-7502p", ledger=ledger_of(*crowd)))["9+"] == "shared by 9 or more VMs"


def test_the_map_can_be_printed_as_json_and_yaml(kvplace: Caller, tmp_path: Path) -> None:
    ledger = with_vm(MACHINE, Ledger(), "db", Request(2))
    path = _ledger_file(tmp_path, ledger)
    document = json.loads(kvplace("map", "2x-epyc-9354-nps2", "--placements", str(path), "-o", "json").out)
    again = kvplace("map", "2x-epyc-9354-nps2", "--placements", str(path), "-o", "yaml").out
    assert yaml.safe_load(again) == document
    assert [socket["id"] for socket in document["sockets"]] == [0, 1]
    assert document["legend"][0]["vmi"] == "db"


def test_the_map_shows_where_qemus_own_threads_run(kvplace: Caller) -> None:
    requests = [
        {"id": "apart", "vcpus": 4, "emulatorThreads": "isolate", "ioThreads": 1, "cpuSet": "one-l3"},
        {"id": "lent", "vcpus": 2, "cpuSet": "one-l3"},
    ]
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    placed = kvplace("place", "--topology", NAME, "--keep", "-o", "json", stdin=lines).out
    emulator = [json.loads(line)["placement"]["emulatorCpus"] for line in placed.splitlines()]
    drawn = kvplace("map", NAME, "--placements", "-", stdin=placed).out.splitlines()
    assert sum(line.count("A~") for line in drawn if line.startswith("│")) == 1
    assert sum(line.count("~ ~") for line in drawn if line.startswith("│")) == 1
    assert any("~ reserved for the host, with QEMU's own threads of VMs" in line for line in drawn)
    table = [line.split() for line in drawn[-3:]]
    assert table[0] == ["VM", "POLICY", "CPUS", "EMULATOR", "I/O", "THREADS"]
    assert table[1][-2:] == [emulator[0]] * 2
    assert table[2][-1] == emulator[1]


def test_the_distances_of_numa_nodes_and_memory_set_aside_are_written(kvplace: Caller) -> None:
    out = kvplace("map", "2x-xeon-8480plus-snc4").out
    assert "NUMA distances: 12 inside a socket, 21 between sockets\n" in out
    assert "NUMA 0  62 of 62 GiB free, 64 GiB set aside: 64 of 64 huge pages of 1Gi free" in out


def test_many_vms_get_two_letters_and_the_columns_stay_aligned(kvplace: Caller, tmp_path: Path) -> None:
    claims = [
        Claim(
            uid=PodUid(f"u{number}"),
            namespace="default",
            pod=f"vm-{number}",
            vmi="",
            policy=Policy.EXCLUSIVE,
            cpus=CpuMask(1 << number),
            owned=CpuMask(1 << number),
            memory={},
            huge_pages={},
            since="",
        )
        for number in range(4, 40)
    ]
    ledger = Ledger().after(LedgerChange(claims=tuple(claims)))
    out = kvplace("map", "altra-max-m128-30", "--placements", str(_ledger_file(tmp_path, ledger))).out
    assert "#  #  .  .  A  B  C" in out
    assert "Z  AA AB AC" in out
    assert max(map(len, out.splitlines())) <= 100


def test_this_machine_is_drawn_without_a_file(kvplace: Caller) -> None:
    assert "socket 0" in kvplace("map").out


def test_contradictions_are_marked_and_reported_and_no_failure(kvplace: Caller) -> None:
    lines = "".join(
        json.dumps({"id": name, "placement": json.loads(placement(cpus).to_json())}) + "\n"
        for name, cpus in (("db", (8, 9)), ("web", (9, 10)))
    )
    called = kvplace(
        *("map", "epyc-7502p", "--placements", "-", "--foreign", "20-21", "--found", "db=8,30"), stdin=lines
    )
    faults = [
        "conflict: CPU 9: owned by A (db) and owned by B (web)",
        "drift: CPU 9: placed for A (db), but none of its threads may run here",
        "drift: CPU 30: threads of A (db) may run here, but were not placed here",
    ]
    assert called.code == 0
    assert called.err.splitlines() == [f"kvplace: {sentence}" for sentence in faults]
    for sentence in faults:
        assert f"! {sentence}" in called.out
    assert called.out.splitlines()[0].endswith("2 foreign, 3 owned, 1 in conflict, 1 in drift")
    assert "% ." in called.out
    assert "A!." in called.out


def test_cores_of_the_kubelets_static_policy_are_foreign(kvplace: Caller, tmp_path: Path) -> None:
    state = tmp_path / "cpu_manager_state"
    state.write_text(
        json.dumps(
            {
                "policyName": "static",
                "defaultCpuSet": "0-3,6-63",
                "entries": {"1d5e4a1c": {"app": "4-5"}},
                "checksum": 0,
            }
        ),
        encoding="utf-8",
    )
    called = kvplace("map", "epyc-7502p", "--cpu-manager-state", str(state), "-o", "json")
    sockets = json.loads(called.out)["sockets"]
    states = {
        thread["cpu"]: thread["state"]
        for socket in sockets
        for node in socket["numaNodes"]
        for l3 in node["l3Groups"]
        for core in l3["cores"]
        for thread in core
    }
    assert [cpu for cpu, word in sorted(states.items()) if word == "foreign"] == [4, 5]


def test_wide_adds_the_cpus_of_every_l3_and_the_memory_of_every_vm(kvplace: Caller, tmp_path: Path) -> None:
    request = Request(4, PinningOptions(scope=Scope.ONE_NUMA), memory=Bytes(3 << 30))
    ledger = _ledger_file(tmp_path, with_vm(MACHINE, Ledger(), "db", request))
    out = kvplace("map", "2x-epyc-9354-nps2", "--placements", str(ledger), "-o", "wide").out
    assert "CPUs 4-7,68-71" in out
    assert "3Gi on 0" in out
    assert max(map(len, out.splitlines())) <= 160


@pytest.mark.parametrize(("values", "ending"), [(["-o", "svg"], None), (["-o", "{svg}"], "svg")])
def test_an_svg_goes_to_stdout_or_to_the_named_file(
    kvplace: Caller, tmp_path: Path, values: list[str], ending: str | None
) -> None:
    file = tmp_path / "map.svg"
    called = kvplace("map", "epyc-7502p", *(value.replace("{svg}", str(file)) for value in values))
    text = called.out if ending is None else file.read_text(encoding="utf-8")
    assert called.out == (text if ending is None else "")
    assert ET.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"


def test_a_form_and_a_file_may_be_named_together(kvplace: Caller, tmp_path: Path) -> None:
    for form, name in (("svg", "a"), ("json", "b.txt"), ("table", "c.svg"), ("wide", "d")):
        kvplace("map", "epyc-7502p", "-o", form, "--output", str(tmp_path / name))
        printed = kvplace("map", "epyc-7502p", "-o", form).out
        assert (tmp_path / name).read_text(encoding="utf-8") == printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-o", "xml"], "'xml' is neither one of table, wide, json, yaml, svg nor a file that ends in .svg"),
        (["-o", "svg", "-o", "json"], "takes one form"),
        (["-o", "a.svg", "-o", "b.svg"], "takes one form, and one file"),
        (["--foreign", "4-"], "--foreign '4-'"),
        (["--foreign", "junk"], "is neither a number nor a range"),
        (["--found", "db"], "is not of the form VM=CPUS"),
        (["--found", "db=4"], "no VM 'db' in --placements"),
        (["--placements", "/nowhere/at/all"], "/nowhere/at/all cannot be read: No such file"),
        (["--placements", "/"], "cannot be read: Is a directory"),
        (["--placements", "a\0b"], "cannot be read"),
    ],
)
def test_a_mistake_is_one_sentence(kvplace: Caller, arguments: list[str], words: str) -> None:
    called = kvplace("map", "epyc-7502p", *arguments)
    assert (called.code, called.out) == (2, "")
    assert words in called.err
    assert called.err.count("\n") == 1


def test_a_file_that_cannot_be_written_is_named(kvplace: Caller, tmp_path: Path) -> None:
    file = tmp_path / "nowhere" / "map.svg"
    called = kvplace("map", "epyc-7502p", "-o", str(file))
    assert (called.code, called.err) == (
        1,
        f"kvplace: {file} cannot be written: No such file or directory\n",
    )


def _drawn(
    width: int, name: str, machine: Topology | None = None, *, wide: bool = False, **more: Any
) -> list[str]:
    file = io.StringIO()
    out = Console(file=file, width=width, highlight=False, markup=False, emoji=False)
    print_map(out, draw(name, machine or read_machine(name), **more), wide=wide)
    return file.getvalue().splitlines()


@pytest.mark.parametrize("name", machine_names())
@pytest.mark.parametrize("width", [80, 100, 200])
def test_a_map_is_never_wider_than_its_terminal_and_shows_every_thread(name: str, width: int) -> None:
    lines = _drawn(width, name, wide=width == 200)
    assert max(map(cell_len, lines)) <= width
    frames = "".join(line for line in lines if line.startswith("│"))
    boxes = re.sub(r"NUMA \d+[^│]*│|CPUs [0-9,-]+", "", frames)
    machine = read_machine(name)
    assert boxes.count("#") == machine.reserved.bit_count()
    assert boxes.count(".") == machine.allocatable.bit_count()


@pytest.mark.parametrize("path", CAPTURED_MACHINES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_every_captured_machine_is_drawn_in_80_columns(path: Path) -> None:
    lines = _drawn(80, path.name, recorded_machine(path).topology)
    assert max(map(cell_len, lines)) <= 80
    assert any("socket" in line for line in lines)


def test_512_threads_with_two_letters_each_fit_into_80_columns() -> None:
    sockets = [mask_of(range(number * 256, number * 256 + 256)) for number in range(2)]
    machine = make_topology(
        packages=tuple(make_package(number, cpus) for number, cpus in enumerate(sockets)),
        numa_nodes=tuple(make_numa_node(number, cpus, memory=0) for number, cpus in enumerate(sockets)),
        l3_groups=tuple(sockets),
        cores=tuple(0b11 << cpu for cpu in range(0, 512, 2)),
    )
    ledger = ledger_of(*(claim(f"vm-{number}", 0b11 << number * 2) for number in range(256)))
    file = io.StringIO()
    print_map(Console(file=file, width=80, highlight=False), draw("large", machine, ledger))
    lines = file.getvalue().splitlines()
    assert max(map(cell_len, lines)) <= 80
    for label in ("A A ", "IVIV"):
        assert sum(label in line for line in lines) == 1


@pytest.mark.parametrize("width", [1, 5, 12, 30])
def test_a_very_narrow_terminal_is_not_a_failure(width: int) -> None:
    ledger = ledger_of(claim("db", 0b1100))
    assert _drawn(width, "epyc-7502p", ledger=ledger, foreign=1 << 9, found={"db": 1})


def test_a_name_cannot_steer_the_terminal(kvplace: Caller) -> None:
    line = json.dumps({"id": "db\x1b[2J\x07[red]", "placement": json.loads(placement((8, 9)).to_json())})
    called = kvplace("map", "epyc-7502p", "--placements", "-", "--found", "db\x1b[2J\x07[red]=9", stdin=line)
    assert "\x1b" not in called.out + called.err
    assert "db�[2J�[red]" in called.out
    assert "db�[2J�[red]" in called.err


def test_the_picture_in_the_documents_is_the_drawing_of_its_command(kvplace: Caller, tmp_path: Path) -> None:
    file = tmp_path / "core-map.svg"
    words = (PICTURES / "core-map.txt").read_text(encoding="utf-8").split()
    assert words[:2] == ["kvplace", "map"]
    values = {
        "docs/pictures/core-map.svg": str(file),
        "docs/pictures/core-map.jsonl": str(PICTURES / "core-map.jsonl"),
    }
    assert kvplace(*(values.get(word, word) for word in words[1:])).code == 0
    assert file.read_bytes() == (PICTURES / "core-map.svg").read_bytes()


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (60, ["A  shop/the-database-of-the-shop-in-front  exclusive  8-39"]),
        (40, ["A shop/the-database-of-the-shop-in-front", "exclusive 8-39"]),
        (30, ["A shop/the-database-of-the-", "shop-in-front", "exclusive 8-39"]),
        (12, ["A shop/the-", "database-", "of-the-", "shop-in-", "front", "exclusive", "8-39"]),
    ],
)
def test_a_long_name_is_broken_behind_its_separators_and_only_where_it_must_be(
    width: int, lines: list[str]
) -> None:
    held = claim("the-database-of-the-shop-in-front", mask_of(range(8, 40)))
    assert [line.strip() for line in _drawn(width, "epyc-9654p", ledger=ledger_of(held))][
        -len(lines) :
    ] == lines


@pytest.mark.parametrize("width", [30, 40, 60])
@pytest.mark.parametrize("name", ["2x-xeon-6338", "epyc-9654p", "4x-xeon-8280"])
def test_a_narrow_terminal_loses_nothing(name: str, width: int) -> None:
    topology = read_machine(name)
    ledger = ledger_of(claim("the-database-of-the-shop-in-front", mask_of(range(8, 40))))
    file = io.StringIO()
    print_map(Console(file=file, width=width), draw(name, topology, ledger), wide=True)
    drawn = file.getvalue()
    assert max(map(cell_len, drawn.splitlines())) <= width
    assert "\N{HORIZONTAL ELLIPSIS}" not in drawn
    numbers = re.sub(r"[^0-9,-]", "", drawn)
    assert [format_cpu_list(l3) for l3 in topology.l3_groups if format_cpu_list(l3) not in numbers] == []


def test_a_name_that_can_only_be_a_node_is_refused_for_the_missing_kubeconfig(
    kvplace: Caller, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    called = kvplace("map", "worker-1")
    assert called.code == 1
    assert "'worker-1' is neither a file nor a server type, and no kubeconfig names a cluster" in called.err
    assert "epyc" not in called.err


def test_a_node_and_a_file_can_be_named_as_such(
    kvplace: Caller, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("epyc-7502p").write_text('{"socket0": ["0", "1"]}')
    assert "2 CPUs" in kvplace("map", "file/epyc-7502p").out
    assert "no cluster is configured" in kvplace("map", "node/epyc-7502p").err


def test_devices_of_a_described_machine_are_drawn_and_listed(kvplace: Caller, tmp_path: Path) -> None:
    described = json.loads(kvplace("topology", "2x-epyc-9354-nps2", "-o", "json").out)
    described["spec"]["devices"] = [
        {"resource": "intel.com/vf", "numaNode": 1, "count": 8},
        {"resource": "example.com/key", "numaNode": -1, "count": 1},
    ]
    file = tmp_path / "edge.json"
    file.write_text(json.dumps(described))
    drawing = json.loads(kvplace("map", str(file), "-o", "json").out)
    nodes = {node["id"]: node for socket in drawing["sockets"] for node in socket["numaNodes"]}
    assert nodes[1]["devices"] == {"intel.com/vf": {"free": 8, "count": 8}}
    assert "devices" not in nodes[0]
    assert "8 of 8 intel.com/vf free" in kvplace("map", str(file)).out
    listed = kvplace("topology", str(file)).out
    assert "8 intel.com/vf on NUMA node 1\n" in listed
    assert "1 example.com/key on no known NUMA node\n" in listed
