"""`kvplace topology`: what a machine is made of."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvplace.cli.machine import chosen_machine, cpu_manager_state_option
from kvplace.cli.output import (
    ENDLESS,
    Output,
    console,
    cpu_lines,
    output_option_of,
    print_json,
    print_yaml,
    say,
)

if TYPE_CHECKING:
    from rich.table import Table

    from kvplace.core.topology import NumaNode, Topology
    from kvplace.machines.machine import Machine

_BESIDE_CPUS = 76
"""Columns of the table of NUMA nodes that are not for their CPUs."""


class _NamingMachines(click.Command):
    """Ends its help with the server types that there are."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from kvplace.machines.shipped import machine_names

        with formatter.section("Server types"):
            indent = " " * formatter.current_indent
            names = ", ".join(machine_names())
            lines = textwrap.wrap(
                names,
                formatter.width,
                initial_indent=indent,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
            formatter.write("\n".join(lines) + "\n")


@click.command("topology", cls=_NamingMachines, short_help="Show what a machine is made of.")
@click.argument("file", required=False)
@click.option("--reserved", metavar="CPUS", help="CPUs to keep for the host, for instance 0-1,64-65.")
@cpu_manager_state_option
@output_option_of(*Output)
def command(file: str | None, reserved: str | None, cpu_manager_state: Path | None, output: Output) -> None:
    """Show sockets, NUMA nodes, L3 caches, cores and distances of a machine.

    FILE is a folder or tar archive that holds the machine's sys/ (and proc/), a NodeTopology as JSON or YAML,
    what `virsh capabilities` prints, a node's cpu-map, or the name of a server type that comes with kvplace.
    Without FILE it is this machine.

    What the description leaves out, or says in two ways, is told on stderr. `kvplace map` draws the cores.
    """
    from kvplace.core.node_topology import KIND, node_topology

    machine = chosen_machine(file, reserved=reserved, state=cpu_manager_state)
    for note in machine.notes:
        say(note)
    if output is Output.NAME:
        click.echo(f"{KIND.lower()}.kvplace.io/{machine.name}")
    elif output in (Output.JSON, Output.YAML):
        document = node_topology(machine.name, machine.topology, machine.kubelet_cpus)
        (print_json if output is Output.JSON else print_yaml)(document)
    else:
        _print_tables(machine, wide=output is Output.WIDE)


def _print_tables(machine: Machine, *, wide: bool) -> None:
    out = console(ENDLESS)
    for line in _summary(machine):
        out.print(line, soft_wrap=True)
    out.print()
    out.print(_nodes(machine.topology, max(20, out.width - _BESIDE_CPUS)))
    if any(other != node.id for node in machine.topology.numa_nodes for other in node.distances):
        click.echo()
        for row in _distances(machine.topology):
            click.echo(row)
    if wide:
        out.print()
        out.print(_l3_groups(machine.topology, out.width // 3))


def _summary(machine: Machine) -> Iterator[str]:
    from kvplace.core.cpuset import format_cpu_list
    from kvplace.core.quantity import counted

    topology = machine.topology
    yield (
        f"{machine.name}: {counted(len(topology.packages), 'socket')}, "
        f"{counted(len(topology.numa_nodes), 'NUMA node')}, {counted(len(topology.l3_groups), 'L3 cache')}, "
        f"{counted(len(topology.cores), 'core')}, {counted(topology.cpus.bit_count(), 'CPU')}"
    )
    for what, cpus in (
        ("reserved for the host", topology.reserved),
        ("isolated by the kernel", topology.isolated),
        ("held by the kubelet's static policy", machine.kubelet_cpus),
    ):
        if cpus:
            yield f"{what}: {format_cpu_list(cpus)}"


def _nodes(topology: Topology, room: int) -> Table:
    table = _table("NUMA", "SOCKET", "CPUS", "L3", "CORES", "THREADS/CORE", "MEMORY", "HUGE PAGES")
    for node in topology.numa_nodes:
        table.add_row(
            str(node.id),
            _list(topology.packages_of(node.cpus)),
            cpu_lines(node.cpus, room) or "-",
            str(len(topology.l3_in(node.cpus))),
            str(len(topology.cores_in(node.cpus))),
            _list(sorted({core.bit_count() for core in topology.cores_in(node.cpus)})),
            f"{node.memory / 2**30:.1f} GiB" if node.memory else "-",
            _huge_pages(node),
        )
    return table


def _huge_pages(node: NumaNode) -> str:
    from kvplace.core.quantity import format_bytes

    return ", ".join(f"{count} x {format_bytes(size)}" for size, count in node.huge_pages.items()) or "-"


def _distances(topology: Topology) -> Iterator[str]:
    """The matrix as it was described, a line for each node that looks: `-` where nothing was said.

    Its lines stay whole however narrow the terminal is: broken ones could not be read at all.
    """
    nodes = topology.numa_nodes
    rows = [["DISTANCE", *(f"to {node.id}" for node in nodes)]]
    rows += [
        [f"from {node.id}", *(str(node.distances.get(other.id, "-")) for other in nodes)] for node in nodes
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _l3_groups(topology: Topology, room: int) -> Table:
    from kvplace.core.cpuset import format_cpu_list

    table = _table("L3", "SOCKET", "NUMA", "CPUS", "CORES (THREADS OF EACH)")
    for index, cpus in enumerate(topology.l3_groups):
        table.add_row(
            str(index),
            _list(topology.packages_of(cpus)),
            _list(topology.nodes_of(cpus)),
            cpu_lines(cpus, room),
            "  ".join(format_cpu_list(core) for core in topology.cores_in(cpus)),
        )
    return table


def _table(*titles: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in titles:
        table.add_column(title, overflow="fold", justify="left", no_wrap=title == "CPUS")
    return table


def _list(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers)) or "-"
