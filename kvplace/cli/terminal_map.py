"""Draws a core map in a terminal: letters first, colours where there are any.

A line for each L3 cache of each NUMA node, in the frame of its socket; a group of characters for each core,
a character for each of its threads:

    A B      owned by VM A, by VM B          .   free
    a        owned by VM A and kept idle     #   reserved for the host
    1 2 9    shared by so many VMs
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.columns import Columns
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvplace.core.cpuset import format_cpu_list
from kvplace.core.drawing import Cell, CellState, CoreMap, L3Box, NodeBox
from kvplace.core.quantity import format_bytes

_COLOURS = (
    "bright_red", "bright_green", "bright_yellow", "bright_blue", "bright_magenta", "bright_cyan",
    "red", "green", "yellow", "blue", "magenta", "cyan",
)  # fmt: skip


def print_map(out: Console, drawing: CoreMap, *, compact: bool = False) -> None:
    """Draw a machine as wide as the console is; the legend names every VM, unless `compact` with its CPUs."""
    printer = _Printer(out.width, drawing)
    out.print(Text(_summary(drawing), style="bold"))
    for package in drawing.packages:
        lines = [line for node in package.nodes for line in printer.node(node)]
        out.print(Panel(Group(*lines), title=f"socket {package.id}", title_align="left", border_style="dim"))
    for node in drawing.memory_only:
        out.print(f"NUMA {node.id}: memory only, {_memory(node)}")
    out.print(_key(drawing))
    if drawing.legend:
        out.print(_names(drawing) if compact else _legend(drawing))


class _Printer:
    def __init__(self, width: int, drawing: CoreMap) -> None:
        self._inner = width - 4  # the frame and its padding
        self._cell = max((len(entry.label) for entry in drawing.legend), default=1)
        self._colours = {entry.label: _colour(index) for index, entry in enumerate(drawing.legend)}

    def node(self, node: NodeBox) -> Iterator[Text]:
        yield Text(f"NUMA {node.id}  {_memory(node)}")
        margin = max((len(f"  L3 {l3.index}  ") for l3 in node.l3_groups), default=0)
        for l3 in node.l3_groups:
            yield from self._l3(l3, margin)

    def _l3(self, l3: L3Box, margin: int) -> Iterator[Text]:
        line = Text(f"  L3 {l3.index}".ljust(margin))
        for core in l3.cores:
            group = Text()
            for cell in core.cells:
                group.append(*self._drawn(cell))
            if line.cell_len + group.cell_len > self._inner and line.cell_len > margin:
                yield line
                line = Text(" " * margin)
            line.append_text(group).append(" ")
        yield line

    def _drawn(self, cell: Cell) -> tuple[str, str]:
        mark, style = self._mark(cell)
        return mark.ljust(self._cell), style

    def _mark(self, cell: Cell) -> tuple[str, str]:
        colour = self._colours.get(cell.label, "")
        match cell.state:
            case CellState.FREE:
                return ".", "dim"
            case CellState.RESERVED:
                return "#", "dim"
            case CellState.OWNED:
                return cell.label, f"bold {colour}".strip()
            case CellState.IDLE:
                return cell.label.lower(), colour
            case CellState.SHARED:
                return str(min(cell.uses, 9)), f"bold {colour}".strip()


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _summary(drawing: CoreMap) -> str:
    counts = {state: drawing.count(state) for state in CellState}
    parts = [f"{sum(counts.values())} CPUs"]
    parts += [f"{count} {state.value}" for state, count in counts.items() if count]
    return f"{drawing.name}: {', '.join(parts)}"


def _memory(node: NodeBox) -> str:
    if not node.memory:
        return "memory unknown"
    text = f"{node.free_memory / 2**30:.0f} of {node.memory / 2**30:.0f} GiB free"
    for size, (free, count) in node.huge_pages.items():
        text += f", {free} of {count} pages of {format_bytes(size)} free"
    return text


def _key(drawing: CoreMap) -> Text:
    meanings = {
        CellState.OWNED: "A owned by VM A",
        CellState.IDLE: "a owned and kept idle",
        CellState.SHARED: "1-9 shared by so many VMs",
        CellState.FREE: ". free",
        CellState.RESERVED: "# reserved",
    }
    shown = [text for state, text in meanings.items() if drawing.count(state)]
    return Text("   ".join(shown), style="dim")


def _names(drawing: CoreMap) -> Columns:
    return Columns(
        [
            Text.assemble((entry.label, f"bold {_colour(index)}"), " ", entry.claim.vmi or entry.claim.pod)
            for index, entry in enumerate(drawing.legend)
        ],
        padding=(0, 2),
        column_first=True,
    )


def _legend(drawing: CoreMap) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("", "VM", "POLICY", "CPUS"):
        table.add_column(title, overflow="fold")
    for index, entry in enumerate(drawing.legend):
        claim = entry.claim
        name = f"{claim.namespace}/{claim.vmi or claim.pod}".removeprefix("/")
        table.add_row(
            Text(entry.label, style=f"bold {_colour(index)}"),
            name,
            claim.policy.value,
            format_cpu_list(claim.cpus | claim.owned),
        )
    return table
