"""The bounds in docs/reference/bounds.md are the bounds of the code."""

from __future__ import annotations

import re
from dataclasses import fields
from importlib import import_module

import pytest

from tests.docs.reading import page, section

SEARCH, ROOM, OFFLINE = "the search for cores", "making room", "offline searches"
PREEMPTION, SERVE, AGENT, OTHERS = "preemption", "`serve`", "the agent", "hook, commands and documents"

CODE: dict[tuple[str, str], list[str]] = {
    (SEARCH, "sets of NUMA nodes"): [
        "core.allocator.available_units:_NUMA_STEPS",
        "core.allocator.feasibility:_BUILD_STEPS",
    ],
    (SEARCH, "equally near sets"): ["core.allocator.nearest_nodes:_MOST_EQUALS"],
    (SEARCH, "lower bounds of sets"): ["core.allocator.group_knapsack:_CORE_STEPS"],
    (SEARCH, "sets for the choice of cores"): ["core.allocator.allocate:_MOST_EQUALS"],
    (SEARCH, "equally good sets"): ["core.allocator.core_choice:_MOST_TIES"],
    (SEARCH, "NUMA nodes with devices"): ["core.allocator.device_choices:MOST_NODES"],
    (ROOM, "nodes for one VM"): ["core.cluster.room_in_cluster:MOST_NODES"],
    (ROOM, "search"): [
        "core.cluster.room_in_cluster:STEPS_PER_NODE",
        "core.cluster.room_in_cluster:MOST_STEPS",
    ],
    (ROOM, "moves for one VM"): ["core.moves.make_room:MAX_MOVES"],
    (ROOM, "VMs that one replica"): ["scheduler.limits:AT_ONCE"],
    (ROOM, "all moves for one VM"): ["scheduler.limits:MOVES_S", "scheduler.limits:BOUND_AFTER_MOVES_S"],
    (ROOM, "migrations that make room"): ["scheduler.limits:MOST_PER_HOUR"],
    (ROOM, "next search for a migration"): [
        "scheduler.limits:SEARCH_S",
        "scheduler.limits:SOON_S",
    ],
    (ROOM, "a VM after any migration"): ["kube.migrations:PEACE_AFTER_MIGRATION_S"],
    (ROOM, "an evacuation"): ["scheduler.limits:EVACUATION_S"],
    (ROOM, "VMs and targets of a migration"): [
        "core.cluster.room_in_cluster:MOST_VMS",
        "core.cluster.room_in_cluster:MOST_TARGETS",
        "scheduler.limits:MOST_REFUSED",
    ],
    (ROOM, "target pod without a node"): [
        "kube.migrations:UNSCHEDULABLE_S",
        "kube.migrations:PENDING_S",
        "kube.migrations:START_S",
    ],
    (ROOM, "bind of the waiting VM after"): ["scheduler.limits:BOUND_AFTER_MIGRATION_S"],
    (ROOM, "another attempt"): ["scheduler.limits:PAUSE_S"],
    (ROOM, "a VM that has moved"): ["nodes.node_cache:PEACE_S"],
    (ROOM, "edits of one VM"): ["nodes.node_cache:PAUSE_AFTER_EDIT_S"],
    (OFFLINE, "`place --make-room`"): ["core.search_budget:MAX_STEPS", "core.moves.make_room:MAX_MOVES"],
    (OFFLINE, "the same with `--thorough`"): ["core.search_budget:MAX_STEPS_THOROUGH"],
    (OFFLINE, "targets of a moving VM"): [
        "core.moves.targets:_MAX_NODE_SETS",
        "core.moves.make_room:_MAX_EQUALS",
    ],
    (OFFLINE, "suggestions"): ["core.moves.suggestions:_MAX_VCPU_TRIALS"],
    (OFFLINE, "`plan`"): ["core.cluster.assignment_heuristics:_MAX_EXCHANGES"],
    (OFFLINE, "`plan --make-room`"): [
        "core.cluster.room_in_cluster:_MAX_PLANNED_NODES",
        "core.cluster.room_in_cluster:_MAX_TOTAL_STEPS",
    ],
    (OFFLINE, "`simulate` with moves"): ["simulate.simulated_cluster:_MOST_NODES_SEARCHED_FOR_MOVES"],
    (PREEMPTION, "one call"): ["scheduler.limits:VICTIM_NODES", "scheduler.limits:VICTIM_SEARCH_S"],
    (PREEMPTION, "one node"): [
        "core.cluster.victim_search:MAX_PLACEMENTS",
        "core.cluster.victim_search:MAX_STEPS",
    ],
    (PREEMPTION, "equally cheap victims"): [
        "core.cluster.victim_search:MAX_EQUALS",
        "scheduler.limits:EQUAL_NODES",
    ],
    (PREEMPTION, "wait for VMs"): ["scheduler.limits:LEAVING_S"],
    (PREEMPTION, "reservation of what victims"): ["core.claim_changes:RESERVED_S"],
    (SERVE, "hold between"): ["scheduler.extender:ExtenderSettings.hold_seconds"],
    (SERVE, "pods planned together"): ["scheduler.joint_plan:TOGETHER"],
    (SERVE, "wait of Filter"): ["scheduler.joint_plan:GATHER_S", "scheduler.joint_plan:_PATIENCE_S"],
    (SERVE, "ledger changes in a burst"): ["kube.ledgers:ENOUGH"],
    (SERVE, "queued events"): ["kube.events:_UNWRITTEN"],
    (SERVE, "object, page"): [
        "kube.session:ANSWER_LIMIT",
        "kube.session:PAGE_LIMIT",
        "kube.session:LINE_LIMIT",
    ],
    (SERVE, "AdmissionReview"): ["admission.http:MAX_BODY_BYTES", "admission.pod:MAX_CONTAINERS"],
    (SERVE, "extender call"): [
        "scheduler.extender_protocol:MAX_BODY",
        "scheduler.extender_protocol:MAX_NODES",
    ],
    (SERVE, "HTTP/2 calls"): ["scheduler.listener:MAX_STREAMS", "scheduler.listener:MAX_IDLE_FRAMES"],
    (SERVE, "connections of a listener"): ["service.connections:ConnectionLimits.connections"],
    (AGENT, "pods and containers"): ["nri.plugin:MAX_SYNCHRONIZED"],
    (AGENT, "repairs of one VM"): ["agent.back_off:MOST_REPAIRS"],
    (AGENT, "cpuset that the kernel"): ["agent.cpuset_keeper:SET_AGAIN_S"],
    (AGENT, "devices of one container"): ["agent.devices:MOST_GIVEN"],
    (AGENT, "threads that do not follow"): ["agent.pinning_guard:REVISION_WITHIN_S"],
    (AGENT, "threads of one QEMU"): [
        "agent.node_plan:THREADS_BESIDE_VCPUS",
        "agent.pinning_sweep:MOST_PROCESSES",
    ],
    (AGENT, "answer of a pod's libvirt"): [
        "agent.libvirt_pins:ANSWER_WITHIN_S",
        "libvirt.pinning_process:MOST_MEMORY",
    ],
    (AGENT, "status writes"): ["kube.object_records:MAX_PODS"],
    (AGENT, "pod deleted by force"): ["controller.reconciler:SILENCE_S"],
    (OTHERS, "domain XML"): ["core.protobuf:MAX_MESSAGE_BYTES"],
    (OTHERS, "hook: clients"): [
        "hook.server:MAX_CLIENTS",
        "hook.server:MAX_CHILDREN",
        "hook.process:TIME_LIMIT_S",
    ],
    (OTHERS, "rollout: VM without"): ["rollout.run:_PATIENCE_S", "rollout.run:_AT_ONCE"],
    (OTHERS, "nodes; requests"): [
        "documents.cluster:MOST_NODES",
        "documents.request:MOST_VMS",
        "documents.cluster:MOST_REQUESTS",
    ],
    (OTHERS, "`place`: one line"): [
        "cli.place_session:MAX_LINE_BYTES",
        "cli.claims_by_node:_MAX_BYTES",
    ],
}
"""By the section and the beginning of the row: the constants of its second cell, in their order."""


def number(constant: str) -> str:
    """Write a constant as the page does: with commas, and bytes in MiB."""
    module, _, name = constant.partition(":")
    owner, _, field = name.partition(".")
    value = getattr(import_module(f"kvplace.{module}"), owner)
    if field:
        (value,) = (one.default for one in fields(value) if one.name == field)
    mebibytes, rest = divmod(value, 1 << 20)
    return f"{int(mebibytes if mebibytes and not rest else value):,}"


def rows() -> dict[tuple[str, str], str]:
    """The second cell of each row, by the section and the first cell."""
    found = {}
    for name in (SEARCH, ROOM, OFFLINE, PREEMPTION, SERVE, AGENT, OTHERS):
        for line in section(page("reference/bounds.md"), f"Bounds of {name}").splitlines():
            if line.startswith("| ") and not line.startswith("| bound |"):
                first, second, *_ = (cell.strip() for cell in line.strip().strip("|").split("|"))
                found[name, first] = second
    return found


ROWS = rows()


@pytest.mark.parametrize("row", CODE, ids=": ".join)
def test_a_bound_is_that_of_the_code(row: tuple[str, str]) -> None:
    where, beginning = row
    (size,) = (size for (name, first), size in ROWS.items() if name == where and first.startswith(beginning))
    numbers = iter(re.findall(r"\d+(?:,\d{3})*", size))
    missing = [constant for constant in CODE[row] if number(constant) not in numbers]
    assert missing == [], size
