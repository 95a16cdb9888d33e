"""VirtualMachineInstances at creation."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.admission.objects import Vmi, typed
from kvplace.admission.sidecar import with_hook_sidecar
from kvplace.admission.size import read_size, size_of_vm
from kvplace.admission.vmi import admit_vmi
from kvplace.core.errors import KvplaceError, Misconfigured
from kvplace.core.well_known_names import ASKING, RESULTS
from tests.admission.reviewed_objects import ASKS, OUR_ENTRY, SETTINGS, Json, unchanged_but_for, vmi
from tests.core.option_values import VALUES, OptionValue
from tests.kubevirt_documents import DOMAINS

HOOKS = "hooks.kubevirt.io/hookSidecars"
each_vmi = pytest.mark.parametrize("path", sorted(DOMAINS.glob("*.vmi.json")), ids=lambda path: path.stem)


def admit(raw: Json, largest_node: int | None = None) -> tuple[Json, tuple[str, ...]]:
    before = copy.deepcopy(raw)
    admitted = admit_vmi(raw, namespace="default", settings=SETTINGS, largest_node=largest_node)
    return unchanged_but_for(raw, admitted, before), admitted.warnings


def patch_for(raw: Json) -> list[Json]:
    return list(admit_vmi(raw, namespace="default", settings=SETTINGS).patch)


def refusal(raw: Json) -> str:
    with pytest.raises(Misconfigured) as refused:
        admit(raw)
    return str(refused.value)


@each_vmi
def test_a_captured_vmi_without_options_is_not_changed(path: Path) -> None:
    raw = json.loads(path.read_text())
    before = copy.deepcopy(raw)
    after, warnings = admit(raw, largest_node=1)
    assert after == before == raw
    assert warnings == ()


@each_vmi
def test_a_captured_vmi_with_options_gets_the_hook_sidecar_and_its_size_and_nothing_else(path: Path) -> None:
    raw = json.loads(path.read_text())
    raw["metadata"]["annotations"] = dict(ASKS)
    if raw["spec"]["domain"].get("cpu", {}).get("dedicatedCpuPlacement"):
        assert "dedicatedCpuPlacement and annotation cpu-set: 'one-numa' exclude each other" in refusal(raw)
        return
    after, warnings = admit(raw)
    stored, old = after["metadata"].pop("annotations"), raw["metadata"].pop("annotations")
    assert json.loads(stored.pop(HOOKS)) == [OUR_ENTRY]
    stated = read_size(stored.pop("kvplace.io/vm-size"))
    assert stated == size_of_vm(typed(raw, Vmi).spec.domain, "VMI")
    assert stored == old
    assert after["metadata"]["labels"].pop("kvplace.io/opted-in") == "true"
    raw["metadata"].setdefault("labels", {})
    assert after == raw
    assert warnings == ()


@pytest.mark.parametrize(
    "annotations",
    [
        None,
        {},
        {"other.io/key": "value"},
        {"cpu-map": '{"socket0":["1"]}'},
        {"topology.crane.io/topology-awareness": "false"},
    ],
)
def test_a_vmi_without_options_is_not_changed(annotations: dict[str, str] | None) -> None:
    raw = vmi(annotations, cpu={"cores": 4, "dedicatedCpuPlacement": True})
    assert patch_for(raw) == []


@pytest.mark.parametrize(
    "annotations",
    [
        {"kvplace.io/cpu-policy": "none"},
        {"cpu-set": "spread-numa", "qos.gocrane.io/cpu-manager": "none"},
    ],
)
def test_a_vmi_with_policy_none_gets_its_size_alone(annotations: dict[str, str]) -> None:
    raw = vmi(annotations, cpu={"cores": 4, "dedicatedCpuPlacement": True})
    after, _ = admit(raw)
    stated = after["metadata"]["annotations"]
    assert stated == {**annotations, "kvplace.io/vm-size": '{"vcpus":4,"memory":4294967296}'}
    assert after["metadata"]["labels"] == {"kvplace.io/opted-in": "true"}


def test_admission_done_again_changes_nothing() -> None:
    once, _ = admit(vmi())
    assert patch_for(once) == []


def test_a_size_that_a_user_has_written_is_replaced_by_the_true_one() -> None:
    after, _ = admit(vmi({**ASKS, "kvplace.io/vm-size": '{"vcpus":64}'}))
    assert json.loads(after["metadata"]["annotations"]["kvplace.io/vm-size"])["vcpus"] == 4


def test_entries_of_the_user_stay_as_they_are_written() -> None:
    theirs = '[ {"image": "a",  "args": ["--version","v1alpha3"], "weight": 1.50} ,{"image":"b"}]'
    after, _ = admit(vmi({**ASKS, HOOKS: theirs}))
    text = after["metadata"]["annotations"][HOOKS]
    assert text.startswith(theirs[:-1])
    assert json.loads(text)[2:] == [OUR_ENTRY]


@pytest.mark.parametrize("theirs", ["null", "[]", " [ ] "])
def test_an_empty_list_of_sidecars_is_filled(theirs: str) -> None:
    after, _ = admit(vmi({**ASKS, HOOKS: theirs}))
    assert json.loads(after["metadata"]["annotations"][HOOKS]) == [OUR_ENTRY]


def test_a_sidecar_of_ours_with_an_image_of_the_users_choice_stays() -> None:
    theirs = '[{"image":"mirror.test/kvplace-hook:2","command":["kvplace-hook"],"args":["serve"]}]'
    after, _ = admit(vmi({**ASKS, HOOKS: theirs}))
    assert after["metadata"]["annotations"][HOOKS] == theirs


@pytest.mark.parametrize("theirs", ["", "[", "{}", "5", '["a"]', "[[]]", "[" * 5000, '[{"image": "\ud800"}]'])
def test_a_malformed_list_of_sidecars_is_refused(theirs: str) -> None:
    sentence = refusal(vmi({**ASKS, HOOKS: theirs}))
    assert sentence.startswith(f"annotation {HOOKS}: ")
    assert sentence.endswith(
        'must be a JSON list of objects such as [{"image": "..."}]; correct it or remove it'
    )


def test_results_are_stripped_because_they_would_leak_into_every_pod_of_the_vm() -> None:
    inherited = dict.fromkeys(RESULTS, "x")
    after, _ = admit(vmi({**ASKS, **inherited, "other.io/key": "stays"}))
    annotations = after["metadata"]["annotations"]
    assert annotations.keys() == {"cpu-set", HOOKS, "kvplace.io/vm-size", "other.io/key"}


def test_a_vmi_with_modifiers_alone_is_not_changed_and_its_author_is_warned() -> None:
    raw = vmi({"kvplace.io/smt": "require"})
    admitted = admit_vmi(raw, namespace="default", settings=SETTINGS)
    assert admitted.object == raw
    assert not admitted.patch
    (warning,) = admitted.warnings
    assert "kvplace.io/smt has no effect alone" in warning


def test_two_sidecars_of_ours_are_refused() -> None:
    theirs = '[{"image":"a","command":["kvplace-hook"]},{"image":"b","command":["kvplace-hook"]}]'
    sentence = refusal(vmi({**ASKS, HOOKS: theirs}))
    assert sentence.endswith("has 2 entries with the command kvplace-hook; keep one")


def test_kubevirts_own_pinning_is_refused_with_the_fix() -> None:
    raw = vmi({"cpu-set": "any"}, cpu={"cores": 4, "dedicatedCpuPlacement": True})
    assert refusal(raw) == (
        "VirtualMachineInstance default/db: spec.domain.cpu.dedicatedCpuPlacement and annotation "
        "cpu-set: 'any' exclude each other, because the kubelet and KubeVirt would overwrite "
        "kvplace's pinning; remove one of the two"
    )


@pytest.mark.parametrize(
    ("annotations", "sentence"),
    [
        (
            {"cpu-set": "one-nuna"},
            (
                "annotation cpu-set: 'one-nuna': must be one of one-socket, one-numa, one-l3, "
                "spread-sockets, spread-numa, any; did you mean 'one-numa'?"
            ),
        ),
        (
            {"kvplace.io/cpuset": "any"},
            (
                "annotation kvplace.io/cpuset: 'any': is not an annotation of kvplace; did you mean "
                "kvplace.io/cpu-set?"
            ),
        ),
        (
            {"cpu-set": "one-socket", "topology.crane.io/topology-awareness": "true"},
            (
                "annotation topology.crane.io/topology-awareness: 'true': contradicts cpu-set: 'one-socket'; "
                "keep one, or make them agree"
            ),
        ),
        (
            {"kvplace.io/cpu-policy": "immovable", "kvplace.io/smt": "isolate"},
            (
                "annotation kvplace.io/smt: 'isolate': contradicts kvplace.io/cpu-policy: 'immovable': a "
                "sibling stays idle only when the VM owns it, and with immovable it owns none; ask for "
                "exclusive, or for smt require"
            ),
        ),
    ],
)
def test_invalid_options_are_refused_with_a_suggestion(annotations: dict[str, str], sentence: str) -> None:
    assert refusal(vmi(annotations)) == sentence


def test_a_vmi_larger_than_every_known_machine_is_warned_about() -> None:
    raw = vmi(cpu={"sockets": 2, "cores": 40})
    assert admit(raw, largest_node=80)[1] == ()
    assert admit(raw, largest_node=64)[1] == (
        "80 vCPUs are more than the allocatable CPUs of any known machine (largest: 64)",
    )
    assert admit(raw, largest_node=None)[1] == ()


def test_a_cpu_limit_below_the_needed_request_of_the_pod_is_warned_about() -> None:
    limited = {"limits": {"cpu": "4"}}
    isolates = {**ASKS, "kvplace.io/emulator-threads": "isolate"}
    assert admit(vmi(ASKS, resources=limited))[1] == ()
    assert admit(vmi(isolates, resources=limited))[1] == (
        "the CPU limit 4 is raised to 5 in the pod, which must request as much for its CPUs",
    )
    assert admit(vmi(ASKS, resources={"limits": {"cpu": "lots"}, "requests": {"cpu": "4"}}))[1] == ()


def test_isolated_emulator_threads_with_policy_numa_give_a_warning() -> None:
    isolates = {"kvplace.io/emulator-threads": "isolate"}
    assert admit(vmi({**isolates, "kvplace.io/cpu-policy": "share"}))[1] == ()
    assert admit(vmi({**isolates, "kvplace.io/cpu-policy": "numa"}))[1] == (
        "kvplace.io/emulator-threads: isolate has no effect with kvplace.io/cpu-policy: numa",
    )


MIRRORS = {"cpu-set": "any", "kvplace.io/guest-numa": "mirror"}


def test_guest_cells_of_kubevirt_and_of_kvplace_exclude_each_other() -> None:
    cpu = {"cores": 8, "dedicatedCpuPlacement": True, "numa": {"guestMappingPassthrough": {}}}
    assert refusal(vmi(MIRRORS, cpu=cpu)) == (
        "VirtualMachineInstance default/db: spec.domain.cpu.numa.guestMappingPassthrough and annotation "
        "kvplace.io/guest-numa: 'mirror' exclude each other, because both define the guest's NUMA cells; "
        "remove one of the two"
    )
    assert HOOKS in admit(vmi(MIRRORS, cpu={"cores": 8, "numa": {}}))[0]["metadata"]["annotations"]


def test_a_guest_of_an_architecture_without_cells_cannot_mirror_the_host() -> None:
    raw = vmi(MIRRORS)
    raw["spec"]["architecture"] = "s390x"
    assert refusal(raw) == (
        "VirtualMachineInstance default/db: spec.architecture: 's390x' and annotation "
        "kvplace.io/guest-numa: 'mirror' exclude each other, because guests of this architecture have no "
        "NUMA cells; remove the annotation"
    )
    raw["spec"]["architecture"] = "arm64"
    assert admit(raw)[1] == ()


def test_a_mirroring_guest_that_may_grow_is_warned_about() -> None:
    assert admit(vmi(MIRRORS, cpu={"sockets": 2, "cores": 4, "maxSockets": 2}))[1] == ()
    for sockets in ({"sockets": 2, "maxSockets": 8}, {"maxSockets": 2}):
        assert admit(vmi(MIRRORS, cpu={"cores": 4, **sockets}))[1] == (
            (
                "kvplace.io/guest-numa: mirror: vCPUs plugged in later, up to VirtualMachineInstance "
                "default/db: spec.domain.cpu.maxSockets, get no cores of their own on the host and are "
                "assigned to the guest's NUMA cells in turn"
            ),
        )


@pytest.mark.parametrize("row", VALUES, ids=str)
def test_every_value_of_every_key_is_served(row: OptionValue) -> None:
    devices = {"gpus": [{"name": "gpu", "deviceName": "nvidia.com/gpu"}]}
    after, warnings = admit(vmi(row.annotations, devices=devices))
    assert (HOOKS in after["metadata"]["annotations"]) == (row.threads is not None)
    assert warnings == ()


@pytest.mark.parametrize(
    "annotations",
    [
        {"cpu-set": "spread-numa", "kvplace.io/cpu-policy": "share", "kvplace.io/smt": "require"},
        {"cpu-set": "spread-numa", "kvplace.io/guest-numa": "mirror", "kvplace.io/numa-memory": "strict"},
    ],
    ids=str,
)
def test_values_of_several_keys_are_served_together(annotations: dict[str, str]) -> None:
    after, warnings = admit(vmi(annotations))
    assert HOOKS in after["metadata"]["annotations"]
    assert warnings == ()


@pytest.mark.parametrize("size", [{"cpu": None, "memory": None}, {"cpu": {}, "memory": {}}])
def test_a_vmi_without_any_size_is_allowed(size: dict[str, Any]) -> None:
    assert HOOKS in admit(vmi(**size))[0]["metadata"]["annotations"]


def test_a_vmi_with_a_generated_name_is_named_by_its_prefix() -> None:
    raw = vmi({**ASKS}, cpu={"dedicatedCpuPlacement": True})
    raw["metadata"] = {"generateName": "ci-", "annotations": dict(ASKS)}
    assert re.match(r"VirtualMachineInstance default/ci-…: spec", refusal(raw))


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
fields = ("cpu", "memory", "resources", "devices", "ioThreadsPolicy", "ioThreads")
domains = st.fixed_dictionaries({}, optional=dict.fromkeys(fields, anything))


@given(st.fixed_dictionaries({}, optional=dict.fromkeys((*ASKING, *RESULTS, HOOKS), st.text())), domains)
def test_any_object_is_admitted_or_refused_and_never_modified(
    annotations: dict[str, str], domain: dict[str, Any]
) -> None:
    raw = vmi(annotations, **domain)
    before = copy.deepcopy(raw)
    try:
        after, _ = admit(raw)
    except KvplaceError:
        return
    finally:
        assert raw == before
    assert {**after, "metadata": None} == {**before, "metadata": None}
    assert admit(after)[0] == after


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        (None, "[OURS]"),
        ("null", "[OURS]"),
        (" [ ] ", "[OURS]"),
        ('[ {"image": "a", "x": 1.50} ]\n', '[ {"image": "a", "x": 1.50} ,OURS]'),
    ],
)
def test_the_entries_of_other_hook_sidecars_stay_as_they_are_written(
    theirs: str | None, expected: str
) -> None:
    ours = with_hook_sidecar(None, "image")
    assert ours is not None
    assert with_hook_sidecar(theirs, "image") == expected.replace("OURS", ours[1:-1])
    assert with_hook_sidecar(ours, "another") is None


@pytest.mark.parametrize("theirs", ["", "{}", "[1]", '[{"command": "x"}', "[[]]", '["a"]'])
def test_entries_that_are_not_a_list_of_objects_are_refused(theirs: str) -> None:
    assert "must be a JSON list of objects" in refusal(vmi({**ASKS, HOOKS: theirs}))
