"""The quick start: what varies between machines is not compared, and what it repeats is repeated exactly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.install_page.page import Block
from harness.install_page.quickstart import CONSOLE, PAGE, commands_and_output, masked
from harness.kvplace_cluster.machines import two_socket_machine
from kvplace.core.free_resources import usage_of
from kvplace.core.ledger import Ledger
from kvplace.core.node_topology import topology_document
from tests.docs.blocks import block, blocks
from tests.docs.reading import PROJECT
from tests.docs.shell import Shell

REPEATED = [one for one in blocks("docs/quickstart.md") if one.language != CONSOLE]


def test_files_and_scripts_are_those_of_the_installation_page() -> None:
    assert len(REPEATED) == 2
    assert {one.text for one in REPEATED} <= {one.text for one in blocks("docs/install.md")}


def test_a_transcript_has_commands_and_their_output() -> None:
    text = "$ kubectl get nodes\nNAME\n...\n\n$ date\n"
    assert commands_and_output(Block("", 1, "", CONSOLE, text)) == ("kubectl get nodes\ndate\n", ["NAME"])


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("kvplace/hook:0.1.0  sha256:97a0e  17.4 MB", "kvplace/hook:0.0.9 sha256:af03b  9.0 MB"),
        ("worker-1   128    0   True    11s", "worker-1 2 1 True 1m3s"),
        ('{"socket0":["1","65","2","66"]}', '{"socket0":["1"]}'),
        ("web   Pinned   1-2,65-66   0   7s", "web   Pinned   1   0   12s"),
        ("pod/virt-launcher-web-server-867w6 met", "pod/virt-launcher-web-server-abcde met"),
    ],
)
def test_output_that_depends_on_the_machine_is_not_compared(shown: str, printed: str) -> None:
    assert masked(shown) == masked(printed)


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("web   Pinned   1-2   7s", "web   NotPinned   1-2   7s"),
        ("worker-1   128   True   11s", "worker-1   128   False   11s"),
        ("pod/virt-launcher-web-server-867w6 met", "pod/virt-launcher-database-867w6 met"),
    ],
)
def test_every_other_difference_counts(shown: str, printed: str) -> None:
    assert masked(shown) != masked(printed)


def test_the_outputs_are_those_of_one_server(tmp_path: Path) -> None:
    """Two sockets of 32 cores with two threads, one core reserved, before and after the page's VM."""
    machine = two_socket_machine(32, memory_gib=256)
    (tmp_path / "machine.json").write_text(json.dumps(topology_document(machine)))
    template = PROJECT / "vm-templates" / "web-server.yaml"
    (answer,) = Shell(tmp_path).run(f"kvplace place -f {template} --topology {tmp_path}/machine.json -o json")
    placement = json.loads(answer)["placement"]

    nodes = transcript("$ kubectl get nodetopologies")
    usage = usage_of(machine, Ledger(), machine.allocatable)
    assert [nodes[head] for head in ("CPUS", "OWNED", "SHARED", "FREE", "LARGEST-NUMA", "PODS")] == [
        str(count) for count in usage.document().values()
    ]
    assert (
        json.loads(block(PAGE, "$ kubectl apply -f vm-templates/web-server.yaml").splitlines()[-1])
        == (placement["cpuMap"])
    )
    vms = transcript("$ .venv/bin/kvplace get vms")
    assert [vms[head] for head in ("POLICY", "CPUS", "NUMA")] == [
        placement["policy"],
        placement["cpus"],
        ",".join(map(str, placement["numaNodes"])),
    ]


def transcript(command: str) -> dict[str, str]:
    """Read the table of one row that a command of the page prints."""
    lines = block(PAGE, command).splitlines()
    heads, cells = (line.split() for line in lines[lines.index(command) + 1 :][:2])
    return dict(zip(heads, cells, strict=True))
