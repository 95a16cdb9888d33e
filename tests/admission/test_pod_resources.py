"""The CPU request of a VM's pod covers all the CPUs that the VM will own."""

from __future__ import annotations

from fractions import Fraction

import pytest

from tests.admission.pod_admission import admit, cpu, effective_cpu, is_guaranteed, launcher, refusal
from tests.admission.reviewed_objects import ASKS, Json, container, vmi_of

ISOLATES = {**ASKS, "kvplace.io/emulator-threads": "isolate"}


@pytest.mark.parametrize(
    ("annotations", "owned"), [(ASKS, 4), (ISOLATES, 5), ({**ASKS, "kvplace.io/smt": "isolate"}, 4)]
)
@pytest.mark.parametrize("given", ["400m", "3985m", "4", None])
def test_the_containers_request_together_the_cpus_that_the_vm_will_own(
    annotations: dict[str, str], owned: int, given: str | None
) -> None:
    raw = launcher(annotations=annotations)
    requests = container(raw, "compute")["resources"]["requests"]
    requests.pop("cpu")
    if given is not None:
        requests["cpu"] = given
    after, warnings = admit(raw, vmi_of(raw))
    assert effective_cpu(after) == owned
    # KubeVirt's console logger requests 5m, our sidecar 10m.
    assert cpu(after, "compute") == f"{owned * 1000 - 15}m"
    assert warnings == ()


SHARING = [
    {**ASKS, "kvplace.io/cpu-policy": "share"},
    {**ASKS, "kvplace.io/cpu-policy": "immovable"},
    {"kvplace.io/cpu-policy": "numa"},
]


@pytest.mark.parametrize("annotations", SHARING)
@pytest.mark.parametrize("given", ["400m", "1500m"])
def test_a_vm_that_will_own_no_cpus_keeps_the_request_of_kubevirt(
    annotations: dict[str, str], given: str
) -> None:
    raw = launcher(annotations=annotations)
    container(raw, "compute")["resources"]["requests"]["cpu"] = given
    assert cpu(admit(raw, vmi_of(raw))[0], "compute") == given


@pytest.mark.parametrize("annotations", SHARING)
def test_a_vm_requests_at_least_a_tenth_of_the_cpus_that_it_shares(annotations: dict[str, str]) -> None:
    raw = launcher(annotations=annotations)
    container(raw, "compute")["resources"] = {"requests": {"cpu": "1m"}, "limits": {"cpu": "10m"}}
    after, warnings = admit(raw, vmi_of(raw))
    assert effective_cpu(after) == Fraction("0.4")
    assert container(after, "compute")["resources"]["limits"]["cpu"] == "400m"
    assert warnings == (
        "the CPU limit 10m of container compute is raised to 400m: the pod must request as much for its CPUs",
    )
    assert admit(after, vmi_of(raw))[0] == after


def with_others(*, beside: str, sidecar: str, init: str, overhead: str) -> Json:
    """A launcher pod as meshes and sandboxes leave it: more of every kind of container, and an overhead."""
    raw = launcher()
    raw["spec"]["containers"].append({"name": "proxy", "resources": {"requests": {"cpu": beside}}})
    raw["spec"]["initContainers"] += [
        {"name": "mesh", "restartPolicy": "Always", "resources": {"limits": {"cpu": sidecar}}},
        {"name": "prepare", "resources": {"requests": {"cpu": init}}},
    ]
    raw["spec"]["overhead"] = {"cpu": overhead}
    return raw


@pytest.mark.parametrize(
    ("beside", "sidecar", "init", "overhead", "effective"),
    [
        ("100m", "0", "0", "0", 4),
        ("0", "250m", "0", "0", 4),
        ("0", "0", "0", "250m", 4),
        ("0.0005", "0.1001", "1", "0", 4),
        # An init container that needs more than all that run later decides by itself.
        ("0", "0", "5", "0", Fraction("5.005")),
        # What the others request must leave compute something.
        ("3900m", "0", "0", "0", Fraction("4.315")),
    ],
)
def test_whatever_else_counts_for_a_pod_is_part_of_its_request(
    beside: str, sidecar: str, init: str, overhead: str, effective: Fraction
) -> None:
    raw = with_others(beside=beside, sidecar=sidecar, init=init, overhead=overhead)
    after, _ = admit(raw, vmi_of(raw))
    assert effective_cpu(after) == effective
    assert admit(after, vmi_of(raw))[0] == after


def test_a_cpu_limit_of_compute_that_is_not_a_number_is_refused() -> None:
    raw = launcher()
    container(raw, "compute")["resources"]["limits"]["cpu"] = "lots"
    assert refusal(raw, vmi_of(raw)) == (
        "Pod default/virt-launcher-plain-hook-nonroot-…: container compute: CPU: 'lots' is not a quantity "
        "such as 8Gi, 512Mi, 4 or 500m"
    )


def test_a_request_above_the_future_owned_cpus_stays() -> None:
    raw = launcher()
    container(raw, "compute")["resources"]["requests"]["cpu"] = "9500m"
    assert cpu(admit(raw, vmi_of(raw))[0], "compute") == "9500m"


def test_a_limit_below_the_future_owned_cpus_is_raised_because_the_request_must_count_them() -> None:
    raw = launcher()
    container(raw, "compute")["resources"] = {"requests": {"cpu": "1m"}, "limits": {"cpu": "1m"}}
    after, warnings = admit(raw, vmi_of(raw))
    assert effective_cpu(after) == 4
    assert container(after, "compute")["resources"]["limits"]["cpu"] == "4"
    assert warnings == (
        "the CPU limit 1m of container compute is raised to 4: the pod must request as much for its CPUs",
    )


def test_a_guaranteed_pod_stays_guaranteed() -> None:
    raw = launcher("virt-launcher-plain-guaranteed-hook", ISOLATES)
    assert is_guaranteed(raw)
    after, _ = admit(raw, vmi_of(raw))
    assert is_guaranteed(after)
    # KubeVirt gives every container of such a pod equal requests and limits; a lower request of compute
    # would end that, and a lower limit would throttle the guest.
    assert cpu(raw, "compute") == "4"
    assert cpu(after, "compute") == "5"


def test_in_a_launcher_pod_without_a_container_compute_the_first_one_requests_the_cpus() -> None:
    raw = launcher()
    container(raw, "compute")["name"] = "qemu"
    after, _ = admit(raw, vmi_of(raw))
    first = after["spec"]["containers"][0]["name"]
    assert cpu(after, first) == "3985m"
