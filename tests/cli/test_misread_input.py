"""Input that is easily misread is an error of one sentence: a wrong answer is worse than none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.cli.calls import Caller


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"vcpus": 8, "memory": 32}, 'memory: 32 is 32 bytes; write "32Gi"'),
        ({"vcpus": 8, "memory": "32"}, "memory: '32' is 32 bytes; write \"32Gi\""),
        ({"vcpus": 8, "memory": "500m"}, "memory: '500m' is less than a byte; write \"500Mi\""),
        ({"vcpus": 8, "hugepages": {"2": 4}}, "hugepages: "),
    ],
)
def test_memory_of_a_few_bytes_is_a_forgotten_unit(
    kvplace: Caller, request_: dict[str, object], words: str
) -> None:
    line = json.dumps(request_)
    called = kvplace("place", "--topology", "epyc-7502p", "-o", "json", stdin=line)
    assert called.code == 2
    assert words in json.loads(called.out)["error"]
    called = kvplace("plan", "--requests", "-", stdin=line)
    assert (called.code, called.out) == (2, "")
    assert words in called.err


@pytest.mark.parametrize("memory", ["32Gi", 32 << 30, str(32 << 30), 0], ids=repr)
def test_memory_with_a_unit_or_in_real_bytes_is_read(kvplace: Caller, memory: object) -> None:
    line = json.dumps({"vcpus": 8, "memory": memory})
    assert kvplace("place", "--topology", "epyc-7502p", stdin=line).code == 0


@pytest.mark.parametrize("command", [("topology",), ("map",), ("place", "--topology")], ids=" ".join)
@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("spec.reservedCpus", "0-1", "'reservedCpus' is not known; did you mean 'reserved'?"),
        ("apiVersion", "kvplace.io/v9", "apiVersion is 'kvplace.io/v9'; it must be kvplace.io/v1alpha1"),
        ("metadata.name", "Worker 1/..", "metadata.name is 'Worker 1/..'"),
    ],
)
def test_a_machine_that_states_something_else_than_it_seems_is_refused(
    kvplace: Caller, tmp_path: Path, command: tuple[str, ...], path: str, value: str, words: str
) -> None:
    document = json.loads(kvplace("topology", "epyc-7502p", "-o", "json").out)
    *parents, key = path.split(".")
    inner = document
    for parent in parents:
        inner = inner[parent]
    inner[key] = value
    for text in (json.dumps(document), yaml.safe_dump(document)):
        file = tmp_path / "machine"
        file.write_text(text, encoding="utf-8")
        called = kvplace(*command, str(file), stdin='{"vcpus": 1}')
        assert (called.code, called.out) == (2, "")
        assert words in called.err
        assert called.err.count("\n") == 1


def test_a_file_name_that_no_node_can_have_is_changed_and_reported(kvplace: Caller, tmp_path: Path) -> None:
    file = tmp_path / "Worker 1.json"
    file.write_text(json.dumps(json.loads(kvplace("topology", "epyc-7502p", "-o", "json").out)["spec"]))
    note = "kvplace: the node is named worker-1: 'Worker 1' is not a name that a node can have\n"
    called = kvplace("topology", str(file), "-o", "json")
    assert (json.loads(called.out)["metadata"]["name"], called.err) == ("worker-1", note)
    called = kvplace("topology", str(file), "-o", "name")
    assert (called.out, called.err) == ("nodetopology.kvplace.io/worker-1\n", note)
    assert kvplace("topology", str(file)).err == ""
