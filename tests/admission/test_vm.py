"""VirtualMachines when they are created and changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from kvplace.admission.vmi import review_vm
from kvplace.core.errors import Misconfigured
from tests.admission.reviewed_objects import ASKS, Json, vm

DEDICATED: Json = {"cpu": {"cores": 4, "dedicatedCpuPlacement": True}}
CONFLICT = (
    "VirtualMachine default/db: spec.template.spec.domain.cpu.dedicatedCpuPlacement and annotation cpu-set: "
    "'one-numa' exclude each other, because the kubelet and KubeVirt would overwrite kvplace's "
    "pinning; remove one of the two"
)


def warnings(raw: Json, **given: Any) -> tuple[str, ...]:
    before = copy.deepcopy(raw)
    admitted = review_vm(raw, namespace="default", **given)
    assert admitted.object == before
    return admitted.warnings


def refusal(raw: Json, **given: Any) -> str:
    with pytest.raises(Misconfigured) as refused:
        review_vm(raw, namespace="default", **given)
    return str(refused.value)


@pytest.mark.parametrize("annotations", [None, {}, {"other.io/key": "x"}, {"kvplace.io/cpu-policy": "none"}])
def test_a_vm_without_options_is_allowed(annotations: dict[str, str] | None) -> None:
    assert warnings(vm(annotations, **DEDICATED), largest_node=1) == ()


def test_a_template_without_metadata_passes() -> None:
    raw = vm(None)
    del raw["spec"]["template"]["metadata"]
    assert warnings(raw) == ()


def test_the_vmi_is_checked_when_the_vm_is_applied() -> None:
    assert warnings(vm()) == ()
    assert refusal(vm(**DEDICATED)) == CONFLICT
    assert refusal(vm({"cpu-set": "near"})).startswith(
        "annotation cpu-set: 'near': must be one of one-socket, "
    )
    assert refusal(vm(memory={"guest": "x"})) == (
        "VirtualMachine default/db: spec.template.spec.domain.memory.guest: 'x' is not a quantity such as "
        "8Gi, 512Mi, 4 or 500m"
    )
    assert warnings(vm(), largest_node=2) == (
        "4 vCPUs are more than the allocatable CPUs of any known machine (largest: 2)",
    )


def test_annotations_on_the_vm_itself_give_a_warning_that_names_the_template() -> None:
    raw = vm(None)
    raw["metadata"]["annotations"] = {"cpu-set": "one-numa", "kvplace.io/smt": "require", "other.io/key": "x"}
    assert warnings(raw) == (
        "annotation cpu-set has no effect here; move it to spec.template.metadata.annotations of the VM",
        (
            "annotation kvplace.io/smt has no effect here; move it to spec.template.metadata.annotations of "
            "the VM"
        ),
    )


def test_a_modifier_alone_gives_a_warning_and_its_vm_is_left_alone() -> None:
    raw = vm(None)
    raw["spec"]["template"]["metadata"] = {"annotations": {"kvplace.io/explain": "false"}}
    assert warnings(raw) == (
        "annotation kvplace.io/explain has no effect alone: add cpu-set: one-socket to request cores",
    )


def test_a_vm_that_was_wrong_before_can_still_be_changed_with_a_warning() -> None:
    old, new = vm(**DEDICATED), vm(**DEDICATED)
    new["spec"]["runStrategy"] = "Halted"
    assert warnings(new, old=old) == (CONFLICT,)
    for raw in (old, new):
        del raw["metadata"]["namespace"]
    assert warnings(new, old=old) == (CONFLICT,)


def test_a_vm_that_becomes_wrong_is_refused() -> None:
    assert refusal(vm(**DEDICATED), old=vm()) == CONFLICT
    assert refusal(vm(**DEDICATED), old=vm({"cpu-set": "near"}, **DEDICATED)) == CONFLICT


def test_a_vm_that_is_being_deleted_is_always_allowed() -> None:
    raw = vm(**DEDICATED)
    raw["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert warnings(raw, old=vm(ASKS)) == ()


def test_a_vm_with_a_field_of_the_wrong_type_is_refused_with_its_path() -> None:
    assert refusal(vm(cpu=[])) == (
        "VirtualMachine db: spec.template.spec.domain.cpu: expected object, got array"
    )


SHARES: Json = {"cpu-set": "one-numa", "kvplace.io/cpu-policy": "share"}


def limited(annotations: Json, sockets: int, limit: str | None) -> Json:
    resources = {"limits": {"cpu": limit}} if limit else {}
    return vm(annotations, cpu={"sockets": sockets, "maxSockets": 16}, resources=resources)


def test_a_vm_that_grows_under_a_cpu_limit_gets_a_warning_with_the_limit_that_kubevirt_will_set() -> None:
    assert warnings(limited(SHARES, 8, "4"), old=limited(SHARES, 4, "4")) == (
        (
            "VirtualMachine default/db: spec.template.spec.domain.resources.limits.cpu: KubeVirt raises the "
            "limit 4 of the running VM to 4.4, so its 8 vCPUs share 4.4 CPUs until it restarts; set the "
            "limit to 8 and restart the VM, or remove the limit"
        ),
    )


@pytest.mark.parametrize(
    ("new", "old"),
    [
        (limited(SHARES, 8, "8"), limited(SHARES, 4, "4")),
        (limited(SHARES, 8, None), limited(SHARES, 4, None)),
        (limited(SHARES, 4, "2"), limited(SHARES, 4, "2")),
        (limited(SHARES, 2, "1"), limited(SHARES, 4, "1")),
        (limited({"kvplace.io/cpu-policy": "none"}, 8, "4"), limited(SHARES, 4, "4")),
        (limited({"other.io/key": "x"}, 8, "4"), limited(SHARES, 4, "4")),
    ],
    ids=["limit grows too", "no limit", "same size", "shrinks", "policy none", "not opted in"],
)
def test_a_limit_that_throttles_no_more_than_before_gets_no_warning(new: Json, old: Json) -> None:
    assert warnings(new, old=old) == ()


def test_the_limit_of_a_growing_vm_that_owns_its_cores_is_raised_with_the_warning_of_every_vm() -> None:
    assert warnings(limited(ASKS, 8, "4"), old=limited(ASKS, 4, "4")) == (
        "the CPU limit 4 is raised to 8 in the pod, which must request as much for its CPUs",
    )
