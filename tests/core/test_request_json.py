"""The annotation `kvplace.io/request`: the extender reads what admission writes and refuses anything else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.errors import BadAnnotation
from kvplace.core.request import (
    DeviceNuma,
    EmulatorThreads,
    GuestNuma,
    NumaMemory,
    OnFailure,
    PinningOptions,
    Policy,
    Request,
    Scope,
    Smt,
)
from kvplace.core.request_json import PodRequest, read_pod_request, write_request
from kvplace.core.scalars import Bytes, ResourceName
from tests.core.invalid_input import DEEP_OR_LONG, answer_or_sentence, disturbed, texts
from tests.core.machines import requests

GIB = Bytes(1 << 30)


def options() -> st.SearchStrategy[PinningOptions]:
    """Any options, also impossible ones."""
    return st.builds(
        PinningOptions,
        *(
            st.sampled_from([*values])
            for values in (Scope, Policy, Smt, EmulatorThreads, NumaMemory, GuestNuma, DeviceNuma, OnFailure)
        ),
    )


pod_requests = st.builds(
    PodRequest,
    requests().flatmap(
        lambda request: st.builds(
            Request,
            vcpus=st.just(request.vcpus),
            options=options(),
            memory=st.just(request.memory),
            huge_pages=st.dictionaries(st.sampled_from([1 << 21, GIB]), st.integers(1, 1 << 40)),
            io_threads=st.integers(0, 256),
            devices=st.dictionaries(
                st.sampled_from(["intel.com/vf", "nvidia.com/GA100"]), st.integers(1, 64)
            ),
        )
    ),
    vmi=st.sampled_from(["", "default/db", "ns/a-b-c"]),
    explain=st.booleans(),
    movable=st.booleans(),
    may_migrate=st.booleans(),
    make_room=st.booleans(),
    crane_result=st.booleans(),
)

VF = {ResourceName("intel.com/vf"): 2}
DOCUMENT: dict[str, Any] = json.loads(
    write_request(
        PodRequest(Request(8, memory=8 * GIB, huge_pages={GIB: 8}, io_threads=1, devices=VF), vmi="ns/name")
    )
)


@given(pod_requests)
def test_a_request_written_and_read_is_the_same_request(pod: PodRequest) -> None:
    text = write_request(pod)
    assert "\n" not in text
    assert read_pod_request(text) == pod


def test_the_request_is_written_in_the_words_of_its_contract() -> None:
    assert DOCUMENT == {
        "version": 1,
        "vcpus": 8,
        "cpuSet": "one-socket",
        "policy": "exclusive",
        "smt": "prefer",
        "emulatorThreads": "shared",
        "numaMemory": "preferred",
        "guestNuma": "off",
        "deviceNuma": "preferred",
        "onFailure": "wait",
        "memory": 8 * GIB,
        "hugepages": {"1Gi": 8},
        "ioThreads": 1,
        "devices": {"intel.com/vf": 2},
        "vmi": "ns/name",
        "explain": False,
        "craneResult": False,
    }


def test_keys_of_later_versions_are_ignored() -> None:
    assert read_pod_request(json.dumps(DOCUMENT | {"later": {"a": 1}})) == read_pod_request(
        json.dumps(DOCUMENT)
    )


@pytest.mark.parametrize(
    ("change", "fix"),
    [
        ({"version": 2}, "must be an object of version 1; only pod admission writes it"),
        ({"version": True}, "must be an object of version 1; only pod admission writes it"),
        ({"vcpus": 0}, "vcpus is 0; it must be a whole number from 1 to 4096"),
        ({"vcpus": 4097}, "vcpus is 4097; it must be a whole number from 1 to 4096"),
        ({"vcpus": 8.0}, "vcpus is 8.0; it must be a whole number from 1 to 4096"),
        ({"vcpus": True}, "vcpus is true; it must be a whole number from 1 to 4096"),
        ({"cpuSet": "one"}, "cpuSet is 'one'; it must be one of one-socket, one-numa, one-l3, "),
        ({"cpuSet": ["any"]}, "cpuSet is ['any']; it must be one of "),
        ({"memory": -1}, "memory: -1 is negative"),
        ({"memory": 1.5}, "memory is 1.5; it must be a quantity such as 8Gi"),
        ({"hugepages": [8]}, "hugepages is [8]; it must be an object of counts by page size"),
        ({"hugepages": {"1Gb": 8}}, "hugepages: '1Gb' is not a quantity such as 8Gi, 512Mi, 4 or 500m"),
        ({"hugepages": {"1Gi": -8}}, "hugepages['1Gi'] is -8; it must be a whole number from 0 to "),
        ({"hugepages": {"0": 8}}, "hugepages: '0' is not a page size; write 2Mi or 1Gi"),
        ({"hugepages": {"1Gi": 8, "1024Mi": 4}}, "hugepages has pages of 1Gi twice; write one count of them"),
        (
            {"deviceNuma": "legacy"},
            "deviceNuma is 'legacy'; it must be one of preferred, required, socket, off",
        ),
        (
            {"devices": ["intel.com/vf"]},
            "devices is ['intel.com/vf']; it must be an object of counts by resource ",
        ),
        ({"devices": {"vf": 1}}, "devices: 'vf' is not the resource of a device, such as intel.com/vf"),
        (
            {"devices": {"devices.kubevirt.io/kvm": 1}},
            "devices: 'devices.kubevirt.io/kvm' is not the resource of ",
        ),
        ({"devices": {"kvplace.io/vm": 1}}, "devices: 'kvplace.io/vm' is not the resource of a device"),
        ({"devices": {"hugepages.kubernetes.io/1": 1}}, "devices: 'hugepages.kubernetes.io/1' is not the "),
        (
            {"devices": {"intel.com/vf": -1}},
            "devices['intel.com/vf'] is -1; it must be a whole number from 0 to ",
        ),
        (
            {"devices": {"intel.com/vf": True}},
            "devices['intel.com/vf'] is true; it must be a whole number from 0 ",
        ),
        ({"devices": {f"a.com/{n}": 1 for n in range(65)}}, "devices has 65 resources, more than 64"),
        ({"vmi": 7}, "vmi is 7; it must be a string"),
    ],
    ids=str,
)
def test_a_field_that_cannot_be_meant_is_named(change: dict[str, Any], fix: str) -> None:
    with pytest.raises(BadAnnotation) as caught:
        read_pod_request(json.dumps(DOCUMENT | change))
    assert caught.value.fix.startswith(fix)
    assert str(caught.value).startswith("annotation kvplace.io/request: ")


@given(texts | disturbed(DOCUMENT).map(json.dumps))
def test_any_text_is_either_a_request_or_one_sentence(text: str) -> None:
    pod, sentence = answer_or_sentence(read_pod_request, text, BadAnnotation)
    assert pod is not None or sentence.startswith("annotation kvplace.io/request: ")
    if pod is not None:
        assert read_pod_request(write_request(pod)) == pod


@pytest.mark.parametrize("text", [*DEEP_OR_LONG, " " * 20_000], ids=lambda text: text[:12])
def test_text_that_is_deep_or_long_is_not_a_crash(text: str) -> None:
    with pytest.raises(BadAnnotation):
        read_pod_request(text)
