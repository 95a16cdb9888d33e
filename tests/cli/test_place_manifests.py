"""`kvplace place -f` answers what the VMs of a manifest would get, in the words of their annotations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.admission.reviewed_objects import Json, plain_pod, vm, vmi
from tests.cli.calls import Caller

MACHINE = ("--topology", "2x-epyc-9354")


def _file(folder: Path, *objects: Json) -> str:
    path = folder / "vms.yaml"
    path.write_text(yaml.safe_dump_all(objects))
    return str(path)


def _vm(name: str, vcpus: int = 8, **annotations: str) -> Json:
    made = vm(cpu={"cores": vcpus}, memory={"guest": "8Gi"})
    made["metadata"] = {"name": name}
    keys = {key.replace("_", "-"): value for key, value in annotations.items()}
    made["spec"]["template"]["metadata"]["annotations"] = keys or {"cpu-set": "one-numa"}
    return made


def test_each_annotation_is_answered_with_its_effect(kvplace: Caller) -> None:
    called = kvplace("place", "-f", "vm-templates/network-function.yaml", *MACHINE)
    assert called.code == 0
    first, *lines = called.out.splitlines()
    assert first == "VirtualMachine network-function fits on 2x-epyc-9354: 8 vCPUs, 16Gi"
    assert [line.split() for line in lines[:2]] == [
        ["cpu-set:", "one-numa", "socket", "0,", "NUMA", "node", "0,", "L3", "0,1"],
        ["kvplace.io/cpu-policy:", "exclusive", "10", "CPUs", "of", "its", "own:", "2,4-7,66,68-71"],
    ]
    said = {line.split()[0]: line.split(maxsplit=2)[2] for line in lines[2:-1]}
    assert said == {
        "kvplace.io/smt:": "5 whole cores",
        "kvplace.io/emulator-threads:": "QEMU's own threads on CPUs 2,66 of their own",
        "kvplace.io/numa-memory:": "16Gi on NUMA node 0",
        "kvplace.io/guest-numa:": "1 NUMA cell",
    }
    assert called.err == (
        "kvplace: VirtualMachine network-function: 1 SR-IOV interface not counted as a device: its "
        "NetworkAttachmentDefinition names the resource\n"
    )
    assert json.loads(lines[-1].split(maxsplit=1)[1]) == {
        "socket0": ["4", "68", "5", "69", "6", "70", "7", "71"]
    }


def test_vms_of_one_manifest_get_no_core_twice(kvplace: Caller, tmp_path: Path) -> None:
    file = _file(tmp_path, _vm("a"), {"kind": "List", "items": [_vm("b"), {"kind": "Service"}]})
    called = kvplace("place", "-f", file, *MACHINE, "-o", "json")
    first, second = (json.loads(line) for line in called.out.splitlines())
    assert (first["id"], second["id"]) == ("a", "b")
    assert not set(first["placement"]["vcpus"]) & set(second["placement"]["vcpus"])


def test_vmis_and_plain_pods_are_placed_too(kvplace: Caller, tmp_path: Path) -> None:
    pod = plain_pod({"cpu-set": "one-l3"}, {"limits": {"cpu": "4"}})
    called = kvplace("place", "-f", _file(tmp_path, vmi(), pod), *MACHINE)
    assert called.code == 0
    assert "VirtualMachineInstance " in called.out
    of_vmi, of_pod = called.out.split("Pod ")
    assert "kvplace.io/emulator-threads:" in of_vmi
    assert "kvplace.io/emulator-threads:" not in of_pod


def test_a_vm_that_does_not_fit_is_answered_with_the_reason_and_the_changes_that_help(
    kvplace: Caller, tmp_path: Path
) -> None:
    file = _file(tmp_path, _vm("big", 100), _vm("small"))
    called = kvplace("place", "-f", file, *MACHINE)
    assert called.code == 4
    lines = called.out.splitlines()
    assert lines[0].startswith("VirtualMachine big does not fit on 2x-epyc-9354: no NUMA node with 100 free")
    assert any("cpu-set any" in line or "'any'" in line or "spread" in line for line in lines[1:5])
    assert kvplace("place", "-f", _file(tmp_path, _vm("big", 100)), *MACHINE).code == 3


def test_with_room_made_the_moves_come_first(kvplace: Caller, tmp_path: Path) -> None:
    file = _file(tmp_path, *(_vm(name, 40) for name in ("a", "b")), _vm("c", 30, cpu_set="any"))
    called = kvplace("place", "-f", file, *MACHINE, "--make-room")
    assert called.code == 0
    assert called.out.count(" fits on ") == 3


def test_a_vm_that_requests_no_cores_is_reported_with_the_annotation_to_add(
    kvplace: Caller, tmp_path: Path
) -> None:
    plain = _vm("web")
    plain["spec"]["template"]["metadata"]["annotations"] = {"team": "red"}
    called = kvplace("place", "-f", _file(tmp_path, plain, _vm("db")), *MACHINE)
    assert called.code == 0
    assert "VirtualMachine web requests no cores: add cpu-set to its spec.template.metadata" in called.err
    called = kvplace("place", "-f", _file(tmp_path, plain), *MACHINE)
    assert called.code == 2
    assert "no VirtualMachine, VirtualMachineInstance or Pod that requests cores" in called.err


@pytest.mark.parametrize(
    ("on_vm", "on_template", "said"),
    [
        ({}, {"cpu-sett": "any"}, "add cpu-set to its spec.template.metadata.annotations; its annotation"),
        ({}, {"cpu-sett": "any"}, "annotation 'cpu-sett' is likely a typo of 'cpu-set'"),
        (
            {},
            {"cpu-sett": "any", "kvplace.io/smt": "require"},
            "annotation 'cpu-sett' is likely a typo of 'cpu-set'",
        ),
        ({}, {"cpu-sets": "any"}, "annotation cpu-sets has no effect: did you mean cpu-set?"),
        ({}, {"kvplace.io/smt": "require"}, "annotation kvplace.io/smt has no effect alone: add cpu-set"),
        ({"cpu-set": "any"}, {}, "has no effect here: move it to spec.template.metadata.annotations"),
        ({}, {"cpu-set": "any", "smt": "require"}, "annotation smt has no effect: did you mean"),
    ],
)
def test_an_annotation_without_effect_is_reported_as_admission_warns(
    kvplace: Caller, tmp_path: Path, on_vm: dict[str, str], on_template: dict[str, str], said: str
) -> None:
    web = _vm("web")
    web["metadata"]["annotations"] = on_vm
    web["spec"]["template"]["metadata"]["annotations"] = on_template
    called = kvplace("place", "-f", _file(tmp_path, web), *MACHINE)
    line = next(line for line in called.err.splitlines() if said in line)
    assert line.startswith("kvplace: VirtualMachine web")


def test_a_file_of_another_kind_is_named_with_its_kind(kvplace: Caller, tmp_path: Path) -> None:
    file = _file(tmp_path, {"kind": "NodeTopology", "metadata": {"name": "a"}})
    called = kvplace("place", "-f", file, *MACHINE)
    assert called.code == 2
    assert "or Pod that requests cores; found 'NodeTopology'" in called.err


@pytest.mark.parametrize(
    ("annotations", "said"),
    [
        ({"cpu-set": "one-nma"}, "document 2: annotation cpu-set: 'one-nma'"),
        ({"cpu-set": "any", "kvplace.io/cpu-set": "one-l3"}, "contradicts"),
    ],
)
def test_a_vm_that_admission_refuses_is_refused_with_its_place_in_the_file(
    kvplace: Caller, tmp_path: Path, annotations: dict[str, str], said: str
) -> None:
    wrong = _vm("wrong")
    wrong["spec"]["template"]["metadata"]["annotations"] = annotations
    called = kvplace("place", "-f", _file(tmp_path, _vm("db"), wrong), *MACHINE)
    assert called.code == 2
    assert said in called.err
    assert not called.out


def test_two_vms_of_one_name_are_refused(kvplace: Caller, tmp_path: Path) -> None:
    called = kvplace("place", "-f", _file(tmp_path, _vm("db"), _vm("db")), *MACHINE)
    assert called.code == 2
    assert "document 2: another VM is called 'db', too" in called.err


def test_plan_reads_the_same_manifests(kvplace: Caller, tmp_path: Path) -> None:
    called = kvplace("plan", "--requests", _file(tmp_path, _vm("a"), _vm("b")), "-o", "name")
    assert called.code == 0
    assert called.out.split() == ["a", "b"]


def test_a_request_may_use_the_names_of_the_annotations(kvplace: Caller) -> None:
    keys = {"vcpus": 8, "cpuSet": "one-l3", "policy": "share", "smt": "prefer", "guestNuma": "off"}
    annotations = {
        "vcpus": 8,
        "cpu-set": "one-l3",
        "kvplace.io/cpu-policy": "share",
        "kvplace.io/smt": "prefer",
        "guest-numa": "off",
    }
    first, second = (
        kvplace("place", *MACHINE, "-o", "json", stdin=json.dumps(request)) for request in (keys, annotations)
    )
    assert first.code == 0
    assert second == first


def test_two_spellings_that_differ_are_refused_by_both_names(kvplace: Caller) -> None:
    called = kvplace("place", *MACHINE, stdin='{"vcpus": 8, "cpu-set": "one-l3", "cpuSet": "any"}')
    assert called.code == 2
    assert called.out == "line 1: cpuSet: 'any' contradicts cpu-set: 'one-l3'\n"
