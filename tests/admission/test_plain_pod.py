"""Pods without a VM at creation, and whatever else may be reported in one."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.admission.pod import admit_pod
from kvplace.core.errors import KvplaceError, Misconfigured
from kvplace.core.quantity import parse_quantity
from kvplace.core.request import EmulatorThreads, GuestNuma, PinningOptions, Policy, Request, Scope
from kvplace.core.scalars import Bytes
from kvplace.core.well_known_names import ASKING, RESULTS
from tests.admission.pod_admission import admit, cpu, patch_for, refusal
from tests.admission.reviewed_objects import (
    ASKS,
    SETTINGS,
    Json,
    as_defaulted,
    container,
    plain_pod,
    written_request,
)

FLOATS = {**ASKS, "kvplace.io/on-failure": "float"}
NO_QUANTITY = "is not a quantity such as 8Gi, 512Mi, 4 or 500m"
ISOLATES = {**ASKS, "kvplace.io/emulator-threads": "isolate"}


FORGED_SIZE = {**ASKS, "kvplace.io/vm-size": '{"vcpus":6,"memory":1073741824,"ioThreads":2}'}
BY_KUBEVIRT = SETTINGS.kubevirt_controller


@pytest.mark.parametrize("labels", [{}, {"kubevirt.io": "hotplug-disk"}], ids=str)
def test_a_plain_pod_of_virt_controller_with_a_size_of_a_vm_is_as_large_as_its_limits(
    labels: dict[str, str],
) -> None:
    raw = plain_pod(FORGED_SIZE)
    raw["metadata"]["labels"] = {"kvplace.io/opted-in": "true", **labels}
    after, _ = admit(raw, author=BY_KUBEVIRT)
    written = written_request(after)
    assert (written.request.vcpus, written.request.memory, written.request.io_threads) == (4, 8 << 30, 0)
    assert written.vmi == ""
    assert "kvplace.io/vm-size" not in after["metadata"]["annotations"]


def test_a_launcher_pod_of_virt_controller_without_a_vmi_is_refused_with_a_size_of_a_vm_too() -> None:
    raw = plain_pod(FORGED_SIZE)
    raw["metadata"]["labels"] = {"kvplace.io/opted-in": "true", "kubevirt.io": "virt-launcher"}
    with pytest.raises(Misconfigured, match="no VirtualMachineInstance controls it"):
        admit(raw, author=BY_KUBEVIRT)


def test_a_plain_pod_is_as_large_as_the_limits_of_its_containers() -> None:
    raw = plain_pod(
        ISOLATES,
        {"limits": {"cpu": "4", "memory": "8Gi"}, "requests": {"cpu": "1"}},
        {"requests": {"cpu": "100m", "memory": "1Gi"}},
        {"limits": {"cpu": 2, "hugepages-1Gi": "2Gi"}, "requests": {"cpu": "2"}},
    )
    after, warnings = admit(raw)
    written = written_request(after)
    assert written.request == Request(
        vcpus=6,
        options=PinningOptions(scope=Scope.ONE_NUMA, emulator_threads=EmulatorThreads.WITH_VCPUS),
        memory=Bytes(11 << 30),
        huge_pages={Bytes(1 << 30): 2},
    )
    assert written.vmi == ""
    assert [cpu(after, f"c{index}") for index in range(3)] == ["4", "100m", "2"]
    assert warnings == ("annotation kvplace.io/emulator-threads has no effect on a pod without a VM",)
    assert "volumes" not in after["spec"]


@pytest.mark.parametrize(
    ("limits", "pages"),
    [
        ([{"hugepages-2Mi": "2Mi"}], {2 << 20: 1}),
        ([{"hugepages-2Mi": "3Mi"}], {2 << 20: 2}),
        ([{"hugepages-1Gi": "1"}, {"hugepages-1Gi": "1Gi"}], {1 << 30: 2}),
        ([{"hugepages-1Gi": "1Gi"}, {"hugepages-2Mi": "2049Ki"}], {1 << 30: 1, 2 << 20: 2}),
        ([{"hugepages-2Mi": "0"}], {}),
    ],
)
def test_a_plain_pod_gets_whole_huge_pages_rounded_up_for_each_container(
    limits: list[Json], pages: dict[int, int]
) -> None:
    containers = [{"limits": {"cpu": "1", **amounts}} for amounts in limits]
    assert written_request(admit(plain_pod(ASKS, *containers))[0]).request.huge_pages == pages


def test_a_plain_pod_has_no_guest_numa_cells() -> None:
    after, warnings = admit(plain_pod({**ASKS, "kvplace.io/guest-numa": "mirror"}))
    assert written_request(after).request.options.guest_numa is GuestNuma.OFF
    assert warnings == ("annotation kvplace.io/guest-numa has no effect on a pod without a VM",)


def test_a_plain_pod_with_only_limits_needs_no_change_of_its_requests() -> None:
    paths = sorted(entry["path"] for entry in patch_for(plain_pod()))
    assert paths == [
        "/metadata/annotations/kvplace.io~1request",
        "/metadata/labels",
        "/spec/containers/0/resources/limits/kvplace.io~1vm",
        "/spec/containers/0/resources/requests",
        "/spec/schedulerName",
    ]
    assert container(admit(plain_pod())[0], "c0")["resources"]["requests"] == {"kvplace.io/vm": "0"}


@pytest.mark.parametrize(
    ("resources", "sentence"),
    [
        (
            [{"limits": {"cpu": "1500m"}}],
            (
                "Pod default/solver: container c0: CPU limit '1500m' must be a whole number, because the pod "
                "requests CPUs of its own; write 2, or remove the limit"
            ),
        ),
        (
            [{"limits": {"cpu": "2"}}, {"limits": {"cpu": "200m"}}],
            (
                "Pod default/solver: container c1: CPU limit '200m' must be a whole number, because the pod "
                "requests CPUs of its own; write 1, or remove the limit"
            ),
        ),
        (
            [{"limits": {"cpu": "2", "memory": "much"}}],
            f"Pod default/solver: container c0: memory: 'much' {NO_QUANTITY}",
        ),
        (
            [{"limits": {"cpu": "2"}}, {"limits": {"hugepages-2Mi": "all"}}],
            f"Pod default/solver: container c1: hugepages-2Mi: 'all' {NO_QUANTITY}",
        ),
        (
            [{"limits": {"cpu": "2", "hugepages-big": "2Mi"}}],
            f"Pod default/solver: container c0: hugepages-big: 'big' {NO_QUANTITY}",
        ),
        (
            [{"limits": {"cpu": "2"}, "requests": {"cpu": "some"}}],
            f"Pod default/solver: container c0: CPU: 'some' {NO_QUANTITY}",
        ),
        (
            [{"requests": {"cpu": "2"}}],
            (
                "Pod default/solver requests CPUs of its own, but no container has a CPU limit; set "
                "spec.containers[].resources.limits.cpu to the number of CPUs"
            ),
        ),
        (
            [{"limits": {"cpu": "5000"}}],
            "Pod default/solver is limited to 5000 CPUs; kvplace gives at most 4096",
        ),
        (
            [{"limits": {"cpu": "lots"}}],
            (
                "Pod default/solver: container c0: CPU limit 'lots': 'lots' is not a quantity such as 8Gi, "
                "512Mi, 4 or 500m"
            ),
        ),
        (
            [{"limits": {"cpu": "1", "memory": "-1"}}],
            "Pod default/solver: container c0: memory: '-1' is negative",
        ),
        (
            [{"limits": {"cpu": "1", "hugepages-big": "1Gi"}}],
            (
                "Pod default/solver: container c0: hugepages-big: 'big' is not a quantity such as 8Gi, "
                "512Mi, 4 or 500m"
            ),
        ),
        (
            [{"limits": {"cpu": "1", "hugepages-1Gi": "-1"}}],
            "Pod default/solver: container c0: hugepages-1Gi: '-1' is negative",
        ),
        (
            [{"limits": {"cpu": "1", "hugepages-0": "1Gi"}}],
            "Pod default/solver: container c0: hugepages-0: the page size must not be 0",
        ),
        (
            [{"limits": {"cpu": "1", "memory": "2Ei"}}],
            "Pod default/solver: container c0: memory: '2Ei' is more than 1Ei",
        ),
        (
            [{"limits": {"cpu": "1", "memory": "1Ei"}}, {"limits": {"memory": "1"}}],
            "Pod default/solver: its containers have 1152921504606846977 bytes of memory, more than 1Ei",
        ),
        (
            [{"limits": {"cpu": "1", "hugepages-1": "1Ei"}}],
            (
                "Pod default/solver: container c0: hugepages-1: 1152921504606846976 pages are more than "
                "1099511627776; use larger ones"
            ),
        ),
    ],
)
def test_a_plain_pod_whose_cpus_cannot_be_counted_is_refused(resources: list[Json], sentence: str) -> None:
    assert refusal(plain_pod(ASKS, *resources)) == sentence


@pytest.mark.parametrize("limits", [["4096"], ["4000", "96", "0"]])
def test_a_plain_pod_may_have_as_many_cpus_as_any_vm_and_containers_with_a_limit_of_0(
    limits: list[str],
) -> None:
    raw = plain_pod(ASKS, *({"limits": {"cpu": limit}} for limit in limits))
    assert written_request(admit(raw)[0]).request.vcpus == 4096


def test_a_plain_pod_with_float_and_a_bad_limit_is_refused() -> None:
    assert "must be a whole number" in refusal(plain_pod(FLOATS, {"limits": {"cpu": "1500m"}}))


def test_a_pod_without_containers_is_refused_with_the_namespace_of_the_request() -> None:
    raw = plain_pod()
    raw["spec"]["containers"] = []
    with pytest.raises(Misconfigured, match=r"^Pod prod/solver requests CPUs but has no container; add one$"):
        admit_pod(raw, namespace="prod", settings=SETTINGS)


TWO = ({"limits": {"cpu": "4"}, "requests": {"cpu": "1"}}, {"limits": {"cpu": "2"}})


@pytest.mark.parametrize(
    ("whole", "requests"),
    [
        ({"requests": {"cpu": "3"}, "limits": {"cpu": "7"}}, {"cpu": "6750m"}),
        ({"requests": {"cpu": "9"}}, {"cpu": "9"}),
        ({"requests": {"memory": "1Gi"}}, {"memory": "1Gi"}),
        ({"limits": {"memory": "1Gi"}, "requests": None}, None),
    ],
    ids=str,
)
def test_a_plain_pod_requests_as_a_whole_no_less_than_its_containers(
    whole: Json, requests: Json | None
) -> None:
    init = {"name": "log", "restartPolicy": "Always", "resources": {"requests": {"cpu": "750m"}}}
    raw = plain_pod(ASKS, *TWO, resources=whole, initContainers=[init], overhead={"cpu": "1"})
    after, _ = admit(raw)
    assert after["spec"]["resources"].get("requests") == requests
    assert patch_for(after) == []


def test_a_plain_pod_that_is_limited_as_a_whole_to_less_than_its_cpus_is_refused() -> None:
    assert refusal(plain_pod(ASKS, *TWO, resources={"limits": {"cpu": "5"}})) == (
        "Pod default/solver: spec.resources.limits.cpu is 5, but the containers request 6 CPUs, because the "
        "pod requests CPUs of its own; set it to 6, or remove it"
    )


@pytest.mark.parametrize("policy", ["share", "immovable"])
def test_policies_that_own_nothing_leave_the_requests_of_a_plain_pod_alone(policy: str) -> None:
    raw = plain_pod({"kvplace.io/cpu-policy": policy}, {"limits": {"cpu": "4"}, "requests": {"cpu": "1"}})
    after, _ = admit(raw)
    assert cpu(after, "c0") == "1"
    assert written_request(after).request.options.policy is Policy(policy)


# Anything

amounts = st.sampled_from(["0", "1", "2", "500m", "8", "1Gi", "x", "-1", "1e3", 3])
quantities = st.none() | st.dictionaries(
    st.sampled_from(["cpu", "memory", "hugepages-2Mi", "hugepages-", "kvplace.io/vm"]), amounts, max_size=3
)
resources = st.fixed_dictionaries({}, optional={"requests": quantities, "limits": quantities})
words = st.sampled_from(
    ["one-numa", "exclusive", "share", "none", "true", "float", "isolate", "spread-numa", "?"]
)
options = st.dictionaries(st.sampled_from((*ASKING, *RESULTS)), words, max_size=4)


@given(options, st.lists(resources, max_size=3), st.none() | st.sampled_from(["", "volcano"]))
def test_any_plain_pod_is_refused_or_gets_a_valid_request(
    annotations: dict[str, str], given_resources: list[Json], scheduler: str | None
) -> None:
    raw = plain_pod(annotations, *given_resources, schedulerName=scheduler)
    before = copy.deepcopy(raw)
    try:
        after, _ = admit(raw)
    except KvplaceError:
        return
    finally:
        assert raw == before
    again = as_defaulted(after)
    assert patch_for(again) == []
    asks = "kvplace.io/placed" in after["metadata"].get("labels", {})
    assert asks is ("kvplace.io/request" in after["metadata"].get("annotations", {}))
    assert "kvplace.io/placement" not in after["metadata"].get("annotations", {})
    if not asks:
        assert after["spec"] == before["spec"]
    for old, new in zip(as_defaulted(before)["spec"]["containers"], again["spec"]["containers"], strict=True):
        _assert_not_lowered(old["resources"], new["resources"])


def _assert_not_lowered(old: Json, new: Json) -> None:
    before, after = ((entry.get("requests") or {}).get("cpu", "0") for entry in (old, new))
    # What the API server would refuse later stays as it is.
    assert before == after or parse_quantity(after) > parse_quantity(before)
    old_limits, new_limits = old.get("limits") or {}, new.get("limits") or {}
    assert {**new_limits, "kvplace.io/vm": "0"} == {**old_limits, "kvplace.io/vm": "0"}


def test_a_plain_pod_may_have_4096_cpus_and_containers_with_a_limit_of_none() -> None:
    after, _ = admit(plain_pod(ASKS, {"limits": {"cpu": "4096"}}, {"limits": {"cpu": "0"}}))
    assert written_request(after).request.vcpus == 4096


def test_cranes_spelling_is_noted_because_its_tools_expect_their_own_result() -> None:
    assert written_request(admit(plain_pod({"topology.crane.io/topology-awareness": "true"}))[0]).crane_result
    assert not written_request(admit(plain_pod(ASKS))[0]).crane_result


@pytest.mark.parametrize("policy", ["share", "immovable", "numa"])
def test_a_plain_pod_requests_at_least_a_tenth_of_the_cpus_that_it_shares(policy: str) -> None:
    asks = {**ASKS, "kvplace.io/cpu-policy": policy}
    amounts = ({"limits": {"cpu": "64"}, "requests": {"cpu": "1m"}}, {"requests": {"cpu": "1m"}})
    after, _ = admit(plain_pod(asks, *amounts))
    assert [entry["resources"]["requests"]["cpu"] for entry in after["spec"]["containers"]] == ["6400m", "1m"]


def test_a_pod_with_policy_none_that_names_its_node_stores_no_request_and_so_gets_no_cores_later() -> None:
    raw = plain_pod({"kvplace.io/cpu-policy": "none", "kvplace.io/request": "forged"}, nodeName="worker")
    after, _ = admit(raw)
    assert after["metadata"]["annotations"] == {"kvplace.io/cpu-policy": "none"}
    assert "labels" not in after["metadata"]
