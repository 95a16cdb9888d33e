"""A description of a machine is recognised by its content, or refused in one sentence."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvplace.core.cpuset import format_cpu_list
from kvplace.core.errors import BadBody, BadTopology, Misconfigured
from kvplace.core.node_topology import node_topology
from kvplace.core.scalars import NO_CPUS, CpuMask
from kvplace.machines.machine import Machine, read_machine_at
from kvplace.machines.server_types import read_machine
from tests.core.invalid_input import DEEP_OR_LONG, answer_or_sentence, disturbed
from tests.libvirt.written_capabilities import capabilities_of
from tests.linux.written_tree import sysfs_of

MACHINE = replace(read_machine("2x-epyc-9354-nps2"), reserved=NO_CPUS, isolated=NO_CPUS)
STATE = '{"policyName":"static","defaultCpuSet":"0","entries":{"p":{"c":"4-6"}},"checksum":0}'
DOCUMENT = node_topology("worker", MACHINE, CpuMask(0b1100))


def packed(state: str = STATE) -> bytes:
    files = sysfs_of(MACHINE).files | {"var/lib/kubelet/cpu_manager_state": state}
    into = io.BytesIO()
    with tarfile.open(fileobj=into, mode="w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(f"host/{name}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return into.getvalue()


@pytest.mark.parametrize(
    ("content", "name", "kubelet"),
    [
        (packed(), "a machine", "4-6"),
        (gzip.decompress(packed()), "a machine", "4-6"),
        (json.dumps(DOCUMENT).encode(), "worker", "2-3"),
        (b"\xef\xbb\xbf \n" + json.dumps(DOCUMENT["spec"]).encode(), "a machine", ""),
        (yaml.safe_dump(DOCUMENT).encode(), "worker", "2-3"),
        (b'<?xml version="1.0" encoding="UTF-8"?>\n' + capabilities_of(MACHINE).encode(), "a machine", ""),
        (capabilities_of(MACHINE).replace("<topology", "\n<topology").encode(), "a machine", ""),
    ],
    ids=["tar.gz", "tar", "object", "spec", "yaml", "capabilities", "capabilities without indentation"],
)
def test_a_machine_is_the_same_in_every_form_whatever_the_files_name(
    tmp_path: Path, content: bytes, name: str, kubelet: str
) -> None:
    path = tmp_path / "a machine"
    path.write_bytes(content)
    found = read_machine_at(path)
    assert (found.name, found.topology, found.notes) == (name, MACHINE, ())
    assert format_cpu_list(found.kubelet_cpus) == kubelet


def test_a_machine_may_come_through_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(packed(),))
    writer.start()
    assert read_machine_at(pipe).topology == MACHINE
    writer.join()


def test_a_cpu_map_is_a_machine_of_sockets_alone(tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    path.write_text('{"socket1": ["4", "5"], "socket0": ["2"]}', encoding="ascii")
    found = read_machine_at(path)
    assert [(package.id, package.cpus) for package in found.topology.packages] == [(0, 0b100), (1, 0b110000)]
    assert len(found.topology.cores) == 3
    assert "has no siblings" in found.notes[0]


def test_cpus_of_the_kubelet_that_the_machine_lacks_are_noted_and_left_out() -> None:
    machine = Machine("small", read_machine("epyc-7502p"))
    found = machine.with_kubelet_cpus(STATE.replace("4-6", "62-65"), "/here/state")
    assert format_cpu_list(found.kubelet_cpus) == "62-63"
    assert found.notes == ("/here/state names CPU 64-65, which the machine does not have",)


def test_the_only_machine_of_a_list_is_that_machine(tmp_path: Path) -> None:
    for kind in ("List", "NodeTopologyList"):
        path = tmp_path / "list"
        path.write_text(yaml.safe_dump({"kind": kind, "items": [DOCUMENT]}), encoding="utf-8")
        assert read_machine_at(path).name == "worker"
        assert read_machine_at(path).topology == MACHINE


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty; give a folder or tar archive"),
        (b"\n", "is empty; give a folder or tar archive"),
        (b"hello", "does not describe a machine; give a folder or tar archive"),
        (b"\x7fELF\0\0\xff", "is neither text nor an archive"),
        (b"\x1f\x8b broken", "cannot be read as a tar archive"),
        (b"<domain/>", "it is a <domain>, not the <capabilities>"),
        (b"{", "does not describe a machine"),
        (b'{"cores": [', "is not valid JSON"),
        (b'{"a": 1, "a": 1}', "'a'"),
        (b"a: [", "is not valid YAML"),
        (b"a: &x [*x]", "contains the alias *x inside of its own anchor"),
        (b"cores: x", "packages is missing; it must be a list"),
        (b"anything: 1", "does not describe a machine; give a folder or tar archive"),
        (
            b"Architecture:            x86_64\nCPU(s):  112\n  On-line CPU(s) list: 0\n",
            "the output of `lscpu`",
        ),
        (
            b"CPU op-mode(s):   32-bit, 64-bit\n",
            "the output of `lscpu`, which kvplace does not read",
        ),
        (b'{\n   "lscpu": [\n      {"field": "Architecture:", "data": "x86_64"}]}', "`lscpu --json`"),
        (b"CPU model:           x86_64\nCPU(s):              64\n", "the output of `virsh nodeinfo`"),
        (b"available: 2 nodes (0-1)\nnode 0 cpus: 0 1\n", "the output of `numactl --hardware`"),
        (b"processor\t: 0\nvendor_id\t: GenuineIntel\n", "the output of `cat /proc/cpuinfo`"),
        (b"Machine (31GB total)\n  Package L#0\n    NUMANode L#0 (P#0 31GB)\n", "the output of `lstopo`"),
        (b"root@host:~# lscpu\r\nArchitecture:    x86_64\r\nCPU(s):  112\r\n", "the output of `lscpu`"),
        (b"Architektur:     x86_64\nCPU(s):          8\n", "the output of `lscpu`"),
        (b"NAME ONE-SIZE ALL-SIZE WAYS TYPE\nL1d       32K       1M\n", "`lscpu --caches`"),
        (b"$ virsh nodeinfo\nCPU-Modell:      x86_64\nCPU(s):          8\n", "`virsh nodeinfo`"),
        (b"CPUs present:   16\nCPUs online:    16\n", "the output of `virsh nodecpumap`"),
        (b"    0:   1024 KiB\n    1:   1024 KiB\n", "the output of `virsh freecell`"),
        (b"policy: default\nphyscpubind: 0 1 \n", "the output of `numactl --show`"),
        (b"MemTotal:       24 kB\nMemFree:        12 kB\n", "the output of `cat /proc/meminfo`"),
        (b'<?xml version="1.0"?>\n<!DOCTYPE topology SYSTEM "hwloc2.dtd">\n<topology/>', "`lstopo --of xml`"),
        (b'{"kind": "Node", "spec": {}}', "it is a 'Node', not a NodeTopology; give a folder or tar"),
        (b'{"kind": "List", "items": [{}, {}]}', "it lists 2 objects; give the NodeTopology of one machine"),
        (b'{"kind": "List", "items": [3]}', "items[0] is a number; give a folder or tar archive"),
        (b'{"kind": "List", "items": [{"kind": "Node"}]}', "it is a 'Node', not a NodeTopology"),
        (b'{"socket0": ["2", "2"]}', "names CPU 2 twice"),
        (b'{"socketX": ["2"]}', "key 'socketX' must be socket0"),
        (json.dumps(DOCUMENT | {"status": {"kubeletCpus": 3}}).encode(), "kubeletCpus must be a CPU list"),
        (json.dumps(DOCUMENT | {"status": {"kubeletCpus": "3-"}}).encode(), "status.kubeletCpus '3-'"),
        (
            packed(STATE.replace("4-6", "4-6,x")),
            "host: var/lib/kubelet/cpu_manager_state is not a cpu_manager_state",
        ),
        *((text.encode(), "is not valid JSON") for text in DEEP_OR_LONG[1:2]),
    ],
)
def test_a_file_that_is_not_a_machine_is_refused_in_one_sentence_that_names_it(
    tmp_path: Path, content: bytes, words: str
) -> None:
    path = tmp_path / "host"
    path.write_bytes(content)
    with pytest.raises((BadTopology, BadBody)) as raised:
        read_machine_at(path)
    said = str(raised.value)
    assert said.startswith(str(path))
    assert words in said
    assert "\n" not in said
    assert len(said) < 1000


SLOW = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@SLOW
@given(disturbed({key: DOCUMENT[key] for key in ("spec", "status", "metadata")}))
def test_a_damaged_description_is_read_or_refused_in_one_sentence(tmp_path: Path, document: object) -> None:
    path = tmp_path / "machine"
    path.write_text(json.dumps(document), encoding="utf-8")
    found, said = answer_or_sentence(read_machine_at, path, Misconfigured)
    assert (found is None) == bool(said)
    assert len(said) < 1000


@SLOW
@given(st.binary(max_size=100) | st.text(max_size=100).map(str.encode))
def test_random_bytes_are_refused_in_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "machine"
    path.write_bytes(content)
    assert answer_or_sentence(read_machine_at, path, Misconfigured)[0] is None
