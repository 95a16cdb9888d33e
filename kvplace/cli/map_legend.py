"""The VMs of a core map in a terminal: a table, or a few lines for each VM where a table is too wide.

A name is what one searches for. It is broken only where no line of the terminal can hold it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.columns import Columns
from rich.table import Table
from rich.text import Text

from kvplace.cli.output import cpu_lines
from kvplace.core.device_locality import device_phrases
from kvplace.core.drawing.core_map import CoreMap, LegendEntry
from kvplace.core.drawing.occupancy import name_of, printable
from kvplace.core.ledger import Claim
from kvplace.core.quantity import format_bytes

_COLOURS = (
    "bright_red", "bright_green", "bright_yellow", "bright_blue", "bright_magenta", "bright_cyan",
    "red", "green", "yellow", "blue", "magenta", "cyan",
)  # fmt: skip
_GAP = 2
_EMULATOR, _IO_THREADS, _DEVICES = "EMULATOR", "I/O THREADS", "DEVICES"
_SELDOM = (_EMULATOR, _IO_THREADS, _DEVICES)
"""Columns that are left out where no VM has anything there."""
_BEHIND_A_SEPARATOR = re.compile(r"(?<=[/.-])")


def colour_of(index: int) -> str:
    """Choose the colour of a VM by its place in the legend."""
    return _COLOURS[index % len(_COLOURS)]


def lines_of(entries: Sequence[str], separator: str, width: int) -> Iterator[str]:
    """Join one or more entries to lines of at most a width; a longer entry has a line of its own."""
    line = entries[0]
    for entry in entries[1:]:
        if cell_len(line + separator + entry) > width:
            yield line
            line = entry
        else:
            line += separator + entry
    yield line


def names_of_vms(drawing: CoreMap) -> Columns:
    """Name the VMs without more."""
    return Columns(
        [
            Text.assemble(_label(entry, index), " ", printable(entry.claim.vmi or entry.claim.pod))
            for index, entry in enumerate(drawing.legend)
        ],
        padding=(0, _GAP),
        column_first=True,
    )


def legend(drawing: CoreMap, width: int, *, wide: bool) -> Table:
    """Name the VMs with their CPUs and, where they are known, those of QEMU's own threads.

    `wide` adds their memory and huge pages.
    """
    rows = [_cells(entry, width // (3 if wide else 2), wide=wide) for entry in drawing.legend]
    titles = [title for title in rows[0] if title not in _SELDOM or any(row[title] for row in rows)]
    widths = [max(map(_widest, (title, *(row[title] for row in rows)))) for title in titles]
    margin = max(len(entry.label) for entry in drawing.legend)
    if margin + sum(_GAP + width for width in widths) > width:
        table = Table.grid("", "", padding=(0, 1, 0, 0))
        table.columns[1].overflow = "fold"
        for index, entry in enumerate(drawing.legend):
            lines = _lines_about(entry, width - margin - 1, wide=wide)
            table.add_row(_label(entry, index), Text("\n".join(filter(None, lines))))
        return table
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
    for title in ("", *titles):
        table.add_column(title, no_wrap=True)
    for index, (entry, row) in enumerate(zip(drawing.legend, rows, strict=True)):
        table.add_row(_label(entry, index), *(Text(row[title]) for title in titles))
    return table


def _label(entry: LegendEntry, index: int) -> Text:
    return Text(entry.label, style=f"bold {colour_of(index)}")


def _widest(text: str) -> int:
    return max(map(cell_len, text.split("\n")))


def _cells(entry: LegendEntry, width: int, *, wide: bool) -> dict[str, str]:
    claim, placement = entry.claim, entry.placement
    cells = {
        "VM": name_of(claim),
        "POLICY": claim.policy.value,
        "CPUS": cpu_lines(claim.cpus | claim.owned, width),
        _EMULATOR: cpu_lines(placement.emulator_cpus, width) if placement else "",
        _IO_THREADS: entry.io_thread_cpus,
        _DEVICES: "\n".join(device_phrases(entry.devices)),
    }
    return cells | {"MEMORY": _memory(claim), "HUGE PAGES": _huge_pages(claim)} if wide else cells


def _lines_about(entry: LegendEntry, width: int, *, wide: bool) -> Iterator[str]:
    claim = entry.claim
    pieces = [piece for piece in _BEHIND_A_SEPARATOR.split(name_of(claim)) if piece]
    yield from lines_of(pieces, "", width)
    yield from lines_of([claim.policy.value, cpu_lines(claim.cpus | claim.owned, width)], " ", width)
    yield entry.qemu_threads
    yield from device_phrases(entry.devices)
    if wide:
        yield _memory(claim)
        yield _huge_pages(claim)


def _memory(claim: Claim) -> str:
    return ", ".join(f"{format_bytes(size)} on {node}" for node, size in claim.memory.items())


def _huge_pages(claim: Claim) -> str:
    return ", ".join(
        f"{count} x {format_bytes(size)} on {node}"
        for node, pages in claim.huge_pages.items()
        for size, count in pages.items()
    )
