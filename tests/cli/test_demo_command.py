"""`kvplace demo` prints its report on stdout and its progress on stderr."""

from __future__ import annotations

import json

from tests.cli.calls import Caller


def test_map_diff_and_summary_go_to_stdout(kvplace: Caller) -> None:
    called = kvplace("demo", "--vms", "40", "--nodes", "5")
    assert called.code == 0
    assert "╭─ socket 0 ─" in called.out
    assert '+   <vcpupin vcpu="0" cpuset="' in called.out
    assert "of 40 VMs on 5 nodes of 5 server types" in called.out
    assert "0 by two" in called.out
    assert "\x1b" not in called.out
    document = json.loads(kvplace("demo", "--vms", "40", "--nodes", "5", "-o", "json").out)
    assert f"placed    {document['placed']} of 40" in called.out


def test_a_large_demo_reports_progress_in_lines_without_a_terminal(kvplace: Caller) -> None:
    called = kvplace("demo", "--vms", "700", "--nodes", "12", "-o", "json")
    assert json.loads(called.out)["cpus"]["ownedTwice"] == 0
    assert all(line.endswith(" of 700 VMs") for line in called.err.splitlines())
