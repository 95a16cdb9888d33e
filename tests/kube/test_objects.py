"""Records of real pods equal what a slow reader of the whole JSON finds; junk never stops a watch."""

from __future__ import annotations

import copy
import json
import math
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.node_topology import Enforcement, topology_document
from kvplace.core.quantity import parse_quantity
from kvplace.core.scalars import ContainerId, CpuMask, NodeName, PackageId
from kvplace.core.topology import Topology, topology_of_cpu_map
from kvplace.kube.custom_objects import TopologyReader, ledger_record
from kvplace.kube.object_records import NO_SHAPE, NodeRecord, PodRecord
from kvplace.kube.objects import ObjectList, PodObject, RawObject, node_record, pod_record
from kvplace.kube.store import Store
from kvplace.kube.watches import TOPOLOGIES, Apply, Delete
from tests.core.machines import topologies
from tests.kubevirt_documents import PODS

FILES = sorted(PODS.glob("*.json"))


def read_slowly(pod: dict[str, Any]) -> PodRecord:
    """The record as one reads it from the documentation of pods, from the whole object."""
    metadata, spec, state = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    annotations = metadata.get("annotations") or {}
    placed = (metadata.get("labels") or {}).get("kvplace.io/placed") == "true"
    owners = [o for o in metadata.get("ownerReferences") or [] if o["kind"] == "VirtualMachineInstance"]
    compute = [c for c in state.get("containerStatuses") or [] if c["name"] == "compute"]
    return PodRecord(
        namespace=metadata.get("namespace", ""),
        name=metadata.get("name", ""),
        uid=metadata.get("uid", ""),
        node=spec.get("nodeName", ""),
        phase=state.get("phase", ""),
        deleting="deletionTimestamp" in metadata,
        request=annotations.get("kvplace.io/request", "") if placed else "",
        placement=annotations.get("kvplace.io/placement", "") if placed else "",
        cpu_map=annotations.get("cpu-map", ""),
        vmi=owners[0]["name"] if owners else "",
        vmi_uid=owners[0]["uid"] if owners else "",
        compute_terminated=any("terminated" in (c.get("state") or {}) for c in compute),
        compute_container=ContainerId("".join(c.get("containerID", "")[13:] for c in compute)),
        resource_version=metadata.get("resourceVersion", ""),
        was_tried=any(found["type"] == "PodScheduled" for found in state.get("conditions") or []),
        unschedulable=next(
            (
                found.get("message", "")
                for found in state.get("conditions") or []
                if not spec.get("nodeName") and (found["type"], found["status"]) == ("PodScheduled", "False")
            ),
            "",
        ),
        priority=spec.get("priority", 0),
        repels=bool(
            ((spec.get("affinity") or {}).get("podAntiAffinity") or {}).get(
                "requiredDuringSchedulingIgnoredDuringExecution"
            )
        ),
        labels=json.dumps(metadata["labels"]) if spec.get("nodeName") else "",
        resources=requested(spec),
    )


def requested(spec: dict[str, Any]) -> dict[str, int]:
    """The CPUs that a pod requests by the documentation of init containers, in thousandths."""
    total: Counter[str] = Counter()
    ahead: dict[str, int] = {}
    starting = spec.get("initContainers") or []
    staying = [one for one in starting if one.get("restartPolicy") == "Always"]
    for container in (one for one in starting if one not in staying):
        for name, amount in container.get("resources", {}).get("requests", {}).items():
            ahead[name] = max(ahead.get(name, 0), math.ceil(parse_quantity(amount) * 1000))
    for container in [*(spec.get("containers") or []), *staying]:
        for name, amount in container.get("resources", {}).get("requests", {}).items():
            total[name] += math.ceil(parse_quantity(amount) * 1000)
    found = {name: max(total[name], ahead.get(name, 0)) for name in total.keys() | ahead.keys()}
    elsewhere = ("persistentVolumeClaim", "ephemeral", "csi")
    attached = sum(any(kind in volume for kind in elsewhere) for volume in spec.get("volumes") or [])
    return {**found, **({"volumes": attached} if attached else {})}


def read(pod: Any) -> PodRecord:
    return pod_record(msgspec.json.decode(json.dumps(pod), type=PodObject))


def test_there_are_real_pods_to_read() -> None:
    assert list(PODS.glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_real_launcher_pod_is_read_as_it_is(path: Path) -> None:
    pod = json.loads(path.read_text())
    assert replace(read(pod), shape=NO_SHAPE) == read_slowly(pod)
    assert read(pod).vmi


@pytest.mark.parametrize("path", FILES[:2], ids=lambda path: path.stem)
def test_a_pod_is_followed_through_its_life(path: Path) -> None:
    pod = json.loads(path.read_text())
    pod["metadata"]["annotations"] |= {
        "kvplace.io/placement": "{}",
        "cpu-map": "{}",
        "kvplace.io/request": "{}",
    }
    pod["metadata"]["labels"]["kvplace.io/placed"] = "true"
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    pod["spec"]["nodeName"] = "worker"
    pod["status"] = {
        "phase": "Failed",
        "conditions": [{"type": "PodScheduled", "status": "False"}],
        "containerStatuses": [
            {
                "name": "hook-sidecar-0",
                "containerID": "containerd://1",
                "state": {"terminated": {"exitCode": 0}},
            },
            {"name": "compute", "containerID": "containerd://2", "state": {"terminated": {"exitCode": 137}}},
        ],
    }
    ended = read(pod)
    assert ended == read_slowly(pod)
    assert (ended.deleting, ended.compute_terminated, ended.compute_container) == (True, True, "2")
    running = copy.deepcopy(pod)
    running["status"]["containerStatuses"][1]["state"] = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    assert not read(running).compute_terminated


@pytest.mark.parametrize("labels", [None, {}, {"kvplace.io/placed": "false"}, {"app": "true"}], ids=str)
def test_request_and_placement_count_only_on_a_pod_that_admission_has_labelled(
    labels: dict[str, str] | None,
) -> None:
    forged = {"kvplace.io/request": "{}", "kvplace.io/placement": "{}"}
    pod = {"metadata": {"name": "a", "annotations": forged, "labels": labels}, "spec": {}, "status": {}}
    assert (read(pod).request, read(pod).placement) == ("", "")
    pod["metadata"]["labels"] = {"kvplace.io/placed": "true"}
    assert (read(pod).request, read(pod).placement) == ("{}", "{}")


def test_null_stands_for_nothing_wherever_go_writes_it() -> None:
    bare = {
        "metadata": {"name": "a", "annotations": None, "ownerReferences": None},
        "status": {"conditions": None, "containerStatuses": [{"name": "compute", "state": None}]},
    }
    assert replace(read(bare), shape=NO_SHAPE) == read_slowly(bare)
    assert msgspec.json.decode(b'{"metadata":{},"items":null}', type=ObjectList).items is None


def test_a_node_is_its_name_and_its_map() -> None:
    node = {
        "metadata": {
            "name": "a",
            "uid": "u",
            "resourceVersion": "7",
            "annotations": {"cpu-map": "{}", "x": "y"},
        },
        "spec": {"unschedulable": True},
        "status": {"images": [{"names": ["a"]}]},
    }
    read_node = node_record(msgspec.json.decode(json.dumps(node), type=RawObject))
    assert read_node == NodeRecord(NodeName("a"), "u", cpu_map="{}", resource_version="7")


def custom(
    spec: Any, generation: int = 1, version: int = 1, uid: str = "u", name: str = "worker"
) -> RawObject:
    metadata = {"name": name, "uid": uid, "generation": generation, "resourceVersion": str(version)}
    return msgspec.json.decode(json.dumps({"metadata": metadata, "spec": spec}), type=RawObject)


@given(topologies())
def test_every_machine_arrives_as_it_was_published(topology: Topology) -> None:
    record = TopologyReader().record(custom(topology_document(topology)))
    assert (record.topology, record.problem) == (topology, "")


@given(topologies(most_cpus=8), topologies(most_cpus=8))
def test_a_machine_is_read_again_only_when_its_spec_changes(first: Topology, second: Topology) -> None:
    reader = TopologyReader()
    before = reader.record(custom(topology_document(first), generation=1, version=1))
    status_only = reader.record(custom(topology_document(first), generation=1, version=2))
    assert status_only.topology is before.topology
    assert status_only.resource_version == "2"
    assert reader.record(custom(topology_document(second), generation=2, version=3)).topology == second
    assert (
        reader.record(custom(topology_document(first), generation=2, version=4, uid="new")).topology == first
    )


def test_machines_of_deleted_nodes_are_forgotten() -> None:
    reader, store = TopologyReader(), Store(TOPOLOGIES)
    document = topology_document(topology_of_cpu_map({PackageId(0): CpuMask(0b1111)}))
    machines: list[weakref.ref[Topology]] = []
    for round_ in range(3):
        for number in range(20):
            node = f"worker-{number}"
            record = reader.record(custom(document, uid=f"{node}-{round_}", name=node))
            assert record.topology is not None
            machines.append(weakref.ref(record.topology))
            store.apply(Apply(record))
        assert len([machine for machine in machines if machine() is not None]) == 20
        for record in list(store.records.values()):
            store.apply(Delete(record))
        del record
        assert [machine for machine in machines if machine() is not None] == []


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["owners", "claims", "cores", "1", "policy", "a"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@given(junk)
def test_a_spec_that_makes_no_sense_becomes_a_problem_never_an_error(spec: Any) -> None:
    topology = TopologyReader().record(custom(spec))
    assert (topology.topology is None) == bool(topology.problem)
    ledger = ledger_record(custom(spec))
    assert not ledger.problem or not ledger.ledger.owners


def test_cpus_that_the_kubelet_holds_are_read_from_the_status_of_a_known_machine() -> None:
    reader = TopologyReader()

    def seen(status: Any) -> tuple[bool, int, str]:
        document = custom(topology_document(topology_of_cpu_map({PackageId(0): CpuMask(0b1111)})))
        raw = msgspec.Raw(json.dumps(status).encode())
        record = reader.record(msgspec.structs.replace(document, status=raw))
        return record.topology is not None, record.kubelet_cpus, record.problem

    assert seen({}) == seen(None) == seen({"pods": [{"uid": "u"}]}) == (True, 0, "")
    assert seen({"kubeletCpus": "2-3"}) == (True, 0b1100, "")
    assert seen({"kubeletCpus": ""}) == (True, 0, "")
    for junk in ({"kubeletCpus": "2-"}, {"kubeletCpus": 3}, {"inUse": {"0": 5}}, {"inUse": [1]}, [1], "x"):
        known, held, problem = seen(junk)
        assert (known, held) == (False, 0)
        assert problem


@pytest.mark.parametrize(
    ("status", "enforcement"),
    [
        ({}, Enforcement.NONE),
        ({"enforcement": "none"}, Enforcement.NONE),
        ({"enforcement": "nri"}, Enforcement.NRI),
        ({"enforcement": "cgroup"}, Enforcement.CGROUP),
        ({"enforcement": "dra"}, Enforcement.DRA),
    ],
)
def test_how_a_node_enforces_is_read_from_the_status(status: Any, enforcement: Enforcement) -> None:
    document = custom(topology_document(topology_of_cpu_map({PackageId(0): CpuMask(0b1111)})))
    raw = msgspec.Raw(json.dumps(status).encode())
    record = TopologyReader().record(msgspec.structs.replace(document, status=raw))
    assert (record.enforcement, record.problem) == (enforcement, "")


def test_a_way_of_enforcing_that_is_not_known_is_a_problem_with_its_field() -> None:
    document = custom(topology_document(topology_of_cpu_map({PackageId(0): CpuMask(0b1111)})))
    status = msgspec.Raw(b'{"enforcement": "magic"}')
    record = TopologyReader().record(msgspec.structs.replace(document, status=status))
    assert (record.topology, record.enforcement) == (None, Enforcement.NONE)
    assert "enforcement" in record.problem


def owned_pod(request: str | None, *owners: dict[str, Any]) -> PodRecord:
    """A bound pod of these owners whose container `compute` has ended."""
    annotations = {} if request is None else {"kvplace.io/request": request}
    document = {
        "metadata": {
            "name": "a",
            "labels": {"kvplace.io/placed": "true"},
            "annotations": annotations,
            "ownerReferences": owners,
        },
        "spec": {"nodeName": "n"},
        "status": {
            "phase": "Running",
            "containerStatuses": [{"name": "compute", "state": {"terminated": {"exitCode": 0}}}],
        },
    }
    return pod_record(msgspec.json.decode(json.dumps(document), type=PodObject))


def vmi_owner(name: str, **other: object) -> dict[str, Any]:
    kind = {"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "controller": True}
    return {**kind, "name": name, "uid": f"uid-{name}", **other}


PLAIN = '{"version":1,"vcpus":2,"vmi":""}'


def test_a_plain_pod_stays_one_whatever_owners_it_names() -> None:
    """Whoever may edit a pod writes its owners; with one of 300 characters no claim of it could be stored."""
    for owner in (vmi_owner("vm"), vmi_owner("vm", apiVersion="other.example/v1"), vmi_owner("v" * 300)):
        record = owned_pod(PLAIN, owner)
        assert (record.vmi, record.vmi_uid) == ("", "")
        assert record.compute_terminated
        assert not record.has_ended


def test_a_pod_belongs_to_the_vmi_that_its_request_names() -> None:
    request = '{"version":1,"vcpus":2,"vmi":"shop/vm"}'
    record = owned_pod(request, vmi_owner("other"), vmi_owner("vm", apiVersion="x/v1"), vmi_owner("vm"))
    assert (record.vmi, record.vmi_uid) == ("vm", "uid-vm")
    assert record.has_ended
    without_owner = owned_pod(request)
    assert (without_owner.vmi, without_owner.vmi_uid) == ("vm", "")
    assert without_owner.has_ended


@pytest.mark.parametrize("request_text", [None, '{"version":1,"vcpus":2}'])
def test_where_no_request_states_it_an_owner_of_kubevirts_group_does(request_text: str | None) -> None:
    assert owned_pod(request_text, vmi_owner("vm")).vmi == "vm"
    for owner in (vmi_owner("vm", apiVersion="x.example/v1"), vmi_owner("vm", controller=False)):
        assert owned_pod(request_text, owner).vmi == ""


def test_a_pod_whose_request_cannot_be_read_counts_as_plain() -> None:
    assert not owned_pod("{", vmi_owner("vm")).has_ended
