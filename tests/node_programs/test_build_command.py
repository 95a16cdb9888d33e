"""`python -m harness.build`: what it builds, and what may be missing."""

from __future__ import annotations

import pytest

from harness import build
from harness.build_cache import BuildFailed, NotInstalled
from harness.go_build import GoModule


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the modules that are built, instead of building them; the C compiler is missing."""
    names: list[str] = []

    def built(module: GoModule) -> str:
        names.append(module.name)
        if module.cgo:
            raise NotInstalled("no gcc on this machine")
        return module.name

    monkeypatch.setattr(build, "built", built)
    monkeypatch.delenv("CI", raising=False)
    return names


def test_all_groups_are_built_by_default_and_named_ones_alone(
    wanted: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert build.main([]) == 0
    assert capsys.readouterr().out == "", "stdout is for what ./make cluster prints to be run"
    assert wanted == [
        "kubernetes",
        "kubevirt",
        "containerd",
        "crictl",
        "kubelet",
        "kubevirt_node",
        "dra_driver_cpu",
        "helm",
        "alerts",
        "publishing",
    ]
    wanted.clear()
    assert build.main(["control-plane"]) == 0
    assert wanted == ["kubernetes", "kubevirt", "helm", "alerts", "publishing"]


def test_a_missing_c_compiler_costs_the_tests_of_real_nodes_only(
    wanted: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert build.main(["node"]) == 0
    assert wanted[-2:] == ["kubevirt_node", "dra_driver_cpu"]
    assert "no gcc on this machine" in capsys.readouterr().err


def test_under_ci_it_fails(
    wanted: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CI", "true")
    assert build.main(["node"]) == 1
    assert wanted
    assert "no gcc on this machine" in capsys.readouterr().err


def test_a_build_that_fails_always_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def built(module: GoModule) -> str:
        raise BuildFailed(f"{module.name}: undefined: nonsense")

    monkeypatch.setattr(build, "built", built)
    assert build.main([]) == 1
    assert capsys.readouterr().err == "kubernetes: undefined: nonsense\n"
