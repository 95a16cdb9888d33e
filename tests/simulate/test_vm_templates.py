"""The templates that users copy are valid VMs for KubeVirt and valid wishes for kvplace."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from kvplace.admission.settings import AdmissionSettings
from kvplace.admission.vm import review_vm
from kvplace.admission.vmi import admit_vmi
from kvplace.core.annotations import ASKING
from kvplace.simulate.vm_templates import read_templates
from tests.captured import captured_folder
from tests.simulate.structural_schema import violations

TEMPLATES = read_templates()


@pytest.fixture(scope="module")
def vm_schema() -> dict[str, Any]:
    path = captured_folder("kubevirt/crds") / "virtualmachines.kubevirt.io.yaml"
    definition = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    version = next(version for version in definition["spec"]["versions"] if version["name"] == "v1")
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return schema


@pytest.mark.parametrize("name", TEMPLATES)
def test_kubevirt_knows_every_field_of_a_template(name: str, vm_schema: dict[str, Any]) -> None:
    assert list(violations(TEMPLATES[name], vm_schema)) == []


def test_the_check_against_kubevirts_schema_finds_what_kubevirt_would_drop(vm_schema: dict[str, Any]) -> None:
    vm = read_templates()["database"]
    domain = vm["spec"]["template"]["spec"]["domain"]
    domain["cpu"]["cores"] = "16"
    domain["cpu"]["coers"] = 4
    domain["memory"]["guest"] = "64 Gi"
    del domain["devices"]["disks"][0]["name"]
    path = ".spec.template.spec.domain"
    found = [sentence.partition(" is ")[0] for sentence in violations(vm, vm_schema)]
    assert sorted(found) == sorted(
        [f"{path}.cpu.cores", f"{path}.cpu.coers", f"{path}.memory.guest", f"{path}.devices.disks[0].name"]
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_kvplace_admits_a_template_without_a_warning(name: str) -> None:
    vm = TEMPLATES[name]
    assert review_vm(vm, namespace="default").warnings == ()
    vmi = {**vm["spec"]["template"], "kind": "VirtualMachineInstance"}
    admitted = admit_vmi(vmi, namespace="default", settings=AdmissionSettings("hook:1"))
    assert admitted.warnings == ()
    assert "hooks.kubevirt.io/hookSidecars" in admitted.object["metadata"]["annotations"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_named_as_its_file_and_its_disks_have_volumes(name: str) -> None:
    vm = TEMPLATES[name]
    spec = vm["spec"]["template"]["spec"]
    assert vm["metadata"]["name"] == name
    assert {disk["name"] for disk in spec["domain"]["devices"]["disks"]} == {
        v["name"] for v in spec["volumes"]
    }


def test_between_them_the_templates_show_most_of_what_can_be_asked_for() -> None:
    asked = {
        (key, value)
        for vm in TEMPLATES.values()
        for key, value in vm["spec"]["template"]["metadata"]["annotations"].items()
        if key in ASKING
    }
    values = {value for _, value in asked}
    assert {"one-socket", "one-numa", "one-l3", "any", "share", "immovable", "require", "isolate"} <= values
    assert {"cpu-set", "kvplace.io/on-failure", "topology.crane.io/cpu-policy"} <= {key for key, _ in asked}
