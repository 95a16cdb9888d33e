"""Finding seats for VMs that found none: others change theirs, or give them up.

`let_in` keeps everybody in: a planned VM leaves its seat for another one, which may push out a third.
Chains are short and looked for in order of promise. `trade` takes a VM's seat away where more, or larger,
ones of those waiting find room for it. Both end after a bounded number of trials, which are counted and
not timed: equal input gives equal seats on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvplace.core.cluster.draft import Draft, NodeState, Shape
from kvplace.core.cluster.greedy import hardness, tightest

LONGEST_CHAIN = 3
"""Most VMs that change seats for one that enters."""
_WIDTHS = (32, 12, 6)
"""How many VMs are tried at one link of a chain, by how many may still have to move."""
_TRIALS = 600


def let_in(draft: Draft, shapes: Sequence[Shape]) -> None:
    """Seat as many as possible of the VMs that have no seat, the easiest first; nobody loses one."""
    chains = _Chains(shapes)
    hard = hardness(draft, shapes)
    left = sorted(draft.waiting(len(shapes)), key=lambda vm: (hard[shapes[vm]], vm))
    progress = True
    while left and progress:
        progress = False
        failed: set[Shape] = set()
        for vm in list(left):
            if shapes[vm] in failed:
                continue
            if chains.seat(draft, vm):
                left.remove(vm)
                progress = True
            else:
                failed.add(shapes[vm])


def trade(draft: Draft, shapes: Sequence[Shape]) -> None:
    """Let VMs give up their seats where more of those waiting find room for it, or one with more vCPUs."""
    for vm in sorted(draft.seats, key=lambda vm: (-shapes[vm].vcpus, vm)):
        waiting = draft.waiting(len(shapes))
        for order in (
            sorted(waiting, key=lambda one: (shapes[one].vcpus, one)),
            sorted(waiting, key=lambda one: (-shapes[one].vcpus, one)),
        ):
            trial = draft.copy()
            entered = _take_over(trial, vm, order, shapes)
            if (len(entered), sum(shapes[one].vcpus for one in entered)) > (1, shapes[vm].vcpus):
                draft.become(trial)
                break


def _take_over(draft: Draft, vm: int, order: Sequence[int], shapes: Sequence[Shape]) -> list[int]:
    """Unseat a VM and seat those that find room on its node then, in an order."""
    index = draft.seats[vm]
    draft.unseat(vm)
    entered: list[int] = []
    refused = {shapes[vm]}
    for one in order:
        shape, node = shapes[one], draft.nodes[index]
        if shape in refused:
            continue
        answer = node.ask(shape) if node.fitting(shape) else None
        if answer is not None:
            draft.seat(one, index, answer)
            entered.append(one)
        else:
            refused.add(shape)
    return entered


class _Chains:
    """The search for chains, with the trials that it has left."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self._shapes = shapes
        self._left = _TRIALS
        self._ways_of: dict[tuple[NodeState, Shape], list[tuple[int, int, int]]] = {}

    def seat(self, draft: Draft, vm: int) -> bool:
        """Seat one VM, by the shortest chain that does it."""
        shape = self._shapes[vm]
        spot = tightest(draft, shape)
        if spot is not None:
            draft.seat(vm, *spot)
            return True
        free = sum(node.free.cpus.bit_count() for node in draft.nodes)
        if shape.request.owns_cpus and free < shape.vcpus:
            return False
        for length in range(1, LONGEST_CHAIN + 1):
            found = self._chain(draft, vm, length, frozenset({vm}))
            if found is not None:
                draft.become(found)
                return True
        return False

    def _chain(self, draft: Draft, vm: int, length: int, moved: frozenset[int]) -> Draft | None:
        shape = self._shapes[vm]
        for index, other in self._ways(draft, shape, length, moved):
            if self._left <= 0:
                return None
            self._left -= 1
            trial = draft.copy()
            trial.unseat(other)
            answer = trial.nodes[index].ask(shape)
            if answer is None:
                continue
            trial.seat(vm, index, answer)
            spot = tightest(trial, self._shapes[other])
            if spot is not None:
                trial.seat(other, *spot)
                return trial
            if length > 1:
                further = self._chain(trial, other, length - 1, moved | {other})
                if further is not None:
                    return further
        return None

    def _ways(self, draft: Draft, shape: Shape, length: int, moved: frozenset[int]) -> list[tuple[int, int]]:
        """(node, VM there) whose going would make room as far as counts can tell, the best first.

        The last to move must find room as things are; before it only smaller ones make the way shorter.
        """
        finds_room: dict[Shape, bool] = {}
        ways: list[tuple[int, int, int, int]] = []
        for index, node in enumerate(draft.nodes):
            known = self._ways_of.get((node, shape))
            if known is None:
                known = self._ways_of[node, shape] = self._ways_on(node, shape)
            for vcpus, slack, other in known:
                theirs = self._shapes[other]
                if theirs not in finds_room:
                    finds_room[theirs] = any(one.fitting(theirs) for one in draft.nodes)
                if finds_room[theirs] or (length > 1 and vcpus <= shape.vcpus):
                    ways.append((vcpus, slack, index, other))
        ways.sort()
        return [(index, other) for _, _, index, other in ways if other not in moved][: _WIDTHS[length - 1]]

    def _ways_on(self, node: NodeState, shape: Shape) -> list[tuple[int, int, int]]:
        """(vCPUs, fewest CPUs left over in a domain that is large enough then, VM) of those on one node."""
        found = []
        for vm, placement in node.seated.items():
            theirs = self._shapes[vm]
            if theirs is shape:
                continue
            given_back = placement.owned if shape.request.owns_cpus else 0
            slacks = [
                slack
                for room in node.rooms(shape)
                if (slack := room.count + (given_back & room.cpus).bit_count() - shape.vcpus) >= 0
                and (room.memory is None or room.memory + theirs.memory >= shape.memory)
            ]
            if slacks:
                found.append((theirs.vcpus, min(slacks), vm))
        return found
