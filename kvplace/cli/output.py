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

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Output(Enum):
    """How a command prints its answer."""

    TABLE = "table"
    JSON = "json"


def output_option(function: _Function) -> _Function:
    """Add `-o table|json` to a command, as its argument `output`."""
    option = click.option(
        "-o",
        "--output",
        type=click.Choice([output.value for output in Output]),
        default=Output.TABLE.value,
        show_default=True,
        callback=lambda _context, _option, value: Output(value),
        help="How to print the answer.",
    )
    return option(function)


def print_json(document: object) -> None:
    """Print a document for other programs."""
    click.echo(json.dumps(document, indent=2))


def say(sentence: str) -> None:
    """Tell the person something that is not part of the answer."""
    click.echo(f"kvplace: {sentence}", err=True)


def console() -> Console:
    """Open stdout for drawing: with colours on a terminal, unless NO_COLOR is set."""
    from rich.console import Console

    return Console(
        file=sys.stdout,
        width=None if sys.stdout.isatty() else WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
    )
