"""The machine that a command works on: its argument, its completion and the options that change it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import click
from click.shell_completion import CompletionItem

from kvplace.cli.completion import names_and_files
from kvplace.cli.files import InputFile

if TYPE_CHECKING:
    from kvplace.machines.machine import Machine

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Completer: TypeAlias = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def cpu_manager_state_option(function: _Function) -> _Function:
    """Add `--cpu-manager-state FILE` to a command, as its argument `cpu_manager_state`."""
    option = click.option(
        "--cpu-manager-state",
        type=InputFile(),
        metavar="FILE",
        help="The kubelet's cpu_manager_state: CPUs that its static policy holds are not free.",
    )
    return option(function)


def complete_machine(_context: click.Context, _argument: click.Parameter, begun: str) -> list[CompletionItem]:
    """Complete the name of a server type, or else of a file."""
    from kvplace.machines.server_types import machine_names

    return names_and_files(list(machine_names()), begun)


def machine_argument(complete: _Completer = complete_machine) -> Callable[[_Function], _Function]:
    """Add the machine to a command, as its argument `machine`; None is this machine."""
    return click.argument(
        "machine", type=InputFile(), metavar="[FILE]", required=False, shell_complete=complete
    )


def chosen_machine(name: str | None, *, reserved: str | None = None, state: str | None = None) -> Machine:
    """Find a machine, and replace its reserved CPUs and the CPUs of the kubelet's `state` file."""
    from kvplace.documents.reading import read_text, source_name
    from kvplace.machines.machine import find_machine

    machine = find_machine(name)
    if reserved is not None:
        machine = machine.with_reserved(reserved, "--reserved")
    if state is not None:
        what = source_name(state)
        machine = machine.with_kubelet_cpus(read_text(state, f"--cpu-manager-state {what}"), what)
    return machine
