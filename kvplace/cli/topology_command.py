"""`kvplace topology`: what a machine is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvplace.cli.output import Output, console, output_option, print_json, say

if TYPE_CHECKING:
    from kvplace.cli.machine import Machine


@click.command("topology", short_help="Show what a machine is made of.")
@click.argument("file", required=False)
@click.option("--reserved", metavar="CPUS", help="CPUs to keep for the host, for instance 0-1,64-65.")
@output_option
def command(file: str | None, reserved: str | None, output: Output) -> None:
    """Show sockets, NUMA nodes, L3 caches, cores and distances of a machine.

    FILE is a folder or tar archive that holds the machine's sys/ (and proc/), a machine that was printed
    with -o json, or the name of a server type that comes with kvplace. Without FILE it is this machine.
    """
    from kvplace.cli.machine import find_machine, this_machine
    from kvplace.core.node_topology import node_topology

    machine = this_machine(reserved) if file is None else find_machine(file, reserved)
    for note in machine.notes:
        say(note)
    if output is Output.JSON:
        print_json(node_topology(machine.name, machine.topology))
    else:
        _print_table(machine)


def _print_table(machine: Machine) -> None:
    from rich.table import Table

    from kvplace.core.cpuset import format_cpu_list
    from kvplace.core.quantity import format_bytes

    topology = machine.topology
    out = console()
    out.print(
        f"{machine.name}: {_count(len(topology.packages), 'socket')}, "
        f"{_count(len(topology.numa_nodes), 'NUMA node')}, {_count(len(topology.l3_groups), 'L3 cache')}, "
        f"{_count(len(topology.cores), 'core')}, {_count(topology.cpus.bit_count(), 'CPU')}"
    )
    if topology.reserved:
        out.print(f"reserved for the host: {format_cpu_list(topology.reserved)}")
    if topology.isolated:
        out.print(f"isolated by the kernel: {format_cpu_list(topology.isolated)}")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("NUMA", "SOCKET", "CPUS", "CORES", "L3", "MEMORY", "HUGE PAGES", "DISTANCES"):
        table.add_column(title, overflow="fold", justify="left")
    for node in topology.numa_nodes:
        pages = ", ".join(f"{count} x {format_bytes(size)}" for size, count in node.huge_pages.items())
        table.add_row(
            str(node.id),
            ",".join(map(str, topology.packages_of(node.cpus))) or "-",
            format_cpu_list(node.cpus) or "-",
            str(len(topology.cores_in(node.cpus))),
            str(len(topology.l3_in(node.cpus))),
            f"{node.memory / 2**30:.1f} GiB" if node.memory else "-",
            pages or "-",
            " ".join(str(topology.distance(node.id, other.id)) for other in topology.numa_nodes),
        )
    out.print(table)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
