"""A machine is a checked value, and its JSON form gives back the same machine or one sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.cpuset import cpus_of
from kvplace.core.errors import BadTopology
from kvplace.core.node_topology import (
    node_name,
    node_topology,
    read_node_topology,
    read_topology,
    topology_document,
)
from kvplace.core.scalars import NO_CPUS, Bytes, CpuMask, NumaId
from kvplace.core.topology import Topology
from tests.core.invalid_input import answer_or_sentence, disturbed, json_values
from tests.core.machines import make_numa_node, make_package, make_topology, topologies

GIB = Bytes(1 << 30)
MACHINE = make_topology(
    packages=(make_package(0, 0b1111),),
    numa_nodes=(
        make_numa_node(0, 0b0101, 16 * GIB, {GIB: 4}, {0: 10, 1: 21}),
        make_numa_node(1, 0b1010, 8 * GIB, {}, {0: 21, 1: 10}),
    ),
    l3_groups=(0b1111,),
    cores=(0b0101, 0b1010),
    reserved=0b0001,
    isolated=0b1000,
)
DOCUMENT: dict[str, Any] = topology_document(MACHINE)


@given(topologies(tangled=None))
def test_a_core_is_undivided_when_no_set_of_any_level_holds_a_part_of_it(machine: Topology) -> None:
    sets = [*machine.l3_groups, *(n.cpus for n in machine.numa_nodes), *(p.cpus for p in machine.packages)]
    divided = {core for core in machine.cores for cpus in sets if core & cpus and core & ~cpus}
    assert machine.undivided_cores == tuple(core for core in machine.cores if core not in divided)


@given(topologies())
def test_a_machine_written_and_read_is_the_same_machine(machine: Topology) -> None:
    again = read_topology(json.loads(json.dumps(topology_document(machine))))
    assert again == machine
    assert again.fingerprint == machine.fingerprint
    assert read_topology(node_topology("worker", machine)) == machine


def test_the_machine_is_written_in_the_words_of_its_contract() -> None:
    assert {key: value for key, value in DOCUMENT.items() if key != "fingerprint"} == {
        "packages": [{"id": 0, "cpus": "0-3"}],
        "numaNodes": [
            {
                "id": 0,
                "cpus": "0,2",
                "memory": "16Gi",
                "hugePages": {"1Gi": 4},
                "distances": {"0": 10, "1": 21},
            },
            {"id": 1, "cpus": "1,3", "memory": "8Gi", "hugePages": {}, "distances": {"0": 21, "1": 10}},
        ],
        "l3Groups": ["0-3"],
        "cores": ["0,2", "1,3"],
        "reserved": "0",
        "isolated": "3",
    }


@given(topologies())
def test_every_cpu_has_one_place_on_each_level(machine: Topology) -> None:
    for cpu in cpus_of(machine.cpus):
        assert machine.core_of[cpu] >> cpu & 1
        assert len(machine.nodes_of(CpuMask(1 << cpu))) == len(machine.packages_of(CpuMask(1 << cpu))) == 1
        assert machine.packages_of(CpuMask(1 << cpu)) == (machine.package_of[cpu],)
    assert machine.allocatable | machine.reserved == machine.cpus
    assert machine.allocatable & machine.reserved == 0


def test_a_fingerprint_in_a_document_is_not_believed() -> None:
    assert read_topology(DOCUMENT | {"fingerprint": "sha256:lie"}).fingerprint == MACHINE.fingerprint


@pytest.mark.parametrize(
    "other",
    [
        replace(MACHINE, reserved=NO_CPUS),
        replace(MACHINE, isolated=NO_CPUS),
        replace(MACHINE, cores=(CpuMask(1), CpuMask(2), CpuMask(4), CpuMask(8))),
        replace(MACHINE, l3_groups=(CpuMask(0b0101), CpuMask(0b1010))),
        replace(MACHINE, packages=(make_package(1, 0b1111),)),
        replace(MACHINE, numa_nodes=(make_numa_node(0, 0b1111, 24 * GIB),)),
    ],
    ids=["reserved", "isolated", "cores", "l3", "packages", "nodes"],
)
def test_whatever_matters_for_placing_changes_the_fingerprint(other: Topology) -> None:
    assert other.fingerprint != MACHINE.fingerprint


@given(topologies(), st.integers(0, 2**16 - 1), st.integers(0, 2**16 - 1))
def test_a_machine_that_gives_out_fewer_cpus_is_the_same_machine(
    machine: Topology, first: int, second: int
) -> None:
    less = machine.giving_out(CpuMask(first))
    assert less.allocatable == machine.allocatable & first
    assert (less.fingerprint, less.cpus, less.reserved) == (
        machine.fingerprint,
        machine.cpus,
        machine.reserved,
    )
    assert (less == machine) is (less.allocatable == machine.allocatable)
    assert less is machine.giving_out(CpuMask(first))
    assert less.giving_out(CpuMask(second)) == machine.giving_out(CpuMask(first & second))


def test_the_farther_direction_counts_and_an_unknown_distance_is_that_of_a_neighbour() -> None:
    lopsided = replace(
        MACHINE,
        numa_nodes=(make_numa_node(0, 0b0101, 0, {}, {1: 12}), make_numa_node(1, 0b1010, 0, {}, {0: 32})),
    )
    assert lopsided.distance(NumaId(0), NumaId(1)) == lopsided.distance(NumaId(1), NumaId(0)) == 32
    assert lopsided.distance(NumaId(0), NumaId(0)) == 10
    silent = replace(MACHINE, numa_nodes=(make_numa_node(0, 0b0101, 0), make_numa_node(1, 0b1010, 0)))
    assert silent.distance(NumaId(0), NumaId(1)) == 20


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"cores": []}, "the machine has no cores: give at least one core with its CPUs"),
        ({"cores": ["0,2", "1"]}, "l3Groups lists CPU 3, which no core has"),
        ({"cores": ["0,2", "1,3", "3"]}, "cores lists CPU 3 more than once"),
        ({"cores": ["0-3", ""]}, "cores[1] has no CPU"),
        ({"l3Groups": ["0-2"]}, "l3Groups leaves out CPU 3, which cores lists"),
        ({"packages": []}, "packages leaves out CPU 0-3, which cores lists"),
        (
            {"packages": [{"id": 0, "cpus": "0-1"}, {"id": 0, "cpus": "2-3"}]},
            "packages has the same id twice: [0, 0]",
        ),
        (
            {"packages": [{"cpus": "0-3"}]},
            "packages[0].id is missing; it must be a whole number from 0 to 2147483647",
        ),
        ({"packages": [{"id": 0}]}, "packages[0].cpus is missing; it must be a CPU list such as '0-3,8'"),
        ({"packages": ["0-3"]}, "packages[0] is '0-3'; it must be an object"),
        (
            {"numaNodes": {"0": "0-3"}},
            "numaNodes is {'0': '0-3'}; it must be a list",
        ),
        (
            {"numaNodes": [{"id": 0, "cpus": "0-3", "memory": "16GB"}]},
            "numaNodes[0].memory: '16GB' is not a quantity such as 8Gi, 512Mi, 4 or 500m",
        ),
        (
            {"numaNodes": [{"id": 0, "cpus": "0-3", "memory": 1.5}]},
            "numaNodes[0].memory is 1.5; it must be a quantity such as 8Gi",
        ),
        (
            {"numaNodes": [{"id": 0, "cpus": "0-3", "hugePages": {"1Gi": 1, "1024Mi": 2}}]},
            "numaNodes[0].hugePages has pages of 1Gi twice; write one count of them",
        ),
        (
            {"numaNodes": [{"id": 0, "cpus": "0-3", "hugePages": [4]}]},
            'numaNodes[0].hugePages is [4]; it must be an object of counts by page size such as {"1Gi": 8}',
        ),
        (
            {"numaNodes": [{"id": 0, "cpus": "0-3", "distances": {"x": 10}}]},
            "numaNodes[0].distances['x'] is not the id of a NUMA node",
        ),
        ({"reserved": "7"}, "reserved names CPUs that the machine does not have: 7"),
        ({"isolated": None}, "isolated is null; it must be a CPU list such as '0-3,8'"),
        ({"reserved": "0-"}, "reserved '0-': '0-' is neither a number nor a range like 2-5"),
    ],
    ids=lambda part: str(part)[:50],
)
def test_a_machine_that_contradicts_itself_is_refused_with_the_field(
    change: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(BadTopology) as caught:
        read_topology(DOCUMENT | change)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"apiVersion": "kvplace.io/v9"}, "apiVersion is 'kvplace.io/v9'; it must be kvplace.io/v1alpha1"),
        ({"kind": "Node"}, "kind is 'Node'; it must be NodeTopology"),
        ({"metdata": {}}, "'metdata' is not known; did you mean 'metadata'?"),
        (
            {"spec": DOCUMENT | {"reservedCpus": "0"}},
            "spec.'reservedCpus' is not known; did you mean 'reserved'?",
        ),
        (
            {"spec": DOCUMENT | {"packages": [{"id": 0, "cpus": "0-3", "socket": 1}]}},
            "spec.packages[0].'socket' is not known; known are id, cpus",
        ),
        (
            {"spec": DOCUMENT | {"numaNodes": [{"id": 0, "cpus": "0-3", "hugepages": {}}]}},
            "spec.numaNodes[0].'hugepages' is not known; did you mean 'hugePages'?",
        ),
    ],
    ids=str,
)
def test_a_misspelt_key_or_another_version_is_refused_where_a_person_may_have_written_it(
    change: dict[str, Any], sentence: str
) -> None:
    document = node_topology("worker-1", MACHINE) | change
    with pytest.raises(BadTopology) as caught:
        read_node_topology(document)
    assert str(caught.value) == sentence


def test_a_newer_release_may_add_keys_to_the_objects_of_a_cluster() -> None:
    assert read_topology({"spec": DOCUMENT | {"later": 1}}) == read_topology(DOCUMENT)


def test_an_object_as_the_cluster_has_it_is_read_with_its_name() -> None:
    document = node_topology("worker-1.example.org", MACHINE, kubelet_cpus=CpuMask(0b11))
    document["metadata"] |= {"resourceVersion": "7", "managedFields": [{}]}
    document["status"]["conditions"] = []
    assert read_node_topology(document) == ("worker-1.example.org", MACHINE)
    assert read_node_topology(DOCUMENT) == ("", read_topology(DOCUMENT))


BAD_NAMES = ["Worker 1/..", "Worker", "a/b", "..", "-a", "a-", "a..b", "a.-b", "a" * 254, "ä", " "]


@pytest.mark.parametrize("name", [*BAD_NAMES, 7])
def test_a_name_that_no_node_can_have_is_refused(name: object) -> None:
    document = node_topology("worker-1", MACHINE)
    document["metadata"]["name"] = name
    with pytest.raises(BadTopology, match=r"metadata.name is .*; the name of a node consists of small"):
        read_node_topology(document)


@pytest.mark.parametrize("text", [*BAD_NAMES, "vmware_fpe", "arm-A510", "db.-.x", "", "a" * 252 + ".b"])
def test_any_text_can_be_made_a_name_that_a_node_can_have(text: str) -> None:
    document = node_topology(text, MACHINE)
    assert read_node_topology(document) == (node_name(text), MACHINE)


def test_a_name_that_a_node_can_have_stays() -> None:
    assert node_name("worker-1.example.org") == "worker-1.example.org"
    assert node_name("Worker 1/..") == "worker-1"


def test_a_list_of_tens_of_thousands_is_not_read() -> None:
    with pytest.raises(BadTopology, match="cores has 16385 entries, more than 16384"):
        read_topology(DOCUMENT | {"cores": ["0"] * 16385})


def test_cores_without_cpus_make_no_machine() -> None:
    with pytest.raises(BadTopology, match="the machine has no cores"):
        make_topology(packages=(), numa_nodes=(), l3_groups=(), cores=(0,))


@given(
    json_values
    | disturbed(DOCUMENT)
    | st.fixed_dictionaries({"spec": disturbed(DOCUMENT) | json_values, "kind": st.just("NodeTopology")})
    | disturbed(DOCUMENT["numaNodes"][0]).map(lambda node: DOCUMENT | {"numaNodes": [node]})
)
def test_any_document_is_either_a_machine_or_one_sentence(document: object) -> None:
    machine, _ = answer_or_sentence(read_topology, document, BadTopology)
    if machine is not None:
        assert read_topology(topology_document(machine)) == machine


@given(topologies())
def test_a_machine_whose_cores_are_listed_in_another_order_is_the_same_machine(machine: Topology) -> None:
    other = replace(machine, cores=machine.cores[::-1])
    assert other == machine
    assert other.fingerprint == machine.fingerprint
