"""Nodes are described as docs/install.md states: the API server takes what `kvplace topology` prints."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from harness.control_plane.cluster import ControlPlane
from kvplace.core.node_topology import read_topology
from kvplace.machines.server_types import machine_names, read_machine
from tests.manifests.conftest import STRICTLY


@pytest.mark.parametrize("machine", machine_names())
def test_a_printed_machine_is_applied_as_it_is_and_read_back_unchanged(
    cluster: ControlPlane, machine: str
) -> None:
    command = [sys.executable, "-m", "kvplace", "topology", machine, "--reserved", "0-1", "-o", "json"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    cluster.kubectl("apply", *STRICTLY, "-f", "-", stdin=printed)

    stored = cluster.request("GET", f"/apis/kvplace.io/v1alpha1/nodetopologies/{machine}")
    read = read_topology(stored)
    assert read == read_topology(json.loads(printed))
    assert (read.cores, read.reserved) == (read_machine(machine).cores, 0b11)
