"""The common part of printing: JSON and YAML, tables and lists, and messages on stderr.

A table is made from columns, which hold head and cell together. A list of objects is printed at once, and
again one by one as they change.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import zip_longest
from typing import TYPE_CHECKING, Generic, TextIO, TypeVar

import click

from kvplace.core.strict_json import Json

if TYPE_CHECKING:
    from rich.console import Console

_ACTED_ON = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that a terminal acts on: control characters, and changes of the text's direction."""
_BREAKS = re.compile(r"[\t\r\n]+")


class Output(Enum):
    """How a command prints its answer."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"
    SVG = "svg"
    """Of core maps only."""

    @property
    def is_document(self) -> bool:
        """Whether programs read it."""
        return self in (Output.JSON, Output.YAML)


def print_document(document: object, output: Output) -> None:
    """Print a document as JSON or YAML."""
    click.echo(document_text(document, output), nl=False)


def print_answer(
    output: Output, document: Callable[[], object], lines: Iterable[str], names: Iterable[str] = ()
) -> None:
    """Print an answer in the form that the user has chosen: a document, names, or lines for people."""
    if output.is_document:
        print_document(document(), output)
    else:
        print_lines(names if output is Output.NAME else lines)


def document_text(document: object, output: Output) -> str:
    """Write a document as JSON or YAML."""
    if output is Output.JSON:
        return json.dumps(document, indent=2) + "\n"
    import yaml

    return str(yaml.safe_dump(document, sort_keys=False))


def plain(text: str) -> str:
    """Write a foreign text in one line that a terminal only shows.

    Characters that a terminal would act on become escape sequences of Python.
    """
    return _ACTED_ON.sub(
        lambda found: found[0].encode("unicode_escape").decode("ascii"), _BREAKS.sub(" ", text)
    )


def print_lines(lines: Iterable[str]) -> None:
    """Print lines for people; a part of them may be foreign text."""
    for line in lines:
        click.echo(plain(line))


def print_message(text: str) -> None:
    """Print on stderr. A closed stderr does not end a command."""
    try:
        click.echo(text, err=True)
    except OSError:
        # The rest of the buffer must not make the interpreter complain when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def table_lines(rows: Sequence[Sequence[str]], widths: list[int] | None = None) -> Iterator[str]:
    """Write cells in aligned columns; a cell may have several lines, and no line is ever broken.

    Columns are at least as wide as `widths`, which grow to their width here.
    """
    cells = [[[plain(line) for line in cell.split("\n")] for cell in row] for row in rows]
    widths = [0] * len(rows[0]) if widths is None else widths
    for row in cells:
        widths[:] = [max(width, *map(_columns_of, cell)) for width, cell in zip(widths, row, strict=True)]
    for row in cells:
        for parts in zip_longest(*row, fillvalue=""):
            padded = (
                part + " " * (width - _columns_of(part)) for part, width in zip(parts, widths, strict=True)
            )
            yield "   ".join(padded).rstrip()


def _columns_of(text: str) -> int:
    """Count the columns of a terminal that a text takes: a letter may take two, or none."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def table_width() -> int | None:
    """Return the columns of the terminal; None where stdout is a file or pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def cpu_lines(cpus: int, width: int | None) -> str:
    """Write a CPU list in lines of about that many columns, broken behind a comma; None for one line."""
    from kvplace.core.cpuset import format_cpu_list

    if width is None:
        return format_cpu_list(cpus)
    return ",\n".join(lines_of(format_cpu_list(cpus).split(","), ",", width - 1))


def number_list(numbers: Iterable[int]) -> str:
    """Write numbers in a cell; `-` for none."""
    return ",".join(map(str, numbers)) or "-"


def lines_of(entries: Sequence[str], separator: str, width: int) -> Iterator[str]:
    """Join one or more entries to lines of at most a width; a longer entry has a line of its own."""
    line = entries[0]
    for entry in entries[1:]:
        if _columns_of(line + separator + entry) > width:
            yield line
            line = entry
        else:
            line += separator + entry
    yield line


def say(*sentences: str) -> None:
    """Print messages that are not part of the answer."""
    for sentence in sentences:
        print_message(plain(f"kvplace: {sentence}"))


def console(file: TextIO, width: int = 100) -> Console:
    """Open a file for drawing, with colours on a terminal unless NO_COLOR is set.

    `width` are its columns where it is not a terminal.
    """
    from rich.console import Console

    return Console(
        file=file, width=None if file.isatty() else width, highlight=False, markup=False, emoji=False
    )


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """One column of a table: its head, and the value of an object."""

    head: str
    cell: Callable[[T], str]
    wide: bool = False
    """Whether only `-o wide` shows it."""


def table_of(columns: Iterable[Column[T]], items: Iterable[T], *, wide: bool = False) -> Iterator[str]:
    """Write a table: the heads, and a row for each object; the columns of `wide` come last."""
    return table_lines(_rows(_chosen(columns, wide=wide), items))


def _chosen(columns: Iterable[Column[T]], *, wide: bool) -> list[Column[T]]:
    return sorted((column for column in columns if wide or not column.wide), key=lambda column: column.wide)


def _rows(columns: Sequence[Column[T]], items: Iterable[T]) -> list[list[str]]:
    heads = [column.head for column in columns]
    return [heads, *([column.cell(item) for column in columns] for item in items)]


class Listing(Generic[T]):
    """Prints objects of one kind to stdout; columns keep the width that they have had."""

    def __init__(
        self,
        kind: str,
        columns: Iterable[Column[T]],
        document: Callable[[T], Json],
        name: Callable[[T], str],
        output: Output,
        *,
        headers: bool = True,
    ) -> None:
        """`name` names an object as `kubectl` takes it: resource/name."""
        self._kind = kind
        self._columns = _chosen(columns, wide=output is Output.WIDE)
        self._document = document
        self._name = name
        self._output = output
        self._headers = headers
        self._widths = [0] * len(self._columns)

    def print_all(self, items: Sequence[T], *, one: bool = False) -> None:
        """Print objects; `one` prints the document of the only one by itself, not as a list."""
        if self._output.is_document:
            from kvplace.nodes.view_output import list_document

            documents = [self._document(item) for item in items]
            print_document(documents[0] if one else list_document(self._kind, documents), self._output)
        else:
            self._print_lines(items, headers=self._headers and bool(items))

    def print_seen(self, items: Sequence[T], *, is_first: bool) -> None:
        """Print all objects at first, then the changed ones: rows without heads, or a document each."""
        if is_first:
            self.print_all(items)
        elif not self._output.is_document:
            self._print_lines(items, headers=False)
        else:
            for item in items:
                if self._output is Output.YAML:
                    click.echo("---")
                print_document(self._document(item), self._output)

    def _print_lines(self, items: Sequence[T], *, headers: bool) -> None:
        if self._output is Output.NAME:
            for item in items:
                click.echo(self._name(item))
            return
        rows = [[plain(cell) for cell in row] for row in _rows(self._columns, items)]
        print_lines(table_lines(rows if headers else rows[1:], self._widths))
