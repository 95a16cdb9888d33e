"""Local search for VMs that have no node yet: other planned VMs change their nodes, or give them up.

`insert_waiting` keeps every assigned VM assigned. It looks for ejection chains: a VM leaves its node for the
one that waits, and may push out a third one elsewhere. `exchange` takes a VM off its node where several of
those that wait fit instead, or a larger one. Both end after a bounded number of trials, which are counted and
not timed, so that equal input gives equal plans on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvplace.core.cluster.draft import Draft, DraftNode, Shape
from kvplace.core.cluster.greedy import difficulty, tightest

MAX_CHAIN = 3
"""Most VMs that change nodes for one that is inserted."""
_WIDTHS = (32, 12, 6)
"""How many VMs are tried at one link of a chain, by how many may still have to move."""
_MAX_TRIALS = 600
"""Trials of one call of `insert_waiting`: a fraction of a second."""
_MAX_EXCHANGES = 5_000
"""Assigned VMs for which one call of `exchange` looks for others: some seconds on the largest clusters."""


def insert_waiting(draft: Draft, shapes: Sequence[Shape]) -> None:
    """Assign as many as possible of the VMs that wait, the easiest first; no VM loses its node for good."""
    chains = _EjectionChains(shapes)
    hard = difficulty(draft, shapes)
    left = sorted(draft.waiting(len(shapes)), key=lambda vm: (hard[shapes[vm]], vm))
    progress = True
    while left and progress:
        progress = False
        failed: set[Shape] = set()
        for vm in list(left):
            if shapes[vm] in failed:
                continue
            if chains.insert(draft, vm):
                left.remove(vm)
                progress = True
            else:
                failed.add(shapes[vm])


def exchange(draft: Draft, shapes: Sequence[Shape]) -> None:
    """Exchange assigned VMs for several that wait, or for one with more vCPUs."""
    waiting = draft.waiting(len(shapes))
    for vm in sorted(draft.node_of, key=lambda vm: (-shapes[vm].vcpus, vm))[:_MAX_EXCHANGES]:
        if not waiting:
            return
        for order in (
            sorted(waiting, key=lambda one: (shapes[one].vcpus, one)),
            sorted(waiting, key=lambda one: (-shapes[one].vcpus, one)),
        ):
            trial = draft.copy()
            entered = _take_over(trial, vm, order, shapes)
            if (len(entered), sum(shapes[one].vcpus for one in entered)) > (1, shapes[vm].vcpus):
                draft.become(trial)
                waiting = draft.waiting(len(shapes))
                break


def _take_over(draft: Draft, vm: int, order: Sequence[int], shapes: Sequence[Shape]) -> list[int]:
    """Take a VM off its node, and assign those to it that fit there then, in an order."""
    index = draft.node_of[vm]
    draft.unassign(vm)
    entered: list[int] = []
    refused = {shapes[vm]}
    for one in order:
        shape, node = shapes[one], draft.nodes[index]
        if shape in refused:
            continue
        placement = node.place(shape) if node.fitting(shape) else None
        if placement is not None:
            draft.assign(one, index, placement)
            entered.append(one)
        else:
            refused.add(shape)
    return entered


class _EjectionChains:
    """The search for chains, with the trials that are left."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self._shapes = shapes
        self._left = _MAX_TRIALS
        self._links_of: dict[tuple[DraftNode, Shape], list[tuple[int, int, int]]] = {}

    def insert(self, draft: Draft, vm: int) -> bool:
        """Assign one VM, by the shortest chain that does it."""
        shape = self._shapes[vm]
        choice = tightest(draft, shape)
        if choice is not None:
            draft.assign(vm, *choice)
            return True
        free = sum(node.free.cpus.bit_count() for node in draft.nodes)
        if shape.request.owns_cpus and free < shape.vcpus:
            return False
        for length in range(1, MAX_CHAIN + 1):
            found = self._chain(draft, vm, length, frozenset({vm}))
            if found is not None:
                draft.become(found)
                return True
        return False

    def _chain(self, draft: Draft, vm: int, length: int, moved: frozenset[int]) -> Draft | None:
        shape = self._shapes[vm]
        for index, other in self._links(draft, shape, length, moved):
            if self._left <= 0:
                return None
            self._left -= 1
            trial = draft.copy()
            trial.unassign(other)
            placement = trial.nodes[index].place(shape)
            if placement is None:
                continue
            trial.assign(vm, index, placement)
            choice = tightest(trial, self._shapes[other])
            if choice is not None:
                trial.assign(other, *choice)
                return trial
            if length > 1:
                further = self._chain(trial, other, length - 1, moved | {other})
                if further is not None:
                    return further
        return None

    def _links(self, draft: Draft, shape: Shape, length: int, moved: frozenset[int]) -> list[tuple[int, int]]:
        """(node, VM there) that would free enough by counts, the best first.

        The last VM of a chain must fit elsewhere as things are; before it only smaller ones shorten the way.
        """
        fits_elsewhere: dict[Shape, bool] = {}
        links: list[tuple[int, int, int, int]] = []
        for index, node in enumerate(draft.nodes):
            known = self._links_of.get((node, shape))
            if known is None:
                known = self._links_of[node, shape] = self._links_on(node, shape)
            for vcpus, slack, other in known:
                theirs = self._shapes[other]
                if theirs not in fits_elsewhere:
                    fits_elsewhere[theirs] = any(one.fitting(theirs) for one in draft.nodes)
                if fits_elsewhere[theirs] or (length > 1 and vcpus <= shape.vcpus):
                    links.append((vcpus, slack, index, other))
        links.sort()
        return [(index, other) for _, _, index, other in links if other not in moved][: _WIDTHS[length - 1]]

    def _links_on(self, node: DraftNode, shape: Shape) -> list[tuple[int, int, int]]:
        """(vCPUs, fewest CPUs left over in a scope domain that is large enough then, VM) on one node."""
        found = []
        for vm, placement in node.planned.items():
            theirs = self._shapes[vm]
            if theirs is shape:
                continue
            given_back = placement.owned if shape.request.owns_cpus else 0
            slacks = [
                slack
                for headroom in node.headrooms(shape)
                if (slack := headroom.count + (given_back & headroom.cpus).bit_count() - shape.vcpus) >= 0
                and (headroom.memory is None or headroom.memory + theirs.memory >= shape.memory)
            ]
            if slacks:
                found.append((theirs.vcpus, min(slacks), vm))
        return found
