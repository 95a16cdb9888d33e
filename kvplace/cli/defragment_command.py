"""`kvplace defragment`: moves of running VMs that gather free CPUs, planned, confirmed and carried out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kvplace.cli.cluster_flags import ClusterFlags, cluster_flags, read_selector
from kvplace.cli.output import Column, Output, print_answer, print_lines, say, table_of
from kvplace.cli.parameters import Answer, check_confirmation, output_option, yes_option
from kvplace.cli.progress import Progress
from kvplace.core.cpuset import format_cpu_list
from kvplace.core.errors import ExitCode
from kvplace.core.placement import Placement
from kvplace.core.quantity import about_bytes, counted, first_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvplace.cli.live_cluster import LiveCluster
    from kvplace.core.cluster.defragmentation import Defragmentation, DefragmentingMove, FreeRoom
    from kvplace.core.label_terms import LabelTerms
    from kvplace.nodes.movable_cluster import MovableCluster
    from kvplace.plan.defragmentation_run import MoveResult


_SEARCH_INTERRUPTED = "the search was interrupted; a longer one may find more moves"
_INTERRUPTED = "the command was interrupted; moves without `made` were not begun"
_NAMED = 8
"""VMs that one line names."""


@click.command("defragment", short_help="Move running VMs so that free CPUs lie together.")
@click.option(
    "--nodes",
    metavar="SELECTOR",
    callback=read_selector,
    help="Only nodes with these labels.",
)
@click.option("--dry-run", is_flag=True, help="Print the moves and their gain only.")
@yes_option
@output_option(Answer.LIST)
@cluster_flags(namespaced=False, selector=False)
def command(*, flags: ClusterFlags, nodes: LabelTerms, dry_run: bool, yes: bool, output: Output) -> int:
    """Move running VMs so that free CPUs lie together, first inside nodes and then between them.

    \b
    kubectl kvplace defragment --dry-run
    kubectl kvplace defragment --nodes zone=a

    Only VMs with kvplace.io/movable move: "true" inside their node, "nodes" also to other nodes by live
    migration. Each move brings a VM together on fewer sockets or NUMA nodes, or it frees places for later VMs
    with at least as many CPUs as the VM has. No VM gets worse cores.

    Ctrl-C ends the search, or the command after the present move. Call it again to continue from there.

    Exit code 0 when all moves were made or there are none, 4 when some were made, 1 when none was.
    """  # noqa: D301 - click needs the literal backslash
    from kvplace.cli.live_cluster import ask

    async def body(live: LiveCluster) -> int:
        from datetime import UTC, datetime

        from kvplace.cli.live_cluster import on_interrupt
        from kvplace.core.cluster.defragmentation import defragment
        from kvplace.nodes.movable_cluster import read_movable_cluster

        there = await read_movable_cluster(live.api, live.objects, nodes, datetime.now(UTC))
        with on_interrupt(None), Progress("searching", len(there.vms), "VM") as progress:
            found = defragment(
                there.nodes, there.inside, there.between, watch=lambda moves: progress.show(moves, "moves")
            )
        for reason, count in there.stay.items():
            say(f"VMs stay because {reason}: {counted(count, 'VM')}")
        if output in (Output.TABLE, Output.WIDE):
            print_lines(_lines(found))
        if not found.complete and not progress.interrupted:
            say("the search stopped at its bound; more moves may help: call defragment again afterwards")
        results: list[MoveResult] = []
        interrupted = _SEARCH_INTERRUPTED if progress.interrupted else ""
        if begins := not (dry_run or interrupted or not found.moves):
            if not yes:
                ask(f"Make {counted(len(found.moves), 'move')}?")
            results, stopped = await _carry_out(live, found, there)
            interrupted = _INTERRUPTED if stopped and _left(found, results) else ""
        moves = [one.move for one in results if not one.error] if begins else found.moves
        document = _document(found, results, interrupted=interrupted)
        print_answer(output, lambda: document, (), [move.id for move in moves])
        if interrupted:
            return ExitCode.INTERRUPTED
        return _exit_code(found, results) if begins else ExitCode.DONE

    check_confirmation(yes or dry_run)
    return flags.run(body)


async def _carry_out(
    live: LiveCluster, found: Defragmentation, there: MovableCluster
) -> tuple[list[MoveResult], bool]:
    """Make the moves and report each; the first Ctrl-C lets the present one end."""
    from kvplace.cli.live_cluster import on_interrupt
    from kvplace.kube.api_cluster import ApiCluster
    from kvplace.plan.defragmentation_run import carry_out

    client = ApiCluster(live.session, component="defragment")
    stopped = False
    results: list[MoveResult] = []

    def stop() -> None:
        nonlocal stopped
        stopped = True
        say("the present move is completed; then the command ends (Ctrl-C again: at once)")

    def may_continue() -> bool:
        if not stopped:
            move = found.moves[len(results)]
            say(f"move {len(results) + 1} of {len(found.moves)}: {move.id} {_way(move)}")
        return not stopped

    pods = {name: vm.pod for name, vm in there.vms.items()}
    with on_interrupt(stop):
        async for result in carry_out(client, found.moves, pods, may_continue=may_continue):
            results.append(result)
            if result.error:
                say(f"{result.move.id} was not moved: {result.error}")
    made, left = sum(not one.error for one in results), _left(found, results)
    rest = "" if made == len(found.moves) else "; call defragment again to continue from there"
    if left:
        rest = f"; not begun: {first_of([move.id for move in left], _NAMED)}{rest}"
    say(f"{made} of {len(found.moves)} moves made{rest}")
    return results, stopped


def _left(found: Defragmentation, results: Sequence[MoveResult]) -> list[DefragmentingMove]:
    """Return the moves that were not begun."""
    return list(found.moves[len(results) :])


def _exit_code(found: Defragmentation, results: Sequence[MoveResult]) -> int:
    made = sum(not one.error for one in results)
    if made == len(found.moves):
        return ExitCode.DONE
    return ExitCode.PARTLY_DONE if made else ExitCode.FAILED


def _way(move: DefragmentingMove) -> str:
    before, after = (format_cpu_list(one.cpus | one.owned) for one in (move.before, move.after))
    if move.is_migration:
        return f"migrates from {move.node} to CPUs {after} of {move.target}"
    return f"moves from CPUs {before} to {after} of {move.node}"


def _lines(found: Defragmentation) -> Iterator[str]:
    yield from (*table_of(_columns(), found.moves), "") if found.moves else ("no move gains anything",)
    before, after = found.before, found.after
    blocks = (
        f"{domain.value} {_change(count, after.largest[domain])}" for domain, count in before.largest.items()
    )
    yield f"{'largest free blocks':<22}{', '.join(blocks)}"
    fitting = (f"{size} CPUs {_change(count, after.places[size])}" for size, count in before.places.items())
    yield f"{'VMs that would fit':<22}{', '.join(fitting)}"
    yield f"{'split VMs':<22}{_change(before.split, after.split)}"


def _change(before: int, after: int) -> str:
    return str(before) if before == after else f"{before} -> {after}"


def _columns() -> tuple[Column[DefragmentingMove], ...]:
    def place(node: str, placement: Placement) -> str:
        return f"{node}: {format_cpu_list(placement.cpus | placement.owned)}"

    def gain(move: DefragmentingMove) -> str:
        together = ["comes together"] if move.comes_together else []
        places = [f"{move.cpus_gained:+d} CPUs in places"] if move.cpus_gained else []
        return ", ".join(together + places)

    return (
        Column("VM", lambda move: move.id),
        Column("FROM", lambda move: place(move.node, move.before)),
        Column("TO", lambda move: place(move.target, move.after)),
        Column("MEMORY", lambda move: about_bytes(move.bytes_moved) if move.bytes_moved else "-"),
        Column("GAIN", gain),
    )


def _document(found: Defragmentation, results: Sequence[MoveResult], *, interrupted: str) -> dict[str, Any]:
    errors = {one.move.id: one.error for one in results}

    def room(free: FreeRoom) -> dict[str, Any]:
        return {
            "largestFreeBlocks": {domain.value: count for domain, count in free.largest.items()},
            "fittingVms": {str(size): count for size, count in free.places.items()},
            "splitVms": free.split,
        }

    def one(move: DefragmentingMove) -> dict[str, Any]:
        written: dict[str, Any] = {
            "vm": move.id,
            "node": move.node,
            "target": move.target,
            "from": format_cpu_list(move.before.cpus | move.before.owned),
            "to": format_cpu_list(move.after.cpus | move.after.owned),
            "bytes": move.bytes_moved,
            "comesTogether": move.comes_together,
            "cpusInPlaces": move.cpus_gained,
        }
        if move.id in errors:
            written["made"] = not errors[move.id]
        if errors.get(move.id):
            written["error"] = errors[move.id]
        return written

    return {
        "moves": [one(move) for move in found.moves],
        "before": room(found.before),
        "after": room(found.after),
        "complete": found.complete,
        **({"interrupted": interrupted} if interrupted else {}),
    }
