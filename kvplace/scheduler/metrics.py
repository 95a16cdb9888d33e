"""The metrics of the extender."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

FILTERS = Histogram("kvplace_extender_filter_seconds", "Time to answer a Filter call.", buckets=_SECONDS)
PRIORITIZES = Histogram(
    "kvplace_extender_prioritize_seconds", "Time to answer a Prioritize call.", buckets=_SECONDS
)
BINDS = Histogram(
    "kvplace_extender_bind_seconds", "Time to claim and bind, by outcome.", ["outcome"], buckets=_SECONDS
)
PLACEMENTS = Histogram(
    "kvplace_extender_placement_seconds",
    "Time from a pod's first Filter call until it is bound, with all attempts and waiting between them.",
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0),
)
PLANNED = Counter(
    "kvplace_extender_planned_pods_total", "Pods that were planned together with the one asked about."
)
NOMINATIONS = Counter(
    "kvplace_extender_nominations_total",
    "Nodes of planned pods to be nominated: written, failed, or dropped because it was too late.",
    ["outcome"],
)
REFUSALS = Counter(
    "kvplace_extender_refusals_total",
    "Filter calls that no node could satisfy, by each reason found.",
    ["reason"],
)
REJECTED_CALLS = Counter(
    "kvplace_extender_rejected_calls_total", "Malformed or too large calls, by verb.", ["verb"]
)
PREEMPTIONS = Counter(
    "kvplace_extender_preemptions_total",
    "Preempt calls by answer: victims, waiting (for cores that are released anyway), making-room, none, "
    "unchanged.",
    ["answer"],
)
ROOMS = Counter(
    "kvplace_extender_rooms_total",
    "Searches for moves, by outcome: made, stopped, none (no moves found).",
    ["outcome"],
)
ROOM_MOVES = Counter("kvplace_extender_room_moves_total", "Running VMs that began to move for others.")
ROOM_MIGRATIONS = Counter(
    "kvplace_extender_room_migrations_total", "Live migrations that were created to make room."
)
PREEMPTION_SECONDS = Histogram(
    "kvplace_extender_preempt_seconds", "Time to answer a preempt call.", buckets=_SECONDS
)
