"""An explanation in JSON for programs; the keys are a stable interface."""

from __future__ import annotations

from typing import Any

from kvplace.core.cpuset import format_cpu_list
from kvplace.core.moves.suggestions import refusal_document, suggestion_document
from kvplace.core.placement import placement_document
from kvplace.core.request_json import request_document
from kvplace.core.strict_json import Json
from kvplace.explain.explanation import Explanation, Fitting, Seat
from kvplace.nodes.node_machine import NodeMachine
from kvplace.nodes.view_output import devices_document

_SHOWN_CANDIDATES = 10


def explanation_document(found: Explanation) -> Json:
    """Write an explanation."""
    document: Json = {
        "kind": found.kind,
        "namespace": found.namespace,
        "name": found.name,
        "state": found.state,
        "request": None if found.request is None else request_document(found.request.request),
        "notes": list(found.notes),
    }
    if found.fitting is not None and found.request is not None:
        document["fits"] = _fitting(found.fitting, found)
    if found.seats:
        document["pods"] = [_seat(seat) for seat in found.seats]
    document["events"] = [
        {"time": one.when, "about": one.about, "reason": one.reason, "note": one.note, "count": one.count}
        for one in found.events
    ]
    return document


def _fitting(fitting: Fitting, found: Explanation) -> Json:
    assert found.request is not None
    request = found.request.request
    return {
        "nodes": fitting.nodes,
        "candidates": len(fitting.candidates),
        "best": [
            {
                "node": one.node,
                "placement": placement_document(one.node, one.fit.topology, request, one.placement),
            }
            for one in fitting.candidates[:_SHOWN_CANDIDATES]
        ],
        "obstacles": [
            {"message": one.sentence, "nodes": list(one.nodes), "wouldFit": list(one.would_fit)}
            for one in fitting.obstacles
        ],
        "refusals": [
            {
                **refusal_document(group.refusal),
                "message": group.text,
                "best": group.best,
                "nodes": sorted(group.nodes),
            }
            for group in fitting.refusals.groups
        ],
        "suggestions": [
            {
                "node": one_node.node,
                "missing": one_node.refusal.message,
                "changes": [suggestion_document(one) for one in one_node.suggestions.found],
                "needMovable": list(one_node.need_movable),
            }
            for one_node in fitting.suggestions
        ],
    }


def _seat(seat: Seat) -> Json:
    vm, node = seat.vm, seat.node
    document: Json = {"pod": vm.pod.name, "uid": vm.pod.uid, "node": vm.node, "state": vm.state.value}
    if vm.placement is not None:
        document["placement"] = vm.placement.document()
        if isinstance(node.machine, NodeMachine):
            document["sameMachine"] = vm.placement.topology in ("", node.machine.topology.fingerprint)
    if vm.devices is not None:
        document["devices"] = devices_document(vm.devices)
    document["unclaimed"] = format_cpu_list(seat.unclaimed)
    document["nodeReady"] = seat.is_ready
    document["relocating"] = seat.is_relocating
    document["pinned"] = _pinned(seat)
    document["neighbours"] = [
        {
            "namespace": one.claim.namespace,
            "pod": one.claim.pod,
            "vmi": one.claim.vmi,
            "policy": one.claim.policy.value,
            "shares": one.nearness.name.lower(),
            "cpus": format_cpu_list(one.shared),
        }
        for one in seat.neighbours
    ]
    return document


def _pinned(seat: Seat) -> dict[str, Any] | None:
    condition, report = seat.vm.pinned, seat.report
    if condition is None and report is None:
        return None
    found: dict[str, Any] = {}
    if condition is not None:
        found |= {
            "status": condition.status,
            "reason": condition.reason,
            "message": condition.message,
            "since": seat.measured_since,
        }
    if report is not None:
        found |= {
            "revision": report.revision,
            "cpus": format_cpu_list(report.cpus),
            "drift": report.drift,
            "failedRevision": report.failed_revision,
        }
    return found
