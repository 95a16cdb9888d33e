"""`kvplace topology`: the machine of a file; `kvplace describe-node`: a node without an agent."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from kvplace.cli.cluster_flags import ClusterFlags, cluster_flags, complete_namespace, complete_node
from kvplace.cli.output import (
    Column,
    Output,
    cpu_lines,
    number_list,
    print_answer,
    print_document,
    say,
    table_lines,
    table_of,
    table_width,
)
from kvplace.cli.parameters import (
    Answer,
    chosen_machine,
    cpu_manager_state_option,
    machine_argument,
    output_option,
    read_cpus,
)
from kvplace.core.cpuset import format_cpu_list
from kvplace.core.errors import BadBody, Conflict, Misconfigured
from kvplace.core.node_devices import NO_NUMA
from kvplace.core.quantity import counted, format_bytes
from kvplace.core.scalars import CpuMask, NodeName
from kvplace.core.topology import NumaNode, Topology

if TYPE_CHECKING:
    from kvplace.cli.live_cluster import LiveCluster
    from kvplace.kube.object_client import ObjectClient
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
    name = node_name(known.name)
    if name != known.name and output in (Output.NAME, Output.JSON, Output.YAML):
        say(f"the node is named {name}: {known.name!r} is not a name that a node can have")
    print_answer(
        output,
        lambda: node_topology(known.name, known.topology, known.kubelet_cpus, known.in_use),
        _tables(known, wide=output is Output.WIDE),
        [f"{KIND.lower()}.kvplace.io/{name}"],
    )


def _tables(machine: Machine, *, wide: bool) -> Iterator[str]:
    width, topology = table_width(), machine.topology
    yield from (*_summary(machine), "")
    node_columns = _node_columns(topology, width and max(20, width - _BESIDE_CPUS))
    yield from table_of(node_columns, topology.numa_nodes)
    if any(other != node.id for node in topology.numa_nodes for other in node.distances):
        yield from ("", *table_lines(list(_distances(topology))))
    if wide:
        l3_columns = _l3_columns(topology, width and width // 3)
        yield from ("", *table_of(l3_columns, enumerate(topology.l3_groups)))


def _summary(machine: Machine) -> Iterator[str]:
    topology = machine.topology
    yield (
        f"{machine.name}: {counted(len(topology.packages), 'socket')}, "
        f"{counted(len(topology.numa_nodes), 'NUMA node')}, {counted(len(topology.l3_groups), 'L3 cache')}, "
        f"{counted(len(topology.cores), 'core')}, {counted(topology.cpus.bit_count(), 'CPU')}"
    )
    if topology.socket_noun == "NUMA node":
        yield "every core is a socket of its own: one-socket and spread-sockets go by NUMA nodes"
    elif topology.socket_noun == "machine":
        yield "every core is a socket and a NUMA node of its own: the machine counts as one socket"
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


def _node_columns(topology: Topology, width: int | None) -> tuple[Column[NumaNode], ...]:
    return (
        Column("NUMA", lambda node: str(node.id)),
        Column("SOCKET", lambda node: number_list(topology.packages_of(node.cpus))),
        Column("CPUS", lambda node: cpu_lines(node.cpus, width) or "-"),
        Column("L3", lambda node: str(len(topology.l3_in(node.cpus)))),
        Column("CORES", lambda node: str(len(topology.cores_in(node.cpus)))),
        Column(
            "THREADS/CORE",
            lambda node: number_list(sorted({core.bit_count() for core in topology.cores_in(node.cpus)})),
        ),
        Column("MEMORY", lambda node: f"{node.memory / 2**30:.1f} GiB" if node.memory else "-"),
        Column("HUGE PAGES", _huge_pages),
    )


def _huge_pages(node: NumaNode) -> str:
    return ", ".join(f"{count} x {format_bytes(size)}" for size, count in node.huge_pages.items()) or "-"


def _distances(topology: Topology) -> Iterator[Sequence[str]]:
    """Yield the matrix as it was described, a row for each node; `-` where the machine does not state."""
    nodes = topology.numa_nodes
    yield ("DISTANCE", *(f"to {node.id}" for node in nodes))
    for node in nodes:
        yield (f"from {node.id}", *(str(node.distances.get(other.id, "-")) for other in nodes))


def _l3_columns(topology: Topology, width: int | None) -> tuple[Column[tuple[int, CpuMask]], ...]:
    return (
        Column("L3", lambda group: str(group[0])),
        Column("SOCKET", lambda group: number_list(topology.packages_of(group[1]))),
        Column("NUMA", lambda group: number_list(topology.nodes_of(group[1]))),
        Column("CPUS", lambda group: cpu_lines(group[1], width)),
        Column(
            "CORES (THREADS OF EACH)",
            lambda group: "  ".join(format_cpu_list(core) for core in topology.cores_in(group[1])),
        ),
    )


_MANAGER = "kvplace-describe-node"


@click.command("describe-node", short_help="Read the machine of a node through a pod, and describe it.")
@click.argument("node", shell_complete=complete_node)
@click.option(
    "--apply", "applied", is_flag=True, help="Write the NodeTopology to the cluster; else print it."
)
@click.option(
    "--reserved",
    metavar="CPUS",
    help="CPUs to reserve for the host, for example 0-1,64-65 (default: the kubelet's reservedSystemCPUs if "
    "you may get nodes/proxy, else the core of the lowest CPU).",
)
@click.option(
    "--image", metavar="IMAGE", help="An image with the command kvplace (default: the image of `serve`)."
)
@click.option(
    "--pod-namespace",
    metavar="NAME",
    shell_complete=complete_namespace,
    help="Namespace of the pod (default: the namespace of `serve`).",
)
@click.option(
    "--timeout",
    type=click.IntRange(1, 3600),
    default=120,
    show_default=True,
    help="Seconds that the pod may take, its image's download included.",
)
@cluster_flags(namespaced=False, selector=False)
@output_option(Answer.DOCUMENT)
def describe_node(
    *,
    flags: ClusterFlags,
    node: str,
    applied: bool,
    reserved: str | None,
    image: str | None,
    pod_namespace: str | None,
    timeout: int,
    output: Output,
) -> None:
    """Read the sockets, NUMA nodes, caches, cores and memory of a node that has no agent.

    A pod without token, volumes and privileges runs on the node for a moment, prints its view of sysfs
    and is deleted. Without --apply the NodeTopology is printed; with it you write it to the cluster, by
    server-side apply. It then stays as it is until you describe the node again: after new memory, huge pages
    or CPUs.

    An agent describes its node itself: do not use this command there.
    """
    mask = None if reserved is None else read_cpus(reserved, "--reserved")
    document = flags.run(
        lambda live: _described(live, NodeName(node), mask, image, pod_namespace, timeout, applied=applied)
    )
    if applied:
        say(f"node {node} is described; it stays so until you describe it again")
    if output is Output.NAME:
        click.echo(f"nodetopology.kvplace.io/{node}")
    elif not applied:
        print_document(document, output)


async def _described(
    cluster: LiveCluster,
    node: NodeName,
    reserved: CpuMask | None,
    image: str | None,
    namespace: str | None,
    seconds: float,
    *,
    applied: bool,
) -> dict[str, Any]:
    from dataclasses import replace

    import msgspec

    from kvplace.core.node_topology import node_topology
    from kvplace.kube.node_filters import SchedulableNode
    from kvplace.kube.watches import NODES, TOPOLOGIES
    from kvplace.nodes.cluster_reading import read_node
    from kvplace.nodes.describing_pod import (
        check_node,
        describe_through_pod,
        note_on_devices,
        reserved_by_kubelet,
    )

    writer = cluster.objects
    found = await writer.read(NODES.api, node)
    check_node(None if found is None else msgspec.convert(found, SchedulableNode), node)
    known = (await read_node(cluster.api, node)).nodes.get(node)
    by_agent = known is not None and known.described is not None and known.described.by_agent
    if applied and by_agent:
        raise Misconfigured(
            f"the agent of node {node} describes it and notices changes; delete its NodeTopology if the "
            "agent is gone for good"
        )
    serving = await _serve(writer)
    image = image or serving[1]
    if not image:
        raise Misconfigured(
            "no Deployment of serve names an image: give one with --image and --pod-namespace"
        )
    topology, notes = await describe_through_pod(
        writer, node, image=image, namespace=namespace or serving[0] or "default", seconds=seconds
    )
    devices = note_on_devices(
        node,
        (found or {}).get("status", {}).get("allocatable") or {},
        known.devices if known is not None and by_agent else None,
    )
    say(*notes, *([devices] if devices else ()))
    if reserved is not None and reserved & ~topology.cpus:
        absent = format_cpu_list(reserved & ~topology.cpus)
        raise BadBody(f"--reserved names CPU {absent}, which node {node} does not have")
    if reserved is None:
        reserved, said = await reserved_by_kubelet(writer, node, topology)
        say(said)
    document = node_topology(node, replace(topology, reserved=reserved))
    topologies = TOPOLOGIES.api
    if applied:
        try:
            await writer.apply(topologies, document, manager=_MANAGER)
        except Conflict as error:
            raise Misconfigured(
                f"another client has described node {node} ({error}); delete that first: "
                f"kubectl delete nodetopology {node}"
            ) from None
    return document


async def _serve(reader: ObjectClient) -> tuple[str, str]:
    """Find the namespace and the image of `serve`; empty where it is not installed."""
    from kvplace.kube.watches import ApiKind

    labels = "app.kubernetes.io/name=kvplace,app.kubernetes.io/component=serve"
    for one in await reader.read_list(ApiKind("deployments", "apps"), labels=labels):
        containers = one["spec"]["template"]["spec"]["containers"]
        return one["metadata"]["namespace"], containers[0].get("image", "")
    return "", ""
