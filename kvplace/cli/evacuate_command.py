"""`kvplace evacuate`: whether every VM of a node fits on the other nodes, before maintenance."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvplace.cli.chosen_cluster import ClusterFlags
from kvplace.cli.cluster_flags import cluster_flags, complete_node
from kvplace.cli.output import Output, say
from kvplace.cli.parameters import Answer, output_option
from kvplace.cli.plan_command import answer_plan
from kvplace.cli.progress import Progress

if TYPE_CHECKING:
    from kvplace.core.cluster.planning import PlanProgress


@click.command("evacuate", short_help="Check whether every VM of a node fits on the other nodes.")
@click.argument("node", shell_complete=complete_node)
@click.option("--dry-run", is_flag=True, help="Print the plan; the command moves nothing.")
@click.option("--make-room", is_flag=True, help="Let VMs of the other nodes move inside their machines.")
@output_option(Answer.LIST)
@cluster_flags(namespaced=False, selector=False)
def command(*, flags: ClusterFlags, node: str, dry_run: bool, make_room: bool, output: Output) -> int:
    """Plan where every VM of a node would go, and print the VMs that fit nowhere else or cannot migrate live.

    \b
    kubectl kvplace evacuate worker-1 --dry-run
    kubectl drain worker-1 --ignore-daemonsets --delete-emptydir-data

    The plan is as for `kvplace plan --live`: VMs that wait already come first, and nodes that are cordoned,
    not Ready or tainted are left out. Nothing is reserved: the cluster may change before you drain the node.

    Exit code 0 when every VM fits, 4 when some do, 3 when none does.
    """  # noqa: D301 - click needs the literal backslash
    from kvplace.cli.live_cluster import run_with_cluster
    from kvplace.core.cluster.planning import plan
    from kvplace.core.scalars import NodeName
    from kvplace.kube.object_client import ObjectReader
    from kvplace.nodes.planning_cluster import read_evacuation

    if not dry_run:
        raise click.UsageError(
            f"evacuate only plans: add --dry-run, then move the VMs with `kubectl drain {node}`"
        )
    found = run_with_cluster(
        flags, lambda live: read_evacuation(live.api, ObjectReader(live.session), NodeName(node))
    )
    there = found.elsewhere
    for note in there.notes:
        say(note)
    if not found.vms:
        say(f"no VM of kvplace runs on node {node}")
    with Progress("planning", len(found.vms), "VM") as progress:

        def watch(at: PlanProgress) -> bool:
            return progress.show(at.assigned, at.stage.value)

        planned = plan(there.nodes, found.vms, make_room=make_room, watch=watch)
    need_movable = there.need_movable(one.move.id for one in planned.moves)
    return answer_plan(
        planned, there.nodes, found.vms, output, need_movable=need_movable, restarting=found.restarting
    )
