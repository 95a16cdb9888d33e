"""Local search for VMs that have no node yet: an assigned VM gives up its node where more fits without it.

It ends after a bounded number of trials, which are counted and not timed, so that equal input gives equal
plans on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvplace.core.cluster.draft import Draft, Shape
from kvplace.core.cluster.greedy import assign_all, easiest_first, tightest

_MAX_EXCHANGES = 5_000
"""Assigned VMs that one call of `exchange` tries to replace: some seconds on the largest clusters."""


def exchange(draft: Draft, shapes: Sequence[Shape]) -> None:
    """Exchange assigned VMs for several that wait, or for one with more vCPUs.

    VMs that then wait are assigned where they fit, the easiest first.
    """
    waiting = draft.waiting(len(shapes))
    for vm in sorted(draft.node_of, key=lambda vm: (-shapes[vm].vcpus, vm))[:_MAX_EXCHANGES]:
        draft.step()
        if not waiting:
            break
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
    assign_all(draft, easiest_first(draft, shapes), shapes, tightest)


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
            draft.assign(one, shape, index, placement)
            entered.append(one)
        else:
            refused.add(shape)
    return entered
