"""A VM and its instancetype in one file give the request that KubeVirt's own expansion gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kvplace.admission.stated_request import expanded, stated_request
from kvplace.core.errors import Misconfigured
from kvplace.core.request import EmulatorThreads, Request, Scope, Smt
from kvplace.core.scalars import Bytes
from tests.admission.reviewed_objects import Json, vm

FOLDER = Path("vm-templates/instancetypes")
OFFERED = list(yaml.safe_load_all((FOLDER / "instancetypes.yaml").read_text()))


def _template(name: str) -> Json:
    found: Json = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    return found


def _request_of(vm: Json, beside: list[Json] | None = None) -> Request:
    stated = stated_request(expanded(vm, OFFERED if beside is None else beside))
    assert stated is not None
    return stated.request


def test_size_huge_pages_and_annotations_come_from_the_instancetype() -> None:
    request = _request_of(_template("network-function"))
    assert (request.vcpus, request.memory) == (8, 16 << 30)
    assert dict(request.huge_pages) == {Bytes(1 << 30): 16}
    assert request.options.scope is Scope.ONE_NUMA
    assert request.options.smt is Smt.REQUIRE
    assert request.options.emulator_threads is EmulatorThreads.ISOLATE


def test_its_io_threads_policy_counts() -> None:
    assert _request_of(_template("in-memory-database")).io_threads == 1


def test_an_instancetype_of_the_namespace_is_chosen_by_its_kind() -> None:
    namespaced = {**OFFERED[0], "kind": "VirtualMachineInstancetype"}
    small = _template("database")
    small["spec"]["instancetype"] = {"name": "numa.4x16", "kind": "virtualmachineinstancetype"}
    assert _request_of(small, [namespaced]).vcpus == 4
    with pytest.raises(Misconfigured, match=r"the instancetype 'numa.4x16', which is not in the files"):
        expanded(small, OFFERED)


def test_a_vm_without_an_instancetype_stays_as_it_is() -> None:
    assert expanded(vm(), OFFERED) == vm()


def test_another_kind_is_refused_with_the_kinds_that_exist() -> None:
    wrong = _template("database")
    wrong["spec"]["instancetype"]["kind"] = "Flavor"
    with pytest.raises(
        Misconfigured, match=r"kind is 'Flavor'; it must be VirtualMachineClusterInstancetype or"
    ):
        expanded(wrong, OFFERED)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("spec", "domain", "cpu"), {"cores": 2}, "spec.template.spec.domain.cpu.cores"),
        (("spec", "domain", "memory"), {"guest": "1Gi"}, "spec.template.spec.domain.memory.guest"),
        (("metadata", "annotations"), {"cpu-set": "any"}, "annotations.cpu-set"),
    ],
)
def test_an_instancetype_that_kubevirt_refuses_is_refused(
    path: tuple[str, ...], value: Any, named: str
) -> None:
    conflicting = _template("database")
    at = conflicting["spec"]["template"]
    for key in path[:-1]:
        at = at.setdefault(key, {})
    at[path[-1]] = value
    with pytest.raises(Misconfigured, match=rf"{named} is set by the VM and by its instancetype 'numa.8x32'"):
        expanded(conflicting, OFFERED)


@pytest.mark.parametrize("spec", [None, [], {"instancetype": "big"}])
def test_a_spec_of_another_shape_has_no_instancetype(spec: Any) -> None:
    malformed = {"kind": "VirtualMachine", "spec": spec}
    assert expanded(malformed, [{"kind": 5, "spec": 7}, *OFFERED]) == malformed
