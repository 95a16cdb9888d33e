"""The `cpu-map` of pods and nodes: read strictly, since people and foreign tools write it, too."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.cpu_map import read_cpu_map, read_node_cpu_map, write_cpu_map
from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.errors import BadAnnotation
from kvplace.core.topology import Topology, topology_of_cpu_map
from tests.core.invalid_input import DEEP_OR_LONG, answer_or_sentence, json_values, texts
from tests.core.machines import topologies


@given(topologies(), st.randoms(use_true_random=False))
def test_a_map_written_and_read_keeps_the_order_of_the_vcpus_in_each_socket(
    topology: Topology, random: object
) -> None:
    order = list(cpus_of(topology.cpus))
    random.shuffle(order)  # type: ignore[attr-defined]
    read = read_cpu_map(write_cpu_map(topology, order))
    assert list(read) == sorted(read)
    for socket, cpus in read.items():
        assert list(cpus) == [cpu for cpu in order if topology.package_of[cpu] == socket]
    assert sorted(cpu for cpus in read.values() for cpu in cpus) == sorted(order)


def test_sockets_come_in_the_order_of_their_numbers_whatever_the_order_written() -> None:
    assert read_cpu_map('{"socket10": ["7"], "socket2": ["9", "1"]}') == {2: (9, 1), 10: (7,)}
    assert read_node_cpu_map('{"socket1": [4, "5"], "socket0": ["0"]}') == {0: 1, 1: 0b110000}


def test_a_hand_written_map_is_a_machine_of_one_node_per_socket_without_smt() -> None:
    machine = topology_of_cpu_map(read_node_cpu_map('{"socket0": ["0", "1"], "socket1": ["4"]}'))
    assert [(node.id, node.cpus, node.memory) for node in machine.numa_nodes] == [(0, 3, 0), (1, 16, 0)]
    assert machine.l3_groups == (3, 16)
    assert machine.cores == (1, 2, 16)
    assert machine.reserved == 0


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("", 'is not JSON; write {"socket0": ["2", "3"]}'),
        ("0-3", 'is not JSON; write {"socket0": ["2", "3"]}'),
        ('["2"]', 'must be an object like {"socket0": ["2", "3"]}'),
        ('{"numa0": ["2"]}', "key 'numa0' must be socket0, socket1, ..."),
        ('{"socket": ["2"]}', "key 'socket' must be socket0, socket1, ..."),
        ('{"socket0": "2"}', "the value of socket0 must be a list of CPU ids"),
        ('{"socket0": ["2"], "socket00": ["3"]}', "names socket 0 twice"),
        ('{"socket0": ["2"], "socket0": ["3"]}', "names socket 0 twice"),
        ('{"socket0": ["2", "2"]}', "names CPU 2 twice; each CPU belongs to one place"),
        ('{"socket0": ["2"], "socket1": [2]}', "names CPU 2 twice; each CPU belongs to one place"),
        ('{"socket0": ["-1"]}', "socket0 holds '-1', which is not a CPU id from 0 to 16383"),
        ('{"socket0": ["16384"]}', "socket0 holds '16384', which is not a CPU id from 0 to 16383"),
        ('{"socket0": [true]}', "socket0 holds True, which is not a CPU id"),
        ('{"socket0": [2.0]}', "socket0 holds 2.0, which is not a CPU id"),
        ('{"socket0": ["٣"]}', "socket0 holds '٣', which is not a CPU id from 0 to 16383"),
        ("{}", "names no CPU"),
        ('{"socket0": []}', "names no CPU"),
    ],
)
def test_a_map_that_cannot_be_meant_is_refused_with_the_fix(text: str, fix: str) -> None:
    with pytest.raises(BadAnnotation) as caught:
        read_cpu_map(text)
    assert str(caught.value) == f"annotation cpu-map: {text!r}: {fix}"


def test_a_map_of_megabytes_is_not_read() -> None:
    with pytest.raises(BadAnnotation, match="is longer than 262144 characters"):
        read_cpu_map(" " * (256 * 1024) + "{}")


@given(
    texts
    | st.dictionaries(st.sampled_from(["socket0", "socket1", "socket01", "x"]), json_values).map(json.dumps)
    | st.dictionaries(
        st.sampled_from(["socket0", "socket3"]),
        st.lists(st.integers(-2, 9) | st.text(max_size=2), max_size=5),
    ).map(json.dumps)
)
def test_any_text_is_either_a_map_or_one_sentence(text: str) -> None:
    read, sentence = answer_or_sentence(read_cpu_map, text, BadAnnotation)
    if read is None:
        assert sentence.startswith("annotation cpu-map: ")
    else:
        assert mask_of(cpu for cpus in read.values() for cpu in cpus)


@pytest.mark.parametrize("text", DEEP_OR_LONG, ids=lambda text: text[:12])
def test_json_that_is_deep_or_long_is_not_a_crash(text: str) -> None:
    with pytest.raises(BadAnnotation):
        read_cpu_map(text)
