"""`kvplace describe-node`: reads the machine of a node without an agent, and describes it in the cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kvplace.cli.cluster_flags import cluster_flags, complete_namespace, complete_node
from kvplace.cli.output import Output, print_document, say
from kvplace.cli.parameters import Answer, ClusterFlags, FloatRange, output_option

if TYPE_CHECKING:
    from kvplace.cli.live_cluster import LiveCluster
    from kvplace.core.scalars import CpuMask, NodeName
    from kvplace.kube.object_client import ObjectReader

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
    "--image", metavar="IMAGE", help="An image with the command kvplace (default: that of `serve`)."
)
@click.option(
    "--pod-namespace",
    metavar="NAME",
    shell_complete=complete_namespace,
    help="Namespace of the pod (default: that of `serve`).",
)
@click.option(
    "--timeout",
    type=FloatRange(1, 3600),
    default=120.0,
    show_default=True,
    help="Seconds that the pod may take, its image's download included.",
)
@cluster_flags(namespaced=False, selector=False)
@output_option(Answer.DOCUMENT)
def command(
    *,
    flags: ClusterFlags,
    node: str,
    applied: bool,
    reserved: str | None,
    image: str | None,
    pod_namespace: str | None,
    timeout: float,
    output: Output,
) -> None:
    """Read the sockets, NUMA nodes, caches, cores and memory of a node that has no agent.

    A pod without token, volumes and privileges runs on the node for a moment, prints what it sees in sysfs
    and is deleted. Without --apply the NodeTopology is printed; with it you write it to the cluster, by
    server-side apply. It then stays as it is until you describe the node again: after new memory, huge pages
    or CPUs.

    An agent describes its node itself: do not use this command there.
    """
    from kvplace.cli.live_cluster import run_with_cluster
    from kvplace.core.cpuset import parse_cpu_list
    from kvplace.core.errors import BadBody
    from kvplace.core.scalars import NodeName

    try:
        mask = None if reserved is None else parse_cpu_list(reserved, what="--reserved")
    except ValueError as error:
        raise BadBody(str(error)) from None

    async def body(cluster: LiveCluster) -> dict[str, Any]:
        return await _described(cluster, NodeName(node), mask, image, pod_namespace, timeout, applied=applied)

    document = run_with_cluster(flags, body)
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

    from kvplace.core.cpuset import format_cpu_list
    from kvplace.core.errors import BadBody, Conflict, Misconfigured
    from kvplace.core.node_topology import GROUP, VERSION, node_topology
    from kvplace.kube.node_filters import SchedulableNode
    from kvplace.kube.object_client import ApiKind, ObjectWriter
    from kvplace.nodes.cluster_reading import read_node
    from kvplace.nodes.describing_pod import (
        check_node,
        describe_through_pod,
        note_on_devices,
        reserved_by_kubelet,
    )

    writer = ObjectWriter(cluster.session)
    found = await writer.read(ApiKind("nodes"), node)
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
    for note in (*notes, devices) if devices else notes:
        say(note)
    if reserved is not None and reserved & ~topology.cpus:
        absent = format_cpu_list(reserved & ~topology.cpus)
        raise BadBody(f"--reserved names CPU {absent}, which node {node} does not have")
    if reserved is None:
        reserved, said = await reserved_by_kubelet(writer, node, topology)
        say(said)
    document = node_topology(node, replace(topology, reserved=reserved))
    topologies = ApiKind("nodetopologies", GROUP, VERSION)
    if applied:
        try:
            await writer.apply(topologies, document, manager=_MANAGER)
        except Conflict as error:
            raise Misconfigured(
                f"another client has described node {node} ({error}); delete that first: "
                f"kubectl delete nodetopology {node}"
            ) from None
    return document


async def _serve(reader: ObjectReader) -> tuple[str, str]:
    """Find the namespace and the image of `serve`; empty where it is not installed."""
    from kvplace.kube.object_client import ApiKind

    labels = "app.kubernetes.io/name=kvplace,app.kubernetes.io/component=serve"
    for one in await reader.read_list(ApiKind("deployments", "apps"), labels=labels):
        containers = one["spec"]["template"]["spec"]["containers"]
        return one["metadata"]["namespace"], containers[0].get("image", "")
    return "", ""
