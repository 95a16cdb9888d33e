"""The metrics of admission."""

from __future__ import annotations

from prometheus_client import Histogram

REVIEWS = Histogram(
    "kvplace_admission_review_seconds",
    "Time to answer an AdmissionReview, by kind of object and decision: allowed, denied, malformed.",
    ["kind", "decision"],
    buckets=(0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 10.0),
)
