"""Nodes where dra-driver-cpu sets the cpusets: `doctor` names the mode, and misses its component."""

from __future__ import annotations

from typing import Any

from kvplace.doctor.node_checks import check_agents, check_conditions
from tests.doctor.examples import problems, view


def test_nodes_with_enforcement_dra_are_named_and_need_the_component() -> None:
    (missing,) = problems(check_conditions, **view(enforcement="dra"))
    assert "kvplace may not hand cores over" in missing
    policies = {"validatingadmissionpolicies": ({"metadata": {"name": "resource-claims.kvplace.io"}},)}
    (mode,) = problems(check_conditions, **view(enforcement="dra"), objects=policies)
    assert "dra-driver-cpu sets the cpusets there (enforcement dra, experimental)" in mode


def test_two_agents_for_the_same_nodes_are_wrong_and_one_for_the_nodes_of_dra_driver_cpu_is_not() -> None:
    def agent(name: str, **instance: str) -> dict[str, Any]:
        labels = {"component": "agent", **instance}
        found = {f"app.kubernetes.io/{key}": value for key, value in labels.items()}
        return {"metadata": {"name": name, "namespace": "kvplace-agent", "labels": found}}

    usual, other = agent("kvplace-agent"), agent("kvplace-agent-2")
    of_driver = agent("kvplace-agent-dra-driver-cpu", instance="dra-driver-cpu")

    def several(*daemonsets: dict[str, Any]) -> bool:
        found = problems(check_agents, **{**view(), "objects": {"daemonsets": daemonsets}})
        return any("there are several" in problem for problem in found)

    assert several(usual, other)
    assert several(usual, other, of_driver)
    assert not several(usual, of_driver)
