"""The request of a VM, VMI or pod is read before it is created, exactly as admission will store it."""

from __future__ import annotations

from typing import Any

import pytest

from kvplace.admission.stated_request import stated_request
from kvplace.core.errors import BadAnnotation, BadBody, Misconfigured
from kvplace.core.request import EmulatorThreads, Policy
from tests.admission.pod_admission import admit, launcher
from tests.admission.reviewed_objects import ASKS, Json, plain_pod, vm, vmi, vmi_of, written_request

DOMAINS: tuple[Json, ...] = (
    {},
    {"cpu": {"sockets": 2, "cores": 3, "threads": 2}, "ioThreadsPolicy": "shared"},
    {"memory": {"guest": "8Gi", "hugepages": {"pageSize": "1Gi"}}},
    {"cpu": {}, "resources": {"limits": {"cpu": "3"}, "requests": {"memory": "1Gi"}}},
)


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize(
    "annotations",
    [ASKS, {"kvplace.io/cpu-policy": "share", "kvplace.io/explain": "true"}, {"cpu-set": "one-l3"}],
)
def test_a_vmi_states_the_request_that_its_pod_gets(domain: Json, annotations: dict[str, str]) -> None:
    pod = launcher(annotations=annotations)
    owner = vmi_of(pod, **domain)
    owner["metadata"]["annotations"] = annotations
    stored = written_request(admit(pod, owner)[0])
    assert stated_request(owner) == stored


@pytest.mark.parametrize(
    ("number", "text"), [(0.5, "500m"), (2.0, "2"), (2.5, "2500m"), (1.5e9, "1500M"), (5e-07, "500n")]
)
def test_an_amount_that_yaml_reads_as_a_number_with_a_point_is_the_amount(number: float, text: str) -> None:
    assert stated_request(vm(resources={"requests": {"cpu": number}})) is not None
    for make in (vmi, vm):
        by_number, by_text = (
            stated_request(
                make(cpu=None, memory={"guest": amount}, resources={"requests": {"memory": amount}})
            )
            for amount in (number, text)
        )
        assert by_number == by_text
    pods = [plain_pod(ASKS, {"limits": {"cpu": 2.0, "memory": amount}}) for amount in (number, text)]
    assert stated_request(pods[0]) == stated_request(pods[1])


def test_a_vm_gives_the_request_of_its_vmi() -> None:
    assert stated_request(vm()) == stated_request(vmi())


def test_a_plain_pod_states_the_request_that_it_gets_and_nothing_that_needs_a_vm() -> None:
    pod = plain_pod({"cpu-set": "one-numa", "kvplace.io/emulator-threads": "isolate"})
    stated = stated_request(pod)
    assert stated == written_request(admit(pod)[0])
    assert stated is not None
    assert stated.request.options.emulator_threads is EmulatorThreads.WITH_VCPUS


@pytest.mark.parametrize(
    "annotations", [None, {}, {"team": "db"}, {"kvplace.io/cpu-policy": Policy.NONE.value}]
)
@pytest.mark.parametrize("make", [vmi, vm, plain_pod])
def test_an_object_that_has_not_opted_in_gives_no_request(
    make: Any, annotations: dict[str, str] | None
) -> None:
    assert stated_request(make(annotations)) is None


@pytest.mark.parametrize("make", [vmi, vm, plain_pod])
def test_an_object_that_admission_would_refuse_is_refused_with_the_same_sentence(make: Any) -> None:
    with pytest.raises(BadAnnotation, match="did you mean 'one-numa'"):
        stated_request(make({"cpu-set": "one-num"}))


def test_an_annotation_or_label_that_is_not_text_is_named_with_the_fix() -> None:
    pod = plain_pod()
    pod["metadata"]["labels"] = {"app": "db", "tier": 5}
    odd: Any = {**ASKS, "kvplace.io/explain": True}
    for raw, sentence in (
        (vm(odd), "VirtualMachine db: spec.template.metadata.annotations.kvplace.io/explain is true"),
        (vmi(odd), "VirtualMachineInstance db: metadata.annotations.kvplace.io/explain is true"),
        (pod, "Pod solver: metadata.labels.tier is 5"),
    ):
        with pytest.raises(BadBody) as refused:
            stated_request(raw)
        assert str(refused.value) == f"{sentence}; it must be a string, so quote it"


def test_a_size_that_is_written_elsewhere_is_not_guessed() -> None:
    small = vm()
    small["spec"]["instancetype"] = {"name": "u1.small"}
    with pytest.raises(Misconfigured, match="virtctl expand"):
        stated_request(small)


@pytest.mark.parametrize("kind", [None, "Deployment", 3])
def test_another_kind_is_named(kind: object) -> None:
    with pytest.raises(BadBody, match="it must be VirtualMachine, VirtualMachineInstance or Pod"):
        stated_request({"kind": kind})
