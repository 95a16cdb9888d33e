"""The metrics of ledger writes."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

LEDGER_WRITES = Histogram(
    "kvplace_ledger_write_seconds",
    "Time of one write of a node's ledger, whatever became of it.",
    buckets=(0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
LEDGER_CHANGES = Counter(
    "kvplace_ledger_changes_total",
    "Changes that were stored; divided by the writes, how many went together.",
)
LEDGER_LAST_WRITE = Gauge(
    "kvplace_ledger_last_write_timestamp_seconds", "When this replica last changed a ledger, as Unix time."
)
LEDGER_CONFLICTS = Counter(
    "kvplace_ledger_conflicts_total",
    "Lost writes of ledgers: version (conflict with another writer) or owner (a CPU had another owner).",
    ["kind"],
)
