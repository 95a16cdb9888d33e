"""Finding the machine that a user means: this one, a file, or one that comes with kvplace."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.errors import BadBody, BadTopology

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
        help="The kubelet's cpu_manager_state: the CPUs that its static policy holds are not free.",
    )
    return option(function)


def find_machine(
    text: str | None, *, reserved: str | None = None, cpu_manager_state: Path | None = None
) -> Machine:
    """Read a machine from a file, one that comes with kvplace by its name, or, without a text, this one.

    `reserved` (a CPU list) replaces the CPUs that a description keeps for the host, `cpu_manager_state`
    what it says of the kubelet. Raises BadTopology or BadBody that names the file or the CPUs.
    """
    from kvplace.machines.machine import read_live_machine

    machine = read_live_machine(platform.node() or "localhost") if text is None else _named(text)
    if reserved is not None:
        machine = _reserving(machine, reserved)
    if cpu_manager_state is not None:
        machine = machine.with_kubelet_cpus(_read(cpu_manager_state), str(cpu_manager_state))
    return machine


def _named(text: str) -> Machine:
    from kvplace.machines.machine import Machine, read_machine_at
    from kvplace.machines.shipped import read_machine

    if not text:
        raise BadTopology("the name of the machine is empty; give a file, or leave it out for this machine")
    path = Path(text)
    try:
        there = path.exists()
    except OSError:
        there = True  # a name that no file can have: reading it says so
    return read_machine_at(path) if there or "/" in text or "." in text else Machine(text, read_machine(text))


def _reserving(machine: Machine, reserved: str) -> Machine:
    try:
        cpus = parse_cpu_list(reserved, what="--reserved")
    except ValueError as error:
        raise BadTopology(str(error)) from None
    try:
        return machine.with_reserved(cpus)
    except BadTopology as error:
        raise BadTopology(f"--reserved: {error}") from None


def _read(path: Path) -> str:
    from kvplace.linux.cpu_manager_state import MAX_BYTES

    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1).decode("utf-8", "replace")
    except OSError as error:
        raise BadBody(f"--cpu-manager-state: {path} cannot be read: {error.strerror}") from None
