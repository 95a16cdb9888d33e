"""What a plan says, for people and for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvplace.core.answer_json import move_document, placement_document, refusal_document
from kvplace.core.cluster.cluster_node import ClusterNode
from kvplace.core.cluster.grouped_refusals import grouped
from kvplace.core.cluster.planning import Plan, RefusedVm, Tally, VmRequest
from kvplace.core.cpuset import format_cpu_list, mask_of
from kvplace.core.placement import Placement
from kvplace.core.quantity import counted, format_bytes
from kvplace.core.refusal import Reason, Refusal
from kvplace.core.strict_json import Json
from kvplace.plan.optimum import Optimum

HEADS = ("VM", "NODE", "CPUS", "NUMA")
WIDE_HEADS = (*HEADS, "SOCKETS", "L3", "EMULATOR", "MEMORY")
MOVE_SEARCH_STOPPED = "the search for moves stopped at its bound; more VMs might fit"


@dataclass(frozen=True, slots=True)
class RefusalGroup:
    """VMs of one kind that found no room, and why."""

    vms: tuple[str, ...]
    wish: str
    reason: str
    """The nodes counted by reason, each with the best of them."""
    refusals: Mapping[str, Refusal]


def refusal_groups(plan: Plan) -> list[RefusalGroup]:
    """Put VMs with equal requests together, the largest group first."""
    groups: dict[object, list[RefusedVm]] = {}
    for vm in plan.refused:
        groups.setdefault(vm.request.key, []).append(vm)
    found = [
        RefusalGroup(
            tuple(vm.id for vm in vms),
            _wish(vms[0]),
            grouped(vms[0].refusals).summary,
            vms[0].refusals,
        )
        for vms in groups.values()
    ]
    return sorted(found, key=lambda group: -len(group.vms))


def rows(plan: Plan, *, wide: bool) -> list[tuple[str, ...]]:
    """Write a line of cells for every VM that has a place."""
    return [
        (seat.id, seat.node, *(_cells(seat.placement) if wide else _cells(seat.placement)[:2]))
        for seat in plan.planned
    ]


def summary(plan: Plan, optimum: Optimum | None) -> list[tuple[str, str]]:
    """Say in titled sentences what came of a plan."""
    total = wanted(plan)
    nodes = len({seat.node for seat in plan.planned})
    lines = [
        ("placed", f"{_of(plan.placed, total)} on {counted(nodes, 'node')}"),
        ("one by one", f"{_of(plan.one_by_one, total)}, in the order given"),
    ]
    if optimum is not None:
        lines.append(("at best", bound_sentence(plan, optimum)))
    if plan.moves:
        moved = sum(one.move.bytes_moved for one in plan.moves)
        memory = f", with {_rounded(moved)} of memory to another NUMA node" if moved else ""
        lines.append(("moves", f"{counted(len(plan.moves), 'move')} of running VMs first{memory}"))
        lines += [
            ("", f"{one.node}: {one.move.id} from {_cpus(one.move.before)} to {_cpus(one.move.after)}")
            for one in plan.moves
        ]
    if not plan.moves_complete:
        lines.append(("" if plan.moves else "moves", MOVE_SEARCH_STOPPED))
    if plan.refused:
        lines.append(("refused", counted(len(plan.refused), "VM")))
        for group in refusal_groups(plan):
            more = f" and {len(group.vms) - 1} more" if len(group.vms) > 1 else ""
            lines.append(("", f"{group.vms[0]}{more} ({group.wish}): {group.reason}"))
    return lines


def bound_sentence(plan: Plan, optimum: Optimum) -> str:
    """Say how far from the best the plan can be at most."""
    bound, placed = optimum.bound, plan.placed
    moved = ", counted with running VMs where they are" if plan.moves else ""
    if placed == bound or placed.vms > bound.vms:
        return f"bound {counted(bound.vms, 'VM')}, placed {placed.vms}: no plan places more{moved}"
    ended = "" if optimum.finished else f", stopped after {optimum.seconds:.0f} s"
    if placed.vms < bound.vms:
        gap = bound.vms - placed.vms
        return f"bound {counted(bound.vms, 'VM')}, placed {placed.vms}, gap {gap}{ended}{moved}"
    gap = bound.vcpus - placed.vcpus
    return (
        f"bound {counted(bound.vms, 'VM')}, placed {placed.vms}: no plan places more; "
        f"of their vCPUs at most {bound.vcpus}, placed {placed.vcpus}, gap {gap}{ended}{moved}"
    )


def plan_document(
    plan: Plan, nodes: Sequence[ClusterNode], wanted_vms: Sequence[VmRequest], optimum: Optimum | None
) -> Json:
    """Write a plan for other programs, with the VMs that run on its nodes as they are before its moves."""
    machines = {node.name: node.topology for node in nodes}
    requests = {vm.id: vm.request for vm in wanted_vms}
    requests |= {vm.id: vm.request for node in nodes for vm in node.running}

    def seat(uid: str, node: str, placement: Placement) -> Json:
        written = placement_document(node, machines[node], requests[uid], placement, uid=uid)
        return {"id": uid, "node": node, "placement": written}

    document: Json = {
        "placed": [seat(one.id, one.node, one.placement) for one in plan.planned],
        "refused": [_refusal_group(group) for group in refusal_groups(plan)],
        "moves": [
            {"node": one.node, **move_document(one.move), **seat(one.move.id, one.node, one.move.after)}
            for one in plan.moves
        ],
        "running": [seat(vm.id, node.name, vm.placement) for node in nodes for vm in node.running],
        "summary": {
            "wanted": _tally(wanted(plan)),
            "placed": _tally(plan.placed),
            "oneByOne": _tally(plan.one_by_one),
        },
    }
    if not plan.moves_complete:
        document["moveSearch"] = MOVE_SEARCH_STOPPED
    if optimum is not None:
        document["summary"]["bound"] = {
            **_tally(optimum.bound),
            "reached": plan.placed == optimum.bound,
            "finished": optimum.finished,
            "seconds": round(optimum.seconds, 3),
        }
    return document


def wanted(plan: Plan) -> Tally:
    """Count all VMs that the plan is about."""
    vcpus = plan.placed.vcpus + sum(vm.request.vcpus for vm in plan.refused)
    return Tally(plan.placed.vms + len(plan.refused), vcpus)


def _refusal_group(group: RefusalGroup) -> Json:
    by_reason: dict[tuple[Reason, bool], list[str]] = {}
    for node, refusal in group.refusals.items():
        by_reason.setdefault((refusal.reason, refusal.never), []).append(node)
    reasons = []
    for nodes in by_reason.values():
        best = min(nodes, key=lambda node: (_missing(group.refusals[node]), node))
        reasons.append({"nodes": len(nodes), "node": best, **refusal_document(group.refusals[best])})
    return {"ids": list(group.vms), "message": group.reason, "reasons": reasons}


def _missing(refusal: Refusal) -> int:
    missing = refusal.shortfall.get("missing", 0)
    return missing if isinstance(missing, int) else 0


def _cells(placement: Placement) -> Sequence[str]:
    memory = ", ".join(f"{node}: {_rounded(count)}" for node, count in placement.memory.items())
    return (
        _cpus(placement),
        _ids(placement.numa_nodes),
        _ids(placement.packages),
        _ids(placement.l3_groups),
        format_cpu_list(placement.emulator_cpus),
        memory or "-",
    )


def _cpus(placement: Placement) -> str:
    return format_cpu_list(placement.cpus | placement.owned)


def _ids(ids: tuple[int, ...]) -> str:
    return format_cpu_list(mask_of(ids))


def _rounded(count: int) -> str:
    """Bytes as people write them, rounded up to whole MiB."""
    return format_bytes(-(-count // (1 << 20)) << 20)


def _wish(vm: RefusedVm) -> str:
    request = vm.request
    memory = f", {format_bytes(request.memory)}" if request.memory else ""
    policy = "" if request.owns_cpus else f", {request.options.policy.value}"
    return f"{counted(request.vcpus, 'vCPU')}, {request.options.scope.value}{policy}{memory}"


def _tally(counted: Tally) -> Json:
    return {"vms": counted.vms, "vcpus": counted.vcpus}


def _of(part: Tally, total: Tally) -> str:
    return f"{part.vms} of {counted(total.vms, 'VM')} with {part.vcpus} of {counted(total.vcpus, 'vCPU')}"
