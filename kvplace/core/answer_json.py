"""Answers about one VM in the JSON form that every command writes: a stable interface for programs."""

from __future__ import annotations

from kvplace.core.cpu_map import cpu_map_of
from kvplace.core.cpuset import format_cpu_list
from kvplace.core.moves.make_room import Move
from kvplace.core.moves.suggestions import NO_SUGGESTIONS, Suggestion, Suggestions
from kvplace.core.placement import Placement, PodPlacement, Refusal
from kvplace.core.request import Request
from kvplace.core.scalars import NodeName, PodUid
from kvplace.core.strict_json import Json
from kvplace.core.topology import Topology


def placement_document(
    machine: str, topology: Topology, request: Request, placement: Placement, *, uid: str = ""
) -> Json:
    """Write a placement: the annotation `kvplace.io/placement` of a pod of that UID, and where it lies."""
    bound = PodPlacement(
        PodUid(uid),
        NodeName(machine),
        topology.fingerprint,
        request.options.on_failure,
        placement,
        device_numa=request.options.device_numa,
    )
    document = bound.document()
    document["cpuMap"] = cpu_map_of(topology, placement.cpus_in_order)
    return document


def refusal_document(refusal: Refusal, suggestions: Suggestions = NO_SUGGESTIONS) -> Json:
    """Write a refusal with its numbers, and with the changes that would make the VM fit."""
    document: Json = {
        "reason": refusal.reason.value,
        "message": refusal.message,
        "shortfall": dict(refusal.shortfall),
        "never": refusal.never,
    }
    if suggestions.found:
        document["suggestions"] = [suggestion_document(suggestion) for suggestion in suggestions.found]
    if suggestions.no_moves is not None and not suggestions.no_moves.exact:
        document["searchStopped"] = suggestions.no_moves.sentence
    return document


def suggestion_document(suggestion: Suggestion) -> Json:
    """Write a suggestion: the key that changes and what it would have to state, or the moves."""
    document: Json = {"change": suggestion.field, "message": suggestion.sentence}
    if suggestion.moves:
        document["moves"] = [move_document(move) for move in suggestion.moves]
    else:
        document["value"] = suggestion.value
    return document


def move_document(move: Move) -> Json:
    """Write a move: all CPUs that a VM holds before and after it."""
    return {
        "id": move.id,
        "from": format_cpu_list(move.before.cpus | move.before.owned),
        "to": format_cpu_list(move.after.cpus | move.after.owned),
        "bytes": move.bytes_moved,
    }
