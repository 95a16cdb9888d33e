"""Answers of nodes in some states to requests, remembered longer than the nodes stay in these states.

VMs of one size fill equal machines alike: each machine goes through the states that others have been in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from kvplace.core.cluster.node_choice import Fit
from kvplace.core.refusal import Refusal
from kvplace.core.request import Request
from kvplace.nodes.node_answer import answer_of
from kvplace.nodes.node_machine import NodeSnapshot

_REMEMBERED = 4096
"""Answers, of about 2 KB each; the least recently used is forgotten first."""


@dataclass(frozen=True, slots=True)
class _Question:
    """A request to a node; equal for equal requests to nodes in equal states."""

    state: tuple[object, ...]
    asked: tuple[object, ...]
    node: NodeSnapshot = field(compare=False)
    request: Request = field(compare=False)


class RememberedAnswers:
    """Answers by what they depend on."""

    def __init__(self) -> None:
        self._answer = lru_cache(maxsize=_REMEMBERED)(_answer)

    def of(self, node: NodeSnapshot, request: Request) -> Fit | Refusal:
        """Return what a node in this state gives to a VM, or why it does not fit."""
        return self._answer(_Question(node.key, request.key, node, request))


def _answer(question: _Question) -> Fit | Refusal:
    return answer_of(question.node, question.request)
