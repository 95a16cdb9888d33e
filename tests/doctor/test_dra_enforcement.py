"""Nodes where dra-driver-cpu sets the cpusets: `doctor` names the mode, and misses its component."""

from __future__ import annotations

from kvplace.doctor.node_checks import check_conditions
from tests.doctor.examples import problems, view


def test_nodes_with_enforcement_dra_are_named_and_need_the_component() -> None:
    (missing,) = problems(check_conditions, **view(enforcement="dra"))
    assert "kvplace may not hand cores over" in missing
    policies = {"validatingadmissionpolicies": ({"metadata": {"name": "resource-claims.kvplace.io"}},)}
    (mode,) = problems(check_conditions, **view(enforcement="dra"), objects=policies)
    assert "dra-driver-cpu sets the cpusets there (enforcement dra, experimental)" in mode
