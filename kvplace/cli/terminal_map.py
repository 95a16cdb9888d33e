"""Draws a core map in a terminal. It can be read without colours.

There is a frame for each socket, a line for each L3 cache of each NUMA node, a group for each core and a
mark for each thread:

    A        owned by VM A                   .   free
    a        kept idle by VM A               :   free, isolated by the kernel
    A+       shared, used by VM A            #   reserved for the host
    2+ 9+    shared by 2, by 9 or more VMs   %   in use outside of kvplace
    A~       for QEMU's own threads of VM A  ~   reserved for the host, with QEMU's own threads of VMs
    A?       kept for VM A, which waits

`!` behind a mark is a conflict or drift, explained below the map. `*` behind the name of a box means that
the rest of it is in another box: the levels of a machine need not nest.

The VMs are named below, in a table, or in a few lines for each VM where a table is too wide. Users search for
names, so a name is broken only where no line of the terminal can hold it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from rich.cells import cell_len
from rich.columns import Columns
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvplace.cli.output import cpu_lines, lines_of
from kvplace.core.device_locality import device_phrases
from kvplace.core.drawing.core_map import (
    MEANINGS,
    TITLE,
    CoreBox,
    CoreMap,
    L3Box,
    LegendEntry,
    NodeBox,
    Thread,
    ThreadState,
    distance_phrases,
)
from kvplace.core.drawing.occupancy import name_of_vm, printable
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


def legend_colour(index: int) -> str:
    """Choose the colour of a VM by its place in the legend."""
    return _COLOURS[index % len(_COLOURS)]


def names_of_vms(drawing: CoreMap) -> Columns:
    """Name the VMs without more."""
    return Columns(
        [
            Text.assemble(_label(entry, index), " ", printable(entry.claim.vm))
            for index, entry in enumerate(drawing.legend)
        ],
        padding=(0, _GAP),
        column_first=True,
    )


def legend(drawing: CoreMap, width: int, *, wide: bool) -> Table:
    """Name the VMs with their CPUs and, where they are known, the CPUs of QEMU's own threads.

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
    return Text(entry.label, style=f"bold {legend_colour(index)}")


def _widest(text: str) -> int:
    return max(map(cell_len, text.split("\n")))


def _cells(entry: LegendEntry, width: int, *, wide: bool) -> dict[str, str]:
    claim, placement = entry.claim, entry.placement
    cells = {
        "VM": name_of_vm(claim),
        "POLICY": claim.policy.value,
        "CPUS": cpu_lines(claim.cpus | claim.owned, width),
        _EMULATOR: cpu_lines(placement.emulator_cpus, width) if placement else "",
        _IO_THREADS: entry.io_thread_cpus,
        _DEVICES: "\n".join(device_phrases(entry.devices)),
    }
    return cells | {"MEMORY": _memory(claim), "HUGE PAGES": _huge_pages(claim)} if wide else cells


def _lines_about(entry: LegendEntry, width: int, *, wide: bool) -> Iterator[str]:
    claim = entry.claim
    pieces = [piece for piece in _BEHIND_A_SEPARATOR.split(name_of_vm(claim)) if piece]
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


_MARKS = {
    ThreadState.FREE: ".",
    ThreadState.ISOLATED: ":",
    ThreadState.RESERVED: "#",
    ThreadState.FOREIGN: "%",
}
_QEMU = "~"
_MAX_COUNT = 9
_CPUS = "CPUs "
_ALARM = "bold bright_red"
_FRAME = 4
"""Columns of a frame and the blanks inside it."""


def print_map(out: Console, drawing: CoreMap, *, compact: bool = False, wide: bool = False) -> None:
    """Draw a machine in the width of the console.

    `compact` names the VMs without their CPUs; `wide` adds the CPUs of every L3 cache, and the memory and
    huge pages of every VM.
    """
    printer = _Printer(out.width, drawing, wide=wide)
    out.print(Text(f"{printable(drawing.name)}: {drawing.summary}", style="bold"))
    frames = [
        (package.id, [line for node in package.nodes for line in printer.node(node)])
        for package in drawing.packages
    ]
    width = min(out.width, max(line.cell_len for _, lines in frames for line in lines) + _FRAME)
    out.print(
        Columns(
            [
                Panel(
                    Group(*lines),
                    title=f"socket {number}",
                    title_align="left",
                    border_style="dim",
                    width=width,
                )
                for number, lines in frames
            ]
        )
    )
    for node in drawing.memory_only:
        out.print(Text(f"NUMA {node.id}: memory only, {', '.join(node.free_resources)}"))
    if distances := distance_phrases(drawing):
        for line in lines_of([f"{TITLE} {distances[0]}", *distances[1:]], ", ", out.width):
            out.print(Text(line))
    for line in lines_of(_key(drawing), "   ", out.width):
        out.print(Text(line, style="dim"))
    for fault in drawing.faults:
        out.print(Text.assemble(("! ", _ALARM), f"{fault.kind.value}: {fault.sentence}"))
    if drawing.legend:
        out.print(names_of_vms(drawing) if compact else legend(drawing, out.width, wide=wide))


class _Printer:
    def __init__(self, width: int, drawing: CoreMap, *, wide: bool) -> None:
        self._inner = width - _FRAME
        self._wide = wide
        nodes = [node for package in drawing.packages for node in package.nodes]
        self._margin = max(len(_l3_title(l3)) for node in nodes for l3 in node.l3_groups)
        self._mark_width = max((len(_mark(thread)) for thread in drawing.threads), default=1)
        self._colours = {entry.label: legend_colour(index) for index, entry in enumerate(drawing.legend)}

    def node(self, node: NodeBox) -> Iterator[Text]:
        title = f"NUMA {node.id}{_star(node)}  "
        room = self._inner - len(title)
        for phrases in lines_of(node.free_resources, ", ", room):
            for line in lines_of(phrases.split(" "), " ", room):
                yield Text(title + line)
                title = " " * len(title)
        for l3 in node.l3_groups:
            yield from self._l3(l3, self._margin)

    def _l3(self, l3: L3Box, margin: int) -> Iterator[Text]:
        line = Text(_l3_title(l3).ljust(margin))
        for core in l3.cores:
            group = self._core(core)
            if line.cell_len + group.cell_len > self._inner and line.cell_len > margin:
                line.rstrip()
                yield line
                line = Text(" " * margin)
            line.append_text(group).append(" ")
        line.rstrip()
        yield line
        if self._wide:
            for number, cpus in enumerate(cpu_lines(l3.cpus, self._inner - margin - len(_CPUS)).split("\n")):
                head = _CPUS if number == 0 else " " * len(_CPUS)
                yield Text(f"{' ' * margin}{head}{cpus}", style="dim")

    def _core(self, core: CoreBox) -> Text:
        group = Text()
        for thread in core.threads:
            mark = _mark(thread)
            group.append(mark.removesuffix("!"), self._style(thread))
            group.append(mark[len(mark.removesuffix("!")) :], _ALARM)
            group.append(" " * (self._mark_width - len(mark)))
        return group

    def _style(self, thread: Thread) -> str:
        if thread.state in _MARKS:
            return "dim"
        if thread.state is ThreadState.SHARED and len(thread.vms) > 1:
            return "bold"
        weight = "bold " if thread.state is ThreadState.OWNED else ""
        return weight + self._colours[thread.vms[0]]


def _mark(thread: Thread) -> str:
    match thread.state:
        case ThreadState.OWNED:
            mark = thread.vms[0]
        case ThreadState.IDLE:
            mark = thread.vms[0].lower()
        case ThreadState.EMULATOR:
            mark = f"{thread.vms[0]}{_QEMU}"
        case ThreadState.KEPT:
            mark = f"{thread.vms[0]}?"
        case ThreadState.SHARED:
            mark = f"{thread.vms[0] if len(thread.vms) == 1 else min(len(thread.vms), _MAX_COUNT)}+"
        case ThreadState.RESERVED if thread.qemu:
            mark = _QEMU
        case _:
            mark = _MARKS[thread.state]
    return f"{mark}!" if thread.fault is not None else mark


def _l3_title(l3: L3Box) -> str:
    return f"  L3 {l3.index}{_star(l3)}  "


def _star(box: NodeBox | L3Box) -> str:
    return "*" if box.part else ""


def _key(drawing: CoreMap) -> list[str]:
    """Explain the marks that the map shows, each by the first thread that has it."""
    first: dict[str, Thread] = {}
    for thread in drawing.threads:
        first.setdefault(_meaning(thread), thread)
    states = list(MEANINGS)
    shown = [
        f"{_mark(replace(thread, fault=None))} {meaning.format(*thread.vms)}"
        for meaning, thread in sorted(
            first.items(), key=lambda entry: (states.index(entry[1].state), len(entry[1].vms))
        )
    ]
    nodes = [node for package in drawing.packages for node in package.nodes]
    if any(node.part or any(l3.part for l3 in node.l3_groups) for node in nodes):
        shown.append("* a part: the rest is in another box")
    if any(thread.fault for thread in drawing.threads):
        shown.append("! conflict or drift")
    return shown


def _meaning(thread: Thread) -> str:
    if thread.state is ThreadState.SHARED and len(thread.vms) > 1:
        count = len(thread.vms)
        return f"shared by {count} VMs" if count < _MAX_COUNT else f"shared by {_MAX_COUNT} or more VMs"
    if thread.state is ThreadState.RESERVED and thread.qemu:
        return f"{MEANINGS[thread.state]}, with QEMU's own threads of VMs"
    return MEANINGS[thread.state]
