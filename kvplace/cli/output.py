"""What all commands share of printing: the option `-o`, JSON, and a terminal that may be none."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 100
"""Columns of a drawing or table that goes into a file or pipe."""

ENDLESS = 1_000_000
"""Columns of a table whose lines must stay whole, since other programs may read them."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Output(Enum):
    """How a command prints its answer."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


def output_option(function: _Function) -> _Function:
    """Add `-o table|json` to a command, as its argument `output`."""
    return output_option_of(Output.TABLE, Output.JSON)(function)


def output_option_of(*outputs: Output) -> Callable[[_Function], _Function]:
    """Add `-o` with these choices to a command, as its argument `output`; the first one is the default."""
    return click.option(
        "-o",
        "--output",
        type=click.Choice([output.value for output in outputs]),
        default=outputs[0].value,
        show_default=True,
        callback=lambda _context, _option, value: Output(value),
        help="How to print the answer.",
    )


def print_json(document: object) -> None:
    """Print a document for other programs."""
    click.echo(json.dumps(document, indent=2))


def print_yaml(document: object) -> None:
    """Print a document for other programs, and for people who would edit it."""
    import yaml

    click.echo(yaml.safe_dump(document, sort_keys=False), nl=False)


def cpu_lines(cpus: int, width: int) -> str:
    """Write a CPU list in lines of about that many columns, which end where an entry does."""
    from kvplace.core.cpuset import format_cpu_list

    lines = [""]
    for entry in format_cpu_list(cpus).split(","):
        if lines[-1] and len(lines[-1]) + len(entry) + 2 > width:
            lines[-1] += ","
            lines.append(entry)
        else:
            lines[-1] += f",{entry}" if lines[-1] else entry
    return "\n".join(lines)


def say(sentence: str) -> None:
    """Tell the person something that is not part of the answer."""
    click.echo(f"kvplace: {sentence}", err=True)


def console(width: int = WIDTH) -> Console:
    """Open stdout for drawing: with colours on a terminal, unless NO_COLOR is set.

    `width` counts where stdout is no terminal.
    """
    from rich.console import Console

    return Console(
        file=sys.stdout,
        width=None if sys.stdout.isatty() else width,
        highlight=False,
        markup=False,
        emoji=False,
    )
