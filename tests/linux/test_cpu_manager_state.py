"""The kubelet's own file is believed when its checksum fits, whatever its version, and refused otherwise."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.cpuset import format_cpu_list, parse_cpu_list
from kvplace.core.errors import BadBody
from kvplace.linux.cpu_manager_state import MAX_BYTES, read_cpu_manager_state
from tests.captured import captured_folder
from tests.core.invalid_input import DEEP_OR_LONG, answer_or_sentence, texts

VERSION_2 = (
    '{"policyName":"static","defaultCpuSet":"0-1,6-11","entries":'
    '{"4aec46af-22b7-4e26-babb-d15383ac9151":{"mysqld":"2-3"},'
    '"60008d73-6f6f-4467-96c5-cd0a1eeadf23":{"mysqld2":"4-5"}},"checksum":2764424633}'
)

# The kubelet refuses these because it is configured otherwise or has left version 1 behind; what they
# state of the CPUs is as clear to us as to the kubelet that wrote them.
READ_HERE_ALL_THE_SAME = {
    "policy name differs from configured one",
    "v2/v3-shaped file carrying a v1 checksum: refused since v4",
    "v1 file (containerID keyed entries): refused since v4",
}


def recorded(key: str) -> list[dict[str, Any]]:
    """Rows of Kubernetes' own tests of its checkpoint, and of published examples."""
    text = (captured_folder("tables") / "kubelet_checkpoint.json").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = json.loads(text)[key]
    return rows


def test_every_recorded_file_of_versions_1_to_3_is_believed_and_none_with_another_checksum() -> None:
    for row in recorded("checksum_rows"):
        state = read_cpu_manager_state(row["file"])
        root = json.loads(row["file"])
        assert state.policy == root["policyName"]
        assert format_cpu_list(state.default) == root["defaultCpuSet"]
        assert bool(state.held) == bool(root.get("entries")), row
        assert state.held & state.default == 0
        with pytest.raises(BadBody, match=r"its checksum \d+ does not fit its content"):
            read_cpu_manager_state(json.dumps(root | {"checksum": root["checksum"] ^ 1}))


def test_every_recorded_checksum_of_version_4_fits_its_content() -> None:
    for row in recorded("v4_data_rows"):
        text = json.dumps({"data": row["data"], "dataChecksum": row["dataChecksum"]})
        _, said = answer_or_sentence(read_cpu_manager_state, text, BadBody)
        assert "dataChecksum" not in said
        wrong = json.dumps({"data": row["data"], "dataChecksum": row["dataChecksum"] ^ 1})
        with pytest.raises(BadBody, match="its dataChecksum"):
            read_cpu_manager_state(wrong)


def test_each_file_is_restored_or_refused_as_the_kubelet_does() -> None:
    for case in recorded("restore_cases"):
        text = json.dumps(case["file"])
        if case["expect"] is None and case["description"] not in READ_HERE_ALL_THE_SAME:
            with pytest.raises(BadBody, match="is not a cpu_manager_state that the kubelet would read"):
                read_cpu_manager_state(text)
            continue
        state = read_cpu_manager_state(text)
        if case["expect"] is None:
            continue
        assert format_cpu_list(state.default) == case["expect"]["default"]
        assert state.containers == {
            (pod, container): parse_cpu_list(cpus)
            for pod, containers in case["expect"]["entries"].items()
            for container, cpus in containers.items()
        }
        pods = case["expect"].get("pod_entries", {})
        assert state.pods == {pod: parse_cpu_list(cpus) for pod, cpus in pods.items()}


def test_the_held_cpus_are_those_of_containers_and_pods_together() -> None:
    assert format_cpu_list(read_cpu_manager_state(VERSION_2).held) == "2-5"
    case = next(case for case in recorded("restore_cases") if "baselines" in case["description"])
    assert format_cpu_list(read_cpu_manager_state(json.dumps(case["file"])).held) == "4-10"


def test_keys_are_taken_in_any_case_and_an_unset_checksum_is_not_a_wrong_one() -> None:
    text = VERSION_2.replace("defaultCpuSet", "DEFAULTCPUSET").replace("entries", "Entries")
    assert read_cpu_manager_state(text) == read_cpu_manager_state(VERSION_2)
    for unset in ('"checksum":0', '"checksum":null', '"Checksum":0'):
        text = VERSION_2.replace('"checksum":2764424633', unset)
        assert read_cpu_manager_state(text) == read_cpu_manager_state(VERSION_2)


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ('{"policyName":"none","defaultCpuSet":""}', ""),
        ('{"policyName":"none"}', ""),
        ('{"policyName":"static","defaultCpuSet":"0-1","entries":{"an-id":"2-3"}}', "2-3"),
        ('{"policyName":"static","defaultCpuSet":"0-1","entries":{"p":{"c":"2-3"}}}', "2-3"),
        ('{"policyName":"static","defaultCpuSet":"0","entries":null,"podEntries":null}', ""),
        (
            '{"policyName":"static","entries":{"p":{"c":"2-3"}},"podEntries":{"q":{"cpuSet":"4-5"}}}',
            "2-5",
        ),
    ],
)
def test_a_file_without_a_checksum_is_read_in_each_version_that_has_one(text: str, held: str) -> None:
    assert format_cpu_list(read_cpu_manager_state(text).held) == held


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it is empty"),
        ("\n", "it is empty"),
        ("[]", "it is not a JSON object"),
        ("{}", "it has no policyName"),
        ('{"policyName":"none","checksum":true}', "its checksum is not a number"),
        ('{"policyName":"none","checksum":"0"}', "its checksum is not a number"),
        ('{"data":"{}"}', "it has data but no dataChecksum"),
        ('{"data":"{}","dataChecksum":0}', "it has data but no dataChecksum"),
        ('{"dataChecksum":7}', "it has a dataChecksum but no data"),
        ('{"policyName":"none","defaultCpuSet":3,"checksum":0}', "are not a CPU list"),
        ('{"policyName":"none","defaultCpuSet":"0-99999","checksum":0}', "above the highest id"),
        ('{"policyName":"static","entries":[1],"checksum":0}', "its entries is not an object"),
        (
            '{"policyName":"static","podEntries":{"p":3},"checksum":0}',
            "the entry of pod 'p' is not an object",
        ),
        (VERSION_2[:-30], "it is not JSON"),
        (VERSION_2.replace("2-3", "2-4"), "does not fit its content; it is damaged or was edited"),
        (" " * (MAX_BYTES + 1), "is longer than"),
        *((text, "it is") for text in DEEP_OR_LONG[:2]),
    ],
)
def test_a_damaged_file_is_refused_in_one_sentence_that_names_it(text: str, words: str) -> None:
    with pytest.raises(BadBody, match=r"^/here/state ") as raised:
        read_cpu_manager_state(text, what="/here/state")
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


@given(texts)
def test_anything_else_is_refused_in_one_sentence(text: str) -> None:
    answer_or_sentence(read_cpu_manager_state, text, BadBody)


@given(st.data())
def test_a_file_with_changed_letters_is_refused_or_adds_nothing(
    data: st.DataObject,
) -> None:
    at = data.draw(st.integers(0, len(VERSION_2) - 1))
    changed = VERSION_2[:at] + data.draw(st.characters()) + VERSION_2[at + 1 :]
    state, _ = answer_or_sentence(read_cpu_manager_state, changed, BadBody)
    assert state is None or (state.policy, format_cpu_list(state.held)) == ("static", "2-5")


def test_a_container_that_the_kubelet_resized_holds_its_present_cpus_whatever_it_had_originally() -> None:
    """With InPlacePodVerticalScalingExclusiveCPUs the data of version 4 also has the sets of the start."""
    data = json.dumps(
        {
            "policyName": "static",
            "defaultCpuSet": "0-1,6-11",
            "entries": {"4aec46af-22b7-4e26-babb-d15383ac9151": {"mysqld": "2-5"}},
            "originals": {"4aec46af-22b7-4e26-babb-d15383ac9151": {"mysqld": "2-3"}},
        }
    )
    checksum = 0x811C9DC5
    for byte in f"(string){data}".encode():
        checksum = (checksum ^ byte) * 0x01000193 & 0xFFFFFFFF
    state = read_cpu_manager_state(json.dumps({"data": data, "dataChecksum": checksum}))
    assert format_cpu_list(state.held) == "2-5"
