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
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rich.columns import Columns
from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text

from kvplace.cli.map_legend import colour_of, legend, lines_of, names_of_vms
from kvplace.cli.output import cpu_lines
from kvplace.core.drawing.core_map import MEANINGS, CoreBox, CoreMap, L3Box, NodeBox, Thread, ThreadState
from kvplace.core.drawing.numa_distances import TITLE, distance_phrases
from kvplace.core.drawing.occupancy import printable

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
        self._colours = {entry.label: colour_of(index) for index, entry in enumerate(drawing.legend)}

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
