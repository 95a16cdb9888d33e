"""The input and the answer of a plan: the nodes and VMs in documents, and the plan as sentences and as JSON.

    {"id": "db", "vcpus": 8, "cpuSet": "one-numa", "memory": "32Gi"}
    {"id": "web", "vcpus": 2, "count": 20}

The VMs are JSON lines, or a list in JSON or YAML. A VM without an id is named by its position: request-1,
request-2, ...
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from kvplace.core.cluster.draft import OPEN, ClosedNodes
from kvplace.core.cluster.node_choice import GroupedRefusals, grouped
from kvplace.core.cluster.planning import Plan, RefusedVm, Tally, VmRequest
from kvplace.core.cpuset import format_cpu_list
from kvplace.core.errors import BadBody
from kvplace.core.moves.suggestions import move_document, refusal_document
from kvplace.core.occupant import ClusterNode
from kvplace.core.placement import Placement, placement_document
from kvplace.core.quantity import counted, first_of, format_bytes
from kvplace.core.request import Request
from kvplace.core.scalars import NodeName
from kvplace.core.strict_json import Json, json_object
from kvplace.documents.cluster import CLUSTER_EXAMPLE, ClusterDocument
from kvplace.documents.model import numbered, read_model
from kvplace.documents.reading import read_document, read_value
from kvplace.documents.request import MOST_VMS, RequestedVms, RequestsDocument
from kvplace.kube.node_filters import PodDemands, demands_of
from kvplace.machines.cluster import load_cluster, nodes_of
from kvplace.nodes.cluster_view import agreement_needed

ClosedTo: TypeAlias = Callable[[PodDemands], ClosedNodes]


def vm_requests_of(
    text: str, what: str, running: Iterable[str] = (), closed_to: ClosedTo | None = None
) -> tuple[VmRequest, ...]:
    """Read requests from a text; raises BadBody that names the place in `what`.

    `running` are the ids of VMs that run already. `closed_to` names the nodes of a live cluster that VMs
    with certain demands never go; other nodes have no labels and taints, so a request may then demand
    nothing.
    """
    found: dict[str, VmRequest] = {}
    known = set(running)
    closed: dict[str, ClosedNodes] = {}
    for number, (where, vms) in enumerate(_entries(text, what), start=1):
        demands = vms.demands
        if demands and closed_to is None:
            raise BadBody(
                f"{where}: {next(iter(demands))} needs the labels and taints of a live cluster; plan with "
                "--live, or leave it out"
            )
        key = json.dumps(demands, sort_keys=True)
        if key not in closed:
            closed[key] = OPEN if closed_to is None else closed_to(demands_of(demands, where))
        for name in numbered(vms.id or f"request-{number}", vms.count):
            if name in known:
                raise BadBody(f"{where}: a VM {name!r} runs in the cluster already; use another id")
            if name in found:
                raise BadBody(f"{where}: duplicate VM id {name!r}")
            found[name] = VmRequest(name, vms.request, closed[key])
        if len(found) > MOST_VMS:
            raise BadBody(f"{what} contains more than {MOST_VMS} VMs; plan fewer at once")
    if not found:
        raise BadBody(f'{what} contains no requests; write one per line, for example {{"vcpus": 8}}')
    return tuple(found.values())


def _entries(text: str, what: str) -> Iterator[tuple[str, RequestedVms]]:
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        return
    if _is_request(lines[0][1]):
        for number, line in lines:
            where = f"{what}: line {number}"
            yield where, read_model(RequestedVms, json_object(line, what=where, like='{"vcpus": 8}'), where)
        return
    content = read_value(text, what)
    document = {"requests": content} if isinstance(content, list) else content
    for number, vms in enumerate(read_model(RequestsDocument, document, what).requests):
        yield f"{what}: requests[{number}]", vms


def _is_request(line: str) -> bool:
    """Whether the first line is a request by itself; else the text is one document."""
    try:
        return line.lstrip().startswith("{") and "requests" not in json_object(line, what="")
    except BadBody:
        # A request with a mistake; with its line, the mistake can be named.
        return line.strip().startswith("{") and line.rstrip().endswith("}")


def read_plan_cluster(path: str | None) -> tuple[ClusterNode, ...]:
    """Read the nodes of a cluster, None for the example; raises BadBody that names file and key."""
    if path is not None:
        return load_cluster(Path(path))
    what = "the example cluster"
    return nodes_of(read_model(ClusterDocument, read_document(CLUSTER_EXAMPLE, what), what), Path())


INTERRUPTED = "the search was interrupted; a longer one may place more VMs"
MOVE_SEARCH_STOPPED = "the search for moves stopped at its bound; more VMs might fit"


@dataclass(frozen=True, slots=True)
class RefusedVms:
    """Refused VMs with equal requests."""

    ids: tuple[str, ...]
    request: Request
    reasons: GroupedRefusals
    """The nodes by the reason of their refusal."""


def refused_vms(plan: Plan) -> list[RefusedVms]:
    """Group the refused VMs that have the same request and reasons, the largest group first."""
    groups: dict[object, list[RefusedVm]] = {}
    for vm in plan.refused:
        groups.setdefault((vm.request.key, id(vm.refusals)), []).append(vm)
    found = [
        RefusedVms(tuple(vm.id for vm in vms), vms[0].request, grouped(vms[0].refusals))
        for vms in groups.values()
    ]
    return sorted(found, key=lambda group: -len(group.ids))


def plan_summary(plan: Plan, need_movable: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Give titled sentences about the plan; `need_movable`: VMs that must opt in to its moves."""
    total = requested(plan)
    nodes = len({vm.node for vm in plan.planned})
    lines = [
        ("placed", f"{_of(plan.placed, total)} on {counted(nodes, 'node')}"),
        ("one by one", f"{_of(plan.one_by_one, total)}, in the order given"),
    ]
    if plan.moves:
        moved = sum(one.move.bytes_moved for one in plan.moves)
        memory = f", with {whole_mib(moved)} of memory to another NUMA node" if moved else ""
        lines.append(("moves", f"{counted(len(plan.moves), 'move')} of running VMs first{memory}"))
        lines += [
            ("", f"{one.node}: {one.move.id} from {_cpus(one.move.before)} to {_cpus(one.move.after)}")
            for one in plan.moves
        ]
        if need_movable:
            lines.append(("", agreement_needed(need_movable)))
    if not plan.moves_complete:
        lines.append(("" if plan.moves else "moves", MOVE_SEARCH_STOPPED))
    if plan.stopped:
        lines.append(("interrupted", INTERRUPTED))
    if plan.undecided:
        lines.append(("undecided", f"{counted(len(plan.undecided), 'VM')} that fit, not yet placed"))
    if plan.refused:
        lines.append(("refused", counted(len(plan.refused), "VM")))
        for group in refused_vms(plan):
            sentence = f"{first_of(group.ids, 1)} ({_short(group.request)}): {group.reasons.summary}"
            lines.append(("", sentence))
    return lines


def plan_document(
    plan: Plan,
    nodes: Sequence[ClusterNode],
    requests: Sequence[VmRequest],
    need_movable: Sequence[str] = (),
) -> Json:
    """Write a plan as JSON; `running`: the VMs before the moves; `need_movable` as in `plan_summary`."""
    machines = {node.name: node.topology for node in nodes}
    request_of = {vm.id: vm.request for vm in requests}
    request_of |= {vm.id: vm.request for node in nodes for vm in node.running}

    def placed(uid: str, node: NodeName, placement: Placement) -> Json:
        written = placement_document(node, machines[node], request_of[uid], placement, uid=uid)
        return {"id": uid, "node": node, "placement": written}

    document: Json = {
        "placed": [placed(vm.id, vm.node, vm.placement) for vm in plan.planned],
        "refused": [_refused_document(group) for group in refused_vms(plan)],
        "moves": [
            {"node": one.node, **move_document(one.move), **placed(one.move.id, one.node, one.move.after)}
            for one in plan.moves
        ],
        "running": [placed(vm.id, node.name, vm.placement) for node in nodes for vm in node.running],
        "summary": {
            "wanted": _tally(requested(plan)),
            "placed": _tally(plan.placed),
            "oneByOne": _tally(plan.one_by_one),
        },
    }
    if need_movable:
        document["needMovable"] = list(need_movable)
    if not plan.moves_complete:
        document["searchStopped"] = MOVE_SEARCH_STOPPED
    if plan.stopped:
        document["interrupted"] = INTERRUPTED
        document["undecided"] = [vm.id for vm in plan.undecided]
    return document


def requested(plan: Plan) -> Tally:
    """Count all VMs of a plan, placed and refused."""
    others = [vm.request.vcpus for vm in plan.refused] + [vm.request.vcpus for vm in plan.undecided]
    return Tally(plan.placed.vms + len(others), plan.placed.vcpus + sum(others))


def _refused_document(vms: RefusedVms) -> Json:
    reasons = [
        {"nodes": len(group.nodes), "node": group.best, **refusal_document(group.refusal)}
        for group in vms.reasons.groups
    ]
    return {"ids": list(vms.ids), "message": vms.reasons.summary, "reasons": reasons}


def _cpus(placement: Placement) -> str:
    return format_cpu_list(placement.cpus | placement.owned)


def whole_mib(count: int) -> str:
    """Write bytes, rounded up to whole MiB."""
    return format_bytes(-(-count // (1 << 20)) << 20)


def _short(request: Request) -> str:
    memory = f", {format_bytes(request.memory)}" if request.memory else ""
    policy = "" if request.owns_cpus else f", {request.options.policy.value}"
    return f"{counted(request.vcpus, 'vCPU')}, {request.options.scope.value}{policy}{memory}"


def _tally(tally: Tally) -> Json:
    return {"vms": tally.vms, "vcpus": tally.vcpus}


def _of(part: Tally, total: Tally) -> str:
    return f"{part.vms} of {counted(total.vms, 'VM')} with {part.vcpus} of {counted(total.vcpus, 'vCPU')}"
