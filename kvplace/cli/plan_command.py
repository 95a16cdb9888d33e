"""`kvplace plan`: many VMs at once, on the nodes of a cluster; `kvplace evacuate`: all VMs of one node."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvplace.cli.cluster_flags import ClusterFlags, cluster_flags, complete_node
from kvplace.cli.output import Column, Output, print_answer, say, table_of
from kvplace.cli.parameters import (
    Answer,
    InputFile,
    example_option,
    output_option,
    strategy_option,
)
from kvplace.cli.progress import Progress
from kvplace.core.cluster.node_choice import Strategy
from kvplace.core.cpuset import format_cpu_list, mask_of
from kvplace.core.errors import BadBody, ExitCode
from kvplace.core.occupant import ClusterNode
from kvplace.core.quantity import counted
from kvplace.core.scalars import NodeName
from kvplace.core.strict_json import Json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from kvplace.core.cluster.planning import PlannedVm, VmRequest
    from kvplace.nodes.planning_cluster import PlanningCluster
    from kvplace.plan.plan_documents import ClosedTo


@click.command("plan", short_help="Place many VMs at once on the nodes of a cluster.")
@click.option(
    "--cluster",
    type=InputFile(),
    metavar="FILE",
    help="The cluster document, - for stdin (see `kvplace schema cluster`); default: six example nodes.",
)
@click.option(
    "--live", is_flag=True, help="Plan on the cluster of the kubeconfig; --context and others imply it."
)
@click.option(
    "--requests",
    type=InputFile(),
    required=True,
    metavar="FILE",
    help="The VMs, - for stdin: manifests, or requests as for `kvplace place`, one per line or as a list.",
)
@strategy_option("Which nodes VMs go to while everything fits.")
@click.option("--make-room", is_flag=True, help="Let running VMs move inside their machines.")
@example_option("cluster", "requests")
@output_option(Answer.LIST)
@cluster_flags(namespaced=False, selector=False)
def command(
    *,
    cluster: str | None,
    live: bool,
    flags: ClusterFlags,
    requests: str,
    strategy: Strategy,
    make_room: bool,
    output: Output,
) -> int:
    """Place as many VMs as possible on the nodes of a cluster.

    \b
    {"id": "db", "vcpus": 8, "cpuSet": "one-numa", "memory": "32Gi"}
    {"id": "web", "vcpus": 2, "count": 20}              20 equal VMs

    With --live the VMs are planned on the nodes of a real cluster as they are now; nothing is written there.
    VMs that wait already come first. Nodes that are cordoned, not Ready or tainted are left out, unless the
    request has tolerations; with nodeSelector and affinity it chooses nodes, as in the spec of a pod.

    All VMs are considered together, so more of them fit than one after the other; both counts are printed.

    Exit code 0 when every VM was placed, 3 when none was, 4 when some were; 130 after Ctrl-C, with the best
    plan so far.
    """  # noqa: D301 - click needs the literal backslash
    from kvplace.plan.plan_documents import read_plan_cluster

    if live or flags.are_given:
        if cluster is not None:
            raise click.UsageError("--cluster is a document; leave it out to plan on the live cluster")
        from kvplace.nodes.planning_cluster import read_planning_cluster

        there = flags.run(lambda live: read_planning_cluster(live.api, live.objects))
        say(*there.notes)
        nodes = there.nodes
    else:
        there, nodes = None, read_plan_cluster(cluster)
    closed_to = None if there is None else there.closed_to
    vms = _read_requests(requests, {vm.id for node in nodes for vm in node.running}, closed_to)
    vms = vms if there is None else there.counting(vms)
    return _plan(nodes, vms, there, strategy, output, make_room=make_room)


def _plan(
    nodes: Sequence[ClusterNode],
    vms: Sequence[VmRequest],
    there: PlanningCluster | None,
    strategy: Strategy,
    output: Output,
    *,
    make_room: bool,
    restarting: Mapping[str, str] | None = None,
) -> int:
    """Plan, print the plan, and return the exit code that states whether every VM has a place."""
    from kvplace.core.cluster.planning import plan
    from kvplace.plan.plan_documents import plan_document, plan_summary

    with Progress("planning", len(vms), "VM") as progress:
        found = plan(
            nodes,
            vms,
            strategy,
            make_room=make_room,
            watch=lambda at: progress.show(at.assigned, at.stage.value),
        )
    need_movable = () if there is None else there.need_movable(one.move.id for one in found.moves)

    def document() -> Json:
        written = plan_document(found, nodes, vms, need_movable)
        if restarting is not None:
            written["restarting"] = [{"id": name, "reason": why} for name, why in restarting.items()]
        return written

    def lines() -> Iterator[str]:
        if found.planned:
            yield from (*table_of(_columns(), found.planned, wide=output is Output.WIDE), "")
        restarts = [("restarts", f"{name}: {why}") for name, why in (restarting or {}).items()]
        for title, sentence in (*plan_summary(found, need_movable), *restarts):
            yield f"{title:<12}{sentence}"

    print_answer(output, document, lines(), (vm.id for vm in found.planned))
    for title, left in (
        ("do not fit", found.refused),
        ("not yet placed, though they fit", found.undecided),
    ):
        if left and output is Output.NAME:
            say(f"{title}: {len(left)} of {counted(len(vms), 'VM')}")
    if found.stopped:
        return ExitCode.INTERRUPTED
    if not found.refused:
        return ExitCode.DONE
    return ExitCode.PARTLY_DONE if found.planned else ExitCode.DOES_NOT_FIT


def _read_requests(
    source: str, running: AbstractSet[str], closed_to: ClosedTo | None
) -> tuple[VmRequest, ...]:
    from kvplace.documents.reading import read_source, source_name
    from kvplace.plan.plan_documents import vm_requests_of

    what = source_name(source)
    text = read_source(source, what)
    if "apiVersion" not in text:
        return vm_requests_of(text, what, running, closed_to)
    from kvplace.cli.manifest_vms import stated_vms
    from kvplace.core.cluster.draft import OPEN
    from kvplace.core.cluster.planning import VmRequest
    from kvplace.documents.reading import manifests_in
    from kvplace.kube.node_filters import demands_of

    found = []
    for vm in stated_vms(manifests_in(text, what)):
        if vm.name in running:
            raise BadBody(f"{vm.where}: a VM {vm.name!r} runs in the cluster already; rename the VM")
        closed = (
            OPEN if closed_to is None else closed_to(demands_of(vm.spec, vm.where, is_vm=vm.kind != "Pod"))
        )
        found.append(VmRequest(vm.name, vm.request, closed))
    return tuple(found)


def _columns() -> tuple[Column[PlannedVm], ...]:
    from kvplace.plan.plan_documents import whole_mib

    def numbers(ids: Sequence[int]) -> str:
        return format_cpu_list(mask_of(ids))

    def memory(vm: PlannedVm) -> str:
        return ", ".join(f"{node}: {whole_mib(count)}" for node, count in vm.placement.memory.items()) or "-"

    return (
        Column("VM", lambda vm: vm.id),
        Column("NODE", lambda vm: vm.node),
        Column("CPUS", lambda vm: format_cpu_list(vm.placement.cpus | vm.placement.owned)),
        Column("NUMA", lambda vm: numbers(vm.placement.numa_nodes)),
        Column("SOCKETS", lambda vm: numbers(vm.placement.packages), wide=True),
        Column("L3", lambda vm: numbers(vm.placement.l3_groups), wide=True),
        Column("EMULATOR", lambda vm: format_cpu_list(vm.placement.emulator_cpus), wide=True),
        Column("MEMORY", memory, wide=True),
    )


@click.command("evacuate", short_help="Check whether every VM of a node fits on the other nodes.")
@click.argument("node", shell_complete=complete_node)
@click.option("--dry-run", is_flag=True, help="Print the plan; the command moves nothing.")
@click.option("--make-room", is_flag=True, help="Let VMs of the other nodes move inside their machines.")
@output_option(Answer.LIST)
@cluster_flags(namespaced=False, selector=False)
def evacuate(*, flags: ClusterFlags, node: str, dry_run: bool, make_room: bool, output: Output) -> int:
    """Plan where every VM of a node would go, and print the VMs that fit nowhere else or cannot migrate live.

    \b
    kubectl kvplace evacuate worker-1 --dry-run
    kubectl drain worker-1 --ignore-daemonsets --delete-emptydir-data

    The plan is as for `kvplace plan --live`: VMs that wait already come first, and nodes that are cordoned,
    not Ready or tainted are left out. Nothing is reserved: the cluster may change before you drain the node.

    Exit code 0 when every VM fits, 4 when some do, 3 when none does.
    """  # noqa: D301 - click needs the literal backslash
    from kvplace.nodes.planning_cluster import read_evacuation

    if not dry_run:
        raise click.UsageError(
            f"evacuate only plans: add --dry-run, then move the VMs with `kubectl drain {node}`"
        )
    found = flags.run(lambda live: read_evacuation(live.api, live.objects, NodeName(node)))
    there = found.elsewhere
    say(*there.notes)
    if not found.vms:
        say(f"no VM of kvplace runs on node {node}")
    return _plan(
        there.nodes,
        found.vms,
        there,
        Strategy.PACK,
        output,
        make_room=make_room,
        restarting=found.restarting,
    )
