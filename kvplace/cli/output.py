"""The common part of printing: the option `-o`, JSON and YAML, tables, and messages on stderr."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import zip_longest
from typing import TYPE_CHECKING, TextIO

import click

if TYPE_CHECKING:
    from rich.console import Console

_ACTED_ON = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""What a terminal does not show but act on: control characters, and those that turn the direction of text."""
_BREAKS = re.compile(r"[\t\r\n]+")


class Output(Enum):
    """How a command prints its answer."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"

    @property
    def is_document(self) -> bool:
        """Whether programs read it."""
        return self in (Output.JSON, Output.YAML)


def print_document(document: object, output: Output) -> None:
    """Print a document as JSON or YAML."""
    click.echo(document_text(document, output), nl=False)


def document_text(document: object, output: Output) -> str:
    """Write a document as JSON or YAML."""
    if output is Output.JSON:
        return json.dumps(document, indent=2) + "\n"
    import yaml

    return str(yaml.safe_dump(document, sort_keys=False))


def plain(text: str) -> str:
    """Write a text in one line that a terminal only shows: others may have written it.

    What else it would act on becomes an escape sequence of Python.
    """
    return _ACTED_ON.sub(
        lambda found: found[0].encode("unicode_escape").decode("ascii"), _BREAKS.sub(" ", text)
    )


def print_line(text: str = "", *, err: bool = False) -> None:
    """Print a line for people; a part of it may be foreign text."""
    if err:
        print_message(plain(text))
    else:
        click.echo(plain(text))


def print_message(text: str) -> None:
    """Print on stderr. A closed stderr does not end a command."""
    try:
        click.echo(text, err=True)
    except OSError:
        # What is left in the buffer must not make the interpreter complain when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print cells in aligned columns; a cell may have several lines, and no line is ever broken."""
    for line in table_lines(rows):
        click.echo(line)


def table_lines(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Write the same as lines."""
    rows = [["\n".join(map(plain, cell.split("\n"))) for cell in row] for row in rows]
    widths = [
        max(columns_of(line) for cell in column for line in cell.split("\n"))
        for column in zip(*rows, strict=True)
    ]
    for row in rows:
        for parts in zip_longest(*(cell.split("\n") for cell in row), fillvalue=""):
            cells = (padded(part, width) for part, width in zip(parts, widths, strict=True))
            yield "   ".join(cells).rstrip()


def columns_of(text: str) -> int:
    """Count the columns of a terminal that a text takes: a letter may take two, or none."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def padded(text: str, width: int) -> str:
    """Fill a text up with blanks to so many columns."""
    return text + " " * (width - columns_of(text))


def table_width() -> int | None:
    """Return the columns of the terminal; None where stdout is a file or pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def cpu_lines(cpus: int, width: int | None) -> str:
    """Write a CPU list in lines of about that many columns, broken behind a comma; None for one line."""
    from kvplace.core.cpuset import format_cpu_list

    if width is None:
        return format_cpu_list(cpus)
    lines = [""]
    for entry in format_cpu_list(cpus).split(","):
        if lines[-1] and len(lines[-1]) + len(entry) + 2 > width:
            lines[-1] += ","
            lines.append(entry)
        else:
            lines[-1] += f",{entry}" if lines[-1] else entry
    return "\n".join(lines)


def say(sentence: str) -> None:
    """Print a message that is not part of the answer."""
    print_line(f"kvplace: {sentence}", err=True)


def console(file: TextIO, width: int) -> Console:
    """Open a file for drawing, with colours on a terminal unless NO_COLOR is set.

    `width` counts where the file is not a terminal.
    """
    from rich.console import Console

    return Console(
        file=file, width=None if file.isatty() else width, highlight=False, markup=False, emoji=False
    )
