"""The metrics of the controller."""

from __future__ import annotations

from prometheus_client import Counter

RELEASES = Counter("kvplace_controller_releases_total", "Claims released.")
WAKES = Counter("kvplace_controller_wakes_total", "How often waiting pods were retried.")
RELOCATIONS = Counter("kvplace_controller_relocations_total", "Running pods that got other cores.")
OVERLAPS = Counter(
    "kvplace_controller_overlaps_total", "Running pods found on cores that others own in the ledger."
)
