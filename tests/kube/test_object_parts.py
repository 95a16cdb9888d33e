"""Pods that kube-scheduler offers the same nodes have one shape; pods that depend on more have none."""

from __future__ import annotations

import copy
import json
from typing import Any

import msgspec
import pytest

from kvplace.kube.object_parts import Metadata, PodSpec, StoredObject, fault_of
from kvplace.kube.object_records import NO_SHAPE, PodRecord
from kvplace.kube.objects import PodObject, pod_record
from tests.kubevirt_documents import PODS

LAUNCHER = sorted(PODS.glob("virt-launcher-plain-hook-nonroot.pod.json"))
SPEC: dict[str, Any] = {
    "schedulerName": "kvplace-scheduler",
    "nodeSelector": {"disk": "fast"},
    "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {}}},
    "tolerations": [{"key": "a", "operator": "Exists"}],
    "containers": [{"name": "compute", "resources": {"requests": {"cpu": "2", "kvplace.io/vm": "0"}}}],
    "volumes": [{"name": "a", "emptyDir": {}}, {"name": "b", "configMap": {"name": "c"}}],
}


def shape(**changed: Any) -> bytes:
    return msgspec.json.decode(json.dumps({**SPEC, **changed}), type=PodSpec).shape


def container(**changed: Any) -> list[dict[str, Any]]:
    return [{**SPEC["containers"][0], **changed}]


def test_pods_that_differ_in_amounts_and_names_have_one_shape() -> None:
    bigger = container(name="other", resources={"requests": {"kvplace.io/vm": "0", "cpu": "64"}})
    assert shape(containers=bigger, priority=5, volumes=[], hostname="x") == shape() != NO_SHAPE


@pytest.mark.parametrize(
    "changed",
    [
        {"schedulerName": "default-scheduler"},
        {"nodeSelector": {"disk": "slow"}},
        {"affinity": {}},
        {"tolerations": []},
        {"containers": container(resources={"requests": {"example.com/gpu": "1"}})},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_field_that_decides_about_nodes_makes_another_shape(changed: dict[str, Any]) -> None:
    assert shape(**changed) not in (shape(), NO_SHAPE)


REQUIRED = {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "zone"}]}
PREFERRED = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1}]}


@pytest.mark.parametrize(
    "changed",
    [
        {"schedulingGates": [{"name": "wait"}]},
        {"affinity": {"podAffinity": REQUIRED}},
        {"affinity": {"podAntiAffinity": REQUIRED}},
        {"topologySpreadConstraints": [{"whenUnsatisfiable": "DoNotSchedule"}]},
        {"resourceClaims": [{"name": "gpu"}]},
        {"containers": container(ports=[{"containerPort": 80, "hostPort": 80}])},
        {"initContainers": container(ports=[{"containerPort": 80, "hostPort": 80}])},
        {"volumes": [{"name": "a", "persistentVolumeClaim": {"claimName": "disk"}}]},
        {"volumes": [{"name": "a", "somethingOfTheFuture": {}}]},
    ],
    ids=str,
)
def test_a_pod_whose_node_depends_on_pods_volumes_or_devices_has_no_shape(changed: dict[str, Any]) -> None:
    assert shape(**changed) == NO_SHAPE


def test_preferences_do_not_keep_pods_apart() -> None:
    soft = [{"whenUnsatisfiable": "ScheduleAnyway"}]
    affinity = {**SPEC["affinity"], "podAntiAffinity": PREFERRED}
    assert shape(affinity=affinity, topologySpreadConstraints=soft) == shape()


class Containers(msgspec.Struct):
    containers: list[Metadata]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"metadata": {}}, "spec is missing"),
        ({"metadata": {}, "spec": {}}, "spec.containers is missing"),
        ([], "expected object, got array"),
        ({"metadata": {"labels": []}}, "metadata.labels: expected object, got array"),
        ({"metadata": {"labels": {"a": 1}}}, "a value in metadata.labels: expected str, got int"),
        ({"metadata": {"labels": {1: "a"}}}, "a key of metadata.labels: expected str, got int"),
        (
            {"metadata": {}, "spec": {"containers": ["a"]}},
            "spec.containers[0]: expected object, got str",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_field_is_named_with_its_place_and_its_fault(content: Any, sentence: str) -> None:
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert(content, StoredObject[Containers, None])
    assert fault_of(refused.value) == sentence


def read(**status: Any) -> PodRecord:
    pod = {"metadata": {"name": "a"}, "spec": {**SPEC, "priority": 7}, "status": status}
    return pod_record(msgspec.json.decode(json.dumps(pod), type=PodObject))


def test_a_pod_was_tried_once_kube_scheduler_reports_it() -> None:
    def conditions(reason: str) -> list[dict[str, str]]:
        return [{"type": "PodScheduled", "status": "False", "reason": reason}]

    fresh, tried = read(), read(conditions=conditions("Unschedulable"), nominatedNodeName="n")
    assert (fresh.was_tried, fresh.nominated, fresh.priority) == (False, "", 7)
    assert (tried.was_tried, tried.nominated) == (True, "n")
    assert not read(conditions=conditions("SchedulingGated")).was_tried


def test_why_kube_scheduler_found_no_node_is_known_until_there_is_one() -> None:
    refused = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
    bound = {"type": "PodScheduled", "status": "True", "message": ""}
    assert read(conditions=[refused]).unschedulable == "0/3 nodes are available"
    assert read(conditions=[bound]).unschedulable == read().unschedulable == ""


@pytest.mark.parametrize("path", LAUNCHER, ids=lambda path: path.stem)
def test_the_launcher_pods_of_two_vms_have_one_shape(path: Any) -> None:
    pod = json.loads(path.read_text())
    other = copy.deepcopy(pod)
    other["spec"]["hostname"] = "another-vm"
    other["spec"]["volumes"][0]["name"] = "another-disk"
    shapes = {pod_record(msgspec.json.decode(json.dumps(one), type=PodObject)).shape for one in (pod, other)}
    assert len(shapes) == 1
    assert NO_SHAPE not in shapes
