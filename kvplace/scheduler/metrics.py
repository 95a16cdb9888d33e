"""What the extender counts."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

FILTERS = Histogram("kvplace_extender_filter_seconds", "Time to answer a filter call.", buckets=_SECONDS)
BINDS = Histogram(
    "kvplace_extender_bind_seconds", "Time to claim and bind, by outcome.", ["outcome"], buckets=_SECONDS
)
REFUSALS = Counter(
    "kvplace_extender_refusals_total",
    "Filter calls that no node could satisfy, by each reason found.",
    ["reason"],
)
REJECTED_CALLS = Counter(
    "kvplace_extender_rejected_calls_total", "Malformed or too large calls, by verb.", ["verb"]
)
