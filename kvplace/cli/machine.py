"""The machine that a command works on: its argument, its completion and the options that change it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from kvplace.machines.machine import Machine

_Function = TypeVar("_Function", bound=Callable[..., Any])

_CPU_MANAGER_STATE = click.Path(path_type=Path, dir_okay=False)


def cpu_manager_state_option(function: _Function) -> _Function:
    """Add `--cpu-manager-state FILE` to a command, as its argument `cpu_manager_state`."""
    option = click.option(
        "--cpu-manager-state",
        type=_CPU_MANAGER_STATE,
        metavar="FILE",
        help="The kubelet's cpu_manager_state: CPUs that its static policy holds are not free.",
    )
    return option(function)


def complete_machine(_context: click.Context, _argument: click.Parameter, begun: str) -> list[CompletionItem]:
    """Complete the name of a server type, or else of a file."""
    from kvplace.machines.shipped import machine_names

    names = [CompletionItem(name) for name in machine_names() if name.startswith(begun)]
    return names or [CompletionItem(begun, type="file")]


def chosen_machine(name: str | None, *, reserved: str | None = None, state: Path | None = None) -> Machine:
    """Find a machine, and replace its reserved CPUs and those that the kubelet's `state` file holds."""
    from kvplace.documents.reading import read_text
    from kvplace.machines.machine import find_machine

    machine = find_machine(name)
    if reserved is not None:
        machine = machine.with_reserved(reserved, "--reserved")
    if state is not None:
        text = read_text(str(state.absolute()), f"--cpu-manager-state {state}")
        machine = machine.with_kubelet_cpus(text, str(state))
    return machine
