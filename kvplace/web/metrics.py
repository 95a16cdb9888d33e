"""The metrics of the web map about itself."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

STREAMS = Gauge("kvplace_web_streams", "Open pages that follow the changes.")
REFUSED = Counter(
    "kvplace_web_refused_total",
    "Requests that were not answered, by reason: unauthenticated, forbidden, busy.",
    ["reason"],
)
