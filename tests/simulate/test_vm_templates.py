"""The templates that users copy are valid VMs for KubeVirt and valid requests for kvplace."""

from __future__ import annotations

from typing import Any

import pytest

from kvplace.admission.objects import AdmissionSettings
from kvplace.admission.vmi import admit_vmi, review_vm
from kvplace.core.allocator.allocate import place
from kvplace.core.annotations import read_options
from kvplace.core.free_resources import free_of
from kvplace.core.ledger import Ledger
from kvplace.core.placement import Placement, Refusal
from kvplace.core.request import Request
from kvplace.core.well_known_names import ASKING
from kvplace.machines.server_types import SERVER_TYPES, read_machine
from kvplace.simulate.demo_vms import read_templates, size_of
from tests.json_schema import violations

TEMPLATES = read_templates()


@pytest.fixture(scope="module")
def vm_schema(kubevirt_crds: dict[str, dict[str, Any]]) -> dict[str, Any]:
    versions = kubevirt_crds["virtualmachines.kubevirt.io"]["spec"]["versions"]
    version = next(version for version in versions if version["name"] == "v1")
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return schema


@pytest.mark.parametrize("name", TEMPLATES)
def test_kubevirt_knows_every_field_of_a_template(name: str, vm_schema: dict[str, Any]) -> None:
    assert list(violations(TEMPLATES[name], vm_schema)) == []


def test_the_check_against_kubevirts_schema_finds_fields_that_kubevirt_would_drop(
    vm_schema: dict[str, Any],
) -> None:
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


def test_the_templates_together_use_most_annotations() -> None:
    asked = {
        (key, value)
        for vm in TEMPLATES.values()
        for key, value in vm["spec"]["template"]["metadata"]["annotations"].items()
        if key in ASKING
    }
    values = {value for _, value in asked}
    assert {"one-socket", "one-numa", "one-l3", "spread-numa", "any"} <= values
    assert {"share", "numa", "immovable", "require", "isolate", "mirror"} <= values
    assert {"cpu-set", "kvplace.io/on-failure", "topology.crane.io/cpu-policy"} <= {key for key, _ in asked}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_fits_on_at_least_half_of_the_well_known_servers(name: str) -> None:
    fitting = [server.name for server in SERVER_TYPES if isinstance(_placed(name, server.name), Placement)]
    assert len(fitting) >= len(SERVER_TYPES) // 2, fitting


def test_the_database_that_mirrors_the_host_gets_several_equal_guest_cells_on_some_server() -> None:
    seen = set()
    for server in SERVER_TYPES:
        placement = _placed("in-memory-database", server.name)
        if isinstance(placement, Placement):
            assert len({(len(cell.vcpus), cell.threads) for cell in placement.guest_cells}) == 1
            assert len({cell.node for cell in placement.guest_cells}) == len(placement.guest_cells)
            seen.add(len(placement.guest_cells))
    assert max(seen) > 1


def _placed(template: str, server: str) -> Placement | Refusal:
    """Place a template's VM on a free server."""
    spec = TEMPLATES[template]["spec"]["template"]
    options = read_options(spec["metadata"]["annotations"])
    assert options is not None
    size = size_of({"metadata": {"name": template}, "spec": spec["spec"]})
    request = Request(size.vcpus, options, memory=size.memory, huge_pages=size.huge_pages)
    topology = read_machine(server)
    return place(topology, free_of(topology, Ledger()), request)
