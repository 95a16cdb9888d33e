"""A node's answer to a request: Filter, Bind and `explain` ask the same question."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from kvplace.core.allocator.allocate import place, try_place
from kvplace.core.cluster.node_choice import Fit
from kvplace.core.ledger import Ledger
from kvplace.core.refusal import Refusal
from kvplace.core.request import Request
from kvplace.nodes.node_machine import NodeMachine, NodeSnapshot


def answer_of(node: NodeSnapshot, request: Request) -> Fit | Refusal:
    """State what a node in this state gives to a VM, or why it does not fit."""
    machine = node.machine
    answer = place(machine.topology, node.free, request)
    if not isinstance(answer, Refusal):
        return Fit.of(machine.topology, node.free, request, answer)
    # The allocator takes the whole machine for empty; a node may give out less of it.
    if machine.is_narrowed and not _fits_empty(machine, request):
        return replace(answer, never=True)
    return answer


@lru_cache(maxsize=4096)
def _fits_empty(machine: NodeMachine, request: Request) -> bool:
    return try_place(machine.topology, machine.free(Ledger()), request) is not None
