"""The metrics of every process about the API server."""

from __future__ import annotations

from prometheus_client import Counter

RETRIES = Counter(
    "kvplace_api_retries_total",
    "Calls that were tried again, after a conflict or because the API server was unavailable.",
    ["cause"],
)
API_ERRORS = Counter(
    "kvplace_api_errors_total",
    "Answers of the API server that were errors, by resource and HTTP status; status none: no answer.",
    ["verb", "resource", "status"],
)
