"""What the controller counts."""

from __future__ import annotations

from prometheus_client import Counter

RELEASES = Counter("kvplace_controller_releases_total", "Claims given back.")
WAKES = Counter("kvplace_controller_wakes_total", "Times that waiting pods were made to be tried again.")
OVERLAPS = Counter(
    "kvplace_controller_overlaps_total", "Running pods found on cores that the ledger gives to others."
)
