"""`./make test` prepares what the selected tests need, and stops early where a check fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from dev import __main__ as targets
from dev import system_packages
from dev.step import StepFailed

PROJECT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("arguments", "packages"),
    [
        ([], system_packages.EVERYTHING),
        (["--numprocesses=2"], system_packages.EVERYTHING),
        (["tests"], system_packages.EVERYTHING),
        (["tests/core", "-x"], {}),
        (["tests/core/test_cpuset.py::test_lists", "-k", "lists"], {}),
        (["./tests/web/test_pages.py", "tests/core/"], system_packages.BROWSERS),
        (["tests/cli", "tests/web"], {**system_packages.SHELLS, **system_packages.BROWSERS}),
    ],
)
def test_a_selected_path_needs_the_packages_of_its_folder(
    arguments: list[str], packages: dict[str, str]
) -> None:
    assert system_packages.needed_by(arguments) == packages


def test_every_folder_with_packages_is_there_and_they_are_installed_for_all_tests() -> None:
    for folder, packages in system_packages.BY_FOLDER.items():
        assert (PROJECT / "tests" / folder).is_dir()
        assert packages.keys() <= system_packages.EVERYTHING.keys()


class Steps:
    """The steps of `./make test` in their order; none is carried out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failed: dict[str, StepFailed]) -> None:
        self.done: list[str] = []
        self.commands: list[list[str]] = []
        self.environment: dict[str, str] = {}

        def checked() -> dict[str, StepFailed]:
            self.done.append("checks")
            return failed

        def show(command: list[str], *, cwd: Path, environment: dict[str, str]) -> int:
            self.done.append("tests")
            self.commands.append([str(word) for word in command])
            self.environment = environment
            return 0

        monkeypatch.setattr(targets.VENV, "ensure", lambda _sections: None)
        monkeypatch.setattr(system_packages, "ensure", lambda _packages: None)
        monkeypatch.setattr(targets, "_failed_checks", checked)
        monkeypatch.setattr(targets, "show", show)
        monkeypatch.setattr(targets, "PREPARED", {})


BROKEN = {"ruff check": StepFailed("ruff check: exit code 1")}


def test_the_checks_come_before_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, {})
    assert targets.test(["tests/core"]) == 0
    assert steps.done == ["checks", "tests"]
    assert steps.commands[0][1:] == ["-m", "pytest", "tests/core"]


def test_a_failed_check_ends_the_run_before_the_tests(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CI", raising=False)
    steps = Steps(monkeypatch, BROKEN)
    assert targets.test([]) == 1
    assert steps.done == ["checks"]
    assert "exit code 1" in capsys.readouterr().err


def test_under_ci_all_faults_are_reported_in_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    steps = Steps(monkeypatch, BROKEN)
    assert targets.test([]) == 1
    assert steps.done == ["checks", "tests"]


def test_a_quick_run_takes_fewer_examples_and_only_tests_that_need_python_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = Steps(monkeypatch, {})
    assert targets.quick(["tests/core"]) == 0
    assert steps.done == ["tests"]
    assert steps.environment["HYPOTHESIS_PROFILE"] == "quick"
    assert steps.commands[0][3:5] == ["-m", targets.NEEDS_NOTHING]
    assert steps.commands[0][-1] == "tests/core"
