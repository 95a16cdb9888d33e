"""Columns of tables; and lists of objects, printed at once and again one by one as they change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import click

from kvplace.cli.output import Output, columns_of, padded, plain, print_document
from kvplace.core.strict_json import Json

T = TypeVar("T")

_GAP = "   "


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """One column of a table: its head, and what it has of an object."""

    head: str
    cell: Callable[[T], str]
    wide: bool = False
    """Whether only `-o wide` shows it."""


def chosen_columns(columns: Iterable[Column[T]], *, wide: bool) -> tuple[Column[T], ...]:
    """Choose the columns of an answer, those of `wide` behind the others."""
    chosen = [column for column in columns if wide or not column.wide]
    return tuple(sorted(chosen, key=lambda column: column.wide))


def rows_of(columns: Sequence[Column[T]], items: Iterable[T]) -> list[tuple[str, ...]]:
    """Give the heads, and a row of cells for each object."""
    heads = tuple(column.head for column in columns)
    return [heads, *(tuple(column.cell(item) for column in columns) for item in items)]


@dataclass(frozen=True)
class Printed(Generic[T]):
    """How objects of one kind are printed."""

    kind: str
    columns: Sequence[Column[T]]
    document: Callable[[T], Json]
    name: Callable[[T], str]
    """As `kubectl` takes it: resource/name."""


class Listing(Generic[T]):
    """Prints to stdout; columns keep the width that they have had."""

    def __init__(self, printed: Printed[T], output: Output, *, headers: bool = True) -> None:
        self._printed = printed
        self._output = output
        self._headers = headers
        self._widths = [0] * len(printed.columns)

    def print_all(self, items: Sequence[T], *, one: bool = False) -> None:
        """Print objects; `one` prints the document of the only one by itself, not as a list."""
        if self._output.is_document:
            documents = [self._printed.document(item) for item in items]
            whole = documents[0] if one else _list(self._printed.kind, documents)
            print_document(whole, self._output)
        else:
            self._print_lines(items, headers=self._headers and bool(items))

    def print_changed(self, items: Iterable[T]) -> None:
        """Print objects that have changed: rows without heads, or a document each."""
        if self._output is Output.JSON:
            for item in items:
                print_document(self._printed.document(item), self._output)
        elif self._output is Output.YAML:
            for item in items:
                click.echo("---")
                print_document(self._printed.document(item), self._output)
        else:
            self._print_lines(list(items), headers=False)

    def _print_lines(self, items: Sequence[T], *, headers: bool) -> None:
        if self._output is Output.NAME:
            for item in items:
                click.echo(self._printed.name(item))
            return
        rows = [[plain(cell) for cell in row] for row in rows_of(self._printed.columns, items)]
        rows = rows if headers else rows[1:]
        for row in rows:
            self._widths = [
                max(width, columns_of(cell)) for width, cell in zip(self._widths, row, strict=True)
            ]
        for row in rows:
            cells = (padded(cell, width) for cell, width in zip(row, self._widths, strict=True))
            click.echo(_GAP.join(cells).rstrip())


def _list(kind: str, documents: list[Json]) -> Json:
    from kvplace.nodes.view_documents import list_document

    return list_document(kind, documents)
