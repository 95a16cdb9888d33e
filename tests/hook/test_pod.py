"""The placement of this pod, and not of another one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvplace.core.errors import Misconfigured
from kvplace.core.placement import PodPlacement
from kvplace.core.request import OnFailure
from kvplace.core.scalars import NodeName
from kvplace.hook.define_domain import define_domain
from kvplace.hook.pod import on_failure_of_pod, placement_of_pod
from kvplace.hook.process import PodEnvironment
from tests.hook.machine import BOUND, DOMAIN, VMI, PodFolder


def test_the_placement_written_at_the_binding_is_read(env: PodEnvironment, pod: PodFolder) -> None:
    pod.bind()
    assert placement_of_pod(env) == BOUND


def test_it_is_read_at_each_call(env: PodEnvironment, pod: PodFolder) -> None:
    with pytest.raises(Misconfigured):
        placement_of_pod(env)
    pod.bind()
    assert placement_of_pod(env) == BOUND


def test_a_bare_cpu_map_serves_where_another_scheduler_placed_the_pod(
    env: PodEnvironment, pod: PodFolder
) -> None:
    pod.write("cpu-map", '{"socket0": ["2", "34"]}')
    pod.ask_for(OnFailure.FLOAT)
    assert placement_of_pod(env) == PodPlacement.of_cpu_map(
        '{"socket0": ["2", "34"]}', on_failure=OnFailure.FLOAT
    )


def test_an_invalid_placement_is_not_replaced_by_the_cpu_map(env: PodEnvironment, pod: PodFolder) -> None:
    pod.write("cpu-map", '{"socket0": ["2", "34"]}')
    pod.write("placement", "{}")
    with pytest.raises(Misconfigured, match="version"):
        placement_of_pod(env)


def test_a_placement_of_another_pod_is_refused_with_both_uids(env: PodEnvironment, pod: PodFolder) -> None:
    pod.bind(uid="forged")
    with pytest.raises(
        Misconfigured, match=r"UID 'forged', this pod has '6d3d3a1b.*inherited or copied; remove"
    ):
        placement_of_pod(env)


def test_a_placement_without_an_owner_is_refused(env: PodEnvironment, pod: PodFolder) -> None:
    pod.bind(uid="")
    with pytest.raises(Misconfigured, match="inherited or copied"):
        placement_of_pod(env)


def test_a_placement_for_another_node_is_refused_with_both_nodes(env: PodEnvironment, pod: PodFolder) -> None:
    pod.bind(node="worker-2")
    with pytest.raises(Misconfigured, match=r"made for node 'worker-2', this pod runs on 'worker-1'"):
        placement_of_pod(env)


def test_a_pod_that_does_not_know_its_node_goes_by_its_uid(env: PodEnvironment, pod: PodFolder) -> None:
    pod.bind(node="worker-2")
    assert placement_of_pod(replace(env, node=NodeName(""))).node == "worker-2"


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("placement", "not json", "is not valid JSON"),
        ("placement", '{"version": 2}', "version 2; this program reads version 1"),
        ("placement", "x" * 600_000, "longer than"),
        ("cpu-map", '{"socket0": ["2", "2"]}', "names CPU 2 twice"),
        ("cpu-map", "[]", "must be an object"),
        ("name", "", "has neither the annotation kvplace.io/placement nor cpu-map yet"),
    ],
)
def test_an_unreadable_file_is_refused_in_one_sentence(
    env: PodEnvironment, pod: PodFolder, name: str, text: str, sentence: str
) -> None:
    pod.write(name, text)
    with pytest.raises(Misconfigured, match=sentence) as caught:
        placement_of_pod(env)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_not_text_are_refused(env: PodEnvironment, pod: PodFolder) -> None:
    (pod.path / "placement").write_bytes(b"\xff\xfe")
    with pytest.raises(Misconfigured, match="placement cannot be read"):
        placement_of_pod(env)


@pytest.mark.parametrize("request_text", ["", '{"version":1,"vcpus":4,"policy":"none"}'])
def test_a_pod_that_gets_no_placement_runs_unpinned(
    env: PodEnvironment, pod: PodFolder, request_text: str
) -> None:
    pod.write("request", request_text)
    assert placement_of_pod(env).placement.floats
    assert define_domain(DOMAIN, VMI, env) == DOMAIN


@pytest.mark.parametrize("request_text", ['{"version":1,"vcpus":4}', "{", "[]", "{}", None])
def test_a_pod_with_any_other_request_waits_for_its_placement(
    env: PodEnvironment, pod: PodFolder, request_text: str | None
) -> None:
    if request_text is None:
        (pod.path / "request").unlink()
    else:
        pod.write("request", request_text)
    with pytest.raises(Misconfigured, match=r"neither the annotation kvplace\.io/placement nor cpu-map yet"):
        placement_of_pod(env)


def test_a_missing_volume_points_to_the_webhook(env: PodEnvironment) -> None:
    with pytest.raises(Misconfigured, match=r"is not mounted.*pod webhook"):
        placement_of_pod(env)


@pytest.mark.parametrize(
    ("request_text", "placement_text", "expected"),
    [
        ('{"onFailure": "float"}', "", OnFailure.FLOAT),
        ('{"onFailure": "wait"}', '{"onFailure": "float"}', OnFailure.WAIT),
        ("", '{"onFailure": "float"}', OnFailure.FLOAT),
        ("junk", '{"onFailure": "float"}', OnFailure.FLOAT),
        ('{"onFailure": "maybe"}', "", OnFailure.WAIT),
        ("[" * 100_000, "", OnFailure.WAIT),
        ("7", "null", OnFailure.WAIT),
        ("", "", OnFailure.WAIT),
    ],
)
def test_on_failure_is_read_from_the_request_before_the_placement(
    env: PodEnvironment, pod: PodFolder, request_text: str, placement_text: str, expected: OnFailure
) -> None:
    pod.write("request", request_text)
    pod.write("placement", placement_text)
    assert on_failure_of_pod(env) is expected


def test_the_annotation_as_the_extender_writes_it_is_understood(env: PodEnvironment, pod: PodFolder) -> None:
    written = json.loads(BOUND.to_json()) | {"aKeyOfTomorrow": 1}
    pod.write("placement", json.dumps(written) + "\n")
    assert placement_of_pod(env) == BOUND
