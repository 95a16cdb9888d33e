"""Which VMs need `kvplace.io/movable` before running VMs make room, as their pods were made with it.

`serve` moves no other VM. So every command that suggests or plans a move names the VMs that are still to be
written, in the same words.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvplace.core.annotations import MOVABLE
from kvplace.nodes.cluster_view import VmView


def agrees(vm: VmView | None) -> bool:
    """Whether the owner of a VM had agreed to moves when its pod was made."""
    return vm is not None and vm.request is not None and vm.request.movable


def agreement_needed(names: Iterable[str]) -> str:
    """State in one clause which VMs need the annotation for a move; empty where all have it."""
    needed = sorted(set(names))
    if not needed:
        return ""
    return f'for that {_listed(needed)} {"needs" if len(needed) == 1 else "need"} {MOVABLE}: "true"'


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
