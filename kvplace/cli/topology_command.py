"""`kvplace topology`: the sockets, NUMA nodes, L3 caches and cores of a machine."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import click

from kvplace.cli.output import (
    Column,
    Output,
    cpu_lines,
    print_document,
    print_table,
    rows_of,
    say,
    table_width,
)
from kvplace.cli.parameters import (
    Answer,
    chosen_machine,
    cpu_manager_state_option,
    machine_argument,
    output_option,
)

if TYPE_CHECKING:
    from kvplace.core.scalars import CpuMask
    from kvplace.core.topology import NumaNode, Topology
    from kvplace.machines.machine import Machine

_BESIDE_CPUS = 76
"""Width of the other columns of the table of NUMA nodes."""


class _NamingMachines(click.Command):
    """Lists the server types at the end of its help."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from kvplace.machines.server_types import machine_names

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


@click.command("topology", cls=_NamingMachines, short_help="Show sockets, NUMA nodes and cores of a machine.")
@machine_argument()
@click.option("--reserved", metavar="CPUS", help="CPUs to reserve for the host, for example 0-1,64-65.")
@cpu_manager_state_option
@output_option(Answer.LIST)
def command(machine: str | None, reserved: str | None, cpu_manager_state: str | None, output: Output) -> None:
    """Show the sockets, NUMA nodes, L3 caches, cores and distances of a machine.

    FILE is a folder or tar archive with the machine's sys/ (and proc/), a NodeTopology as JSON or YAML, the
    output of `virsh capabilities` or `lscpu -p`, a node's cpu-map, or the name of a server type below.
    Without FILE it is this machine.

    Missing and contradictory parts of the description are reported on stderr. `kvplace map` draws the cores.
    """
    from kvplace.core.node_topology import KIND, node_name, node_topology

    known = chosen_machine(machine, reserved=reserved, state=cpu_manager_state)
    for note in known.notes:
        say(note)
    name = node_name(known.name)
    if name != known.name and output in (Output.NAME, Output.JSON, Output.YAML):
        say(f"the node is named {name}: {known.name!r} is not a name that a node can have")
    if output is Output.NAME:
        click.echo(f"{KIND.lower()}.kvplace.io/{name}")
    elif output.is_document:
        print_document(node_topology(known.name, known.topology, known.kubelet_cpus), output)
    else:
        _print_tables(known, wide=output is Output.WIDE)


def _print_tables(machine: Machine, *, wide: bool) -> None:
    width = table_width()
    for line in _summary(machine):
        click.echo(line)
    click.echo()
    print_table(_nodes(machine.topology, width and max(20, width - _BESIDE_CPUS)))
    if any(other != node.id for node in machine.topology.numa_nodes for other in node.distances):
        click.echo()
        print_table(list(_distances(machine.topology)))
    if wide:
        click.echo()
        print_table(_l3_groups(machine.topology, width and width // 3))


def _summary(machine: Machine) -> Iterator[str]:
    from kvplace.core.cpuset import format_cpu_list
    from kvplace.core.node_devices import NO_NUMA
    from kvplace.core.quantity import counted

    topology = machine.topology
    yield (
        f"{machine.name}: {counted(len(topology.packages), 'socket')}, "
        f"{counted(len(topology.numa_nodes), 'NUMA node')}, {counted(len(topology.l3_groups), 'L3 cache')}, "
        f"{counted(len(topology.cores), 'core')}, {counted(topology.cpus.bit_count(), 'CPU')}"
    )
    if topology.sockets != topology.packages:
        yield "every core is a socket of its own: one-socket and spread-sockets go by NUMA nodes"
    for what, cpus in (
        ("reserved for the host", topology.reserved),
        ("isolated by the kernel", topology.isolated),
        ("held by the kubelet's static policy", machine.kubelet_cpus),
    ):
        if cpus:
            yield f"{what}: {format_cpu_list(cpus)}"
    for one in () if machine.devices is None else machine.devices.counts:
        place = "no known NUMA node" if one.node == NO_NUMA else f"NUMA node {one.node}"
        yield f"{one.total} {one.resource} on {place}"


def _nodes(topology: Topology, width: int | None) -> Sequence[Sequence[str]]:
    columns: tuple[Column[NumaNode], ...] = (
        Column("NUMA", lambda node: str(node.id)),
        Column("SOCKET", lambda node: _list(topology.packages_of(node.cpus))),
        Column("CPUS", lambda node: cpu_lines(node.cpus, width) or "-"),
        Column("L3", lambda node: str(len(topology.l3_in(node.cpus)))),
        Column("CORES", lambda node: str(len(topology.cores_in(node.cpus)))),
        Column(
            "THREADS/CORE",
            lambda node: _list(sorted({core.bit_count() for core in topology.cores_in(node.cpus)})),
        ),
        Column("MEMORY", lambda node: f"{node.memory / 2**30:.1f} GiB" if node.memory else "-"),
        Column("HUGE PAGES", _huge_pages),
    )
    return rows_of(columns, topology.numa_nodes)


def _huge_pages(node: NumaNode) -> str:
    from kvplace.core.quantity import format_bytes

    return ", ".join(f"{count} x {format_bytes(size)}" for size, count in node.huge_pages.items()) or "-"


def _distances(topology: Topology) -> Iterator[Sequence[str]]:
    """Yield the matrix as it was described, a row for each node; `-` where the machine does not state."""
    nodes = topology.numa_nodes
    yield ("DISTANCE", *(f"to {node.id}" for node in nodes))
    for node in nodes:
        yield (f"from {node.id}", *(str(node.distances.get(other.id, "-")) for other in nodes))


def _l3_groups(topology: Topology, width: int | None) -> Sequence[Sequence[str]]:
    from kvplace.core.cpuset import format_cpu_list

    columns: tuple[Column[tuple[int, CpuMask]], ...] = (
        Column("L3", lambda group: str(group[0])),
        Column("SOCKET", lambda group: _list(topology.packages_of(group[1]))),
        Column("NUMA", lambda group: _list(topology.nodes_of(group[1]))),
        Column("CPUS", lambda group: cpu_lines(group[1], width)),
        Column(
            "CORES (THREADS OF EACH)",
            lambda group: "  ".join(format_cpu_list(core) for core in topology.cores_in(group[1])),
        ),
    )
    return rows_of(columns, enumerate(topology.l3_groups))


def _list(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers)) or "-"
