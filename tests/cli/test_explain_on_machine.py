"""`kvplace explain -f --topology` explains a VM of a manifest on one machine, without a cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.admission.reviewed_objects import Json, vm
from tests.cli.calls import Caller

MACHINE = ("--topology", "2x-epyc-9354")


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def _file(folder: Path, *objects: Json) -> str:
    path = folder / "vms.yaml"
    path.write_text(yaml.safe_dump_all(objects))
    return str(path)


def _vm(name: str, vcpus: int, **annotations: str) -> Json:
    made = vm(cpu={"cores": vcpus}, memory={"guest": "8Gi"})
    made["metadata"] = {"name": name}
    made["spec"]["template"]["metadata"]["annotations"] = {
        key.replace("_", "-"): value for key, value in annotations.items()
    }
    return made


def test_a_vm_that_fits_is_explained_as_place_answers_it(kvplace: Caller) -> None:
    arguments = ("-f", "vm-templates/network-function.yaml", *MACHINE)
    explained, placed = kvplace("explain", *arguments), kvplace("place", *arguments)
    assert explained.code == 0
    assert explained.out == placed.out


def test_a_vm_that_does_not_fit_gets_every_change_that_helps(kvplace: Caller, tmp_path: Path) -> None:
    other = _vm("other", 2, cpu_set="any")
    file = _file(tmp_path, _vm("big", 20, cpu_set="one-l3"), other)
    called = kvplace("explain", "vm/big", "-f", file, *MACHINE)
    assert called.code == 3
    first, *lines = called.out.splitlines()
    assert first.startswith("VirtualMachine big does not fit on 2x-epyc-9354: no L3 group with 20 free CPUs")
    document = json.loads(kvplace("explain", "vm/big", "-f", file, *MACHINE, "-o", "json").out)
    changes = [change["message"] for change in document["refusal"]["suggestions"]]
    assert [line.strip() for line in lines[1:]] == changes
    assert {"cpuSet", "vcpus"} <= {change["change"] for change in document["refusal"]["suggestions"]}
    assert "contains 2 VMs" in kvplace("explain", "-f", file, *MACHINE).err


def test_an_instancetype_may_be_in_another_file(kvplace: Caller, tmp_path: Path) -> None:
    sized = _vm("sized", 1, cpu_set="one-numa")
    del (
        sized["spec"]["template"]["spec"]["domain"]["cpu"],
        sized["spec"]["template"]["spec"]["domain"]["memory"],
    )
    sized["spec"]["instancetype"] = {"name": "six", "kind": "VirtualMachineInstancetype"}
    size = tmp_path / "size.yaml"
    size.write_text(
        yaml.safe_dump(
            {
                "kind": "VirtualMachineInstancetype",
                "metadata": {"name": "six"},
                "spec": {"cpu": {"guest": 6}, "memory": {"guest": "4Gi"}},
            }
        )
    )
    called = kvplace("explain", "-f", _file(tmp_path, sized), "-f", str(size), *MACHINE)
    assert (called.code, called.out.splitlines()[0]) == (
        0,
        "VirtualMachine sized fits on 2x-epyc-9354: 6 vCPUs, 4Gi",
    )


def test_a_vm_that_did_not_opt_in_gets_the_annotation_that_was_meant(kvplace: Caller, tmp_path: Path) -> None:
    file = _file(tmp_path, _vm("web", 2, cpuset="one-l3"))
    called = kvplace("explain", "-f", file, *MACHINE)
    assert called.code == 0
    assert "annotation cpuset has no effect: did you mean cpu-set?" in called.out
    document = json.loads(kvplace("explain", "-f", file, *MACHINE, "-o", "json").out)
    assert document == {"notes": called.out.splitlines()}


@pytest.mark.parametrize("more", [("vm/web",), ("-f", "vm-templates/web-server.yaml", "--context", "x")])
def test_a_machine_explains_a_file_and_no_cluster(kvplace: Caller, more: tuple[str, ...]) -> None:
    called = kvplace("explain", *more, *MACHINE)
    assert called.code == 2
    assert "--topology explains a VM of -f without a cluster" in called.err


def test_a_file_without_cluster_and_machine_names_both_ways(kvplace: Caller, tmp_path: Path) -> None:
    called = kvplace("explain", "-f", _file(tmp_path, _vm("web", 4)))
    assert called.code == 1
    assert "name a kubeconfig with --kubeconfig, or a machine with --topology" in called.err
