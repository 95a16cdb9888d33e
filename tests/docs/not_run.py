"""The blocks of the pages that no test runs, each with its reason."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Why a block is not run: there is no other."""

    DRAWING = "a drawing or text that another client writes: nothing to run"
    BENCHMARK = "runs the benchmarks, which take hours"
    WHOLE_PROJECT = "builds or tests the whole project, as the tests of each part do"
    NEEDS_BASE_IMAGE = "builds on an image of a public registry"
    NEEDS_COSIGN = "needs cosign, which takes longer to build than all that the tests build"
    NEEDS_NODE = "needs a kubelet to work on, or root on the host of one"


NOT_RUN: dict[tuple[str, str], Reason] = {
    ("README.md", "./make demo"): Reason.WHOLE_PROJECT,
    ("docs/architecture.md", " user ── VM"): Reason.DRAWING,
    ("docs/architecture.md", "kvplace/"): Reason.DRAWING,
    ("docs/architecture.md", " cli"): Reason.DRAWING,
    ("docs/benchmarks.md", "./make bench"): Reason.BENCHMARK,
    ("docs/measure.md", "kubectl logs -l app=latency-test"): Reason.NEEDS_NODE,
    ("docs/releasing.md", "./make release"): Reason.WHOLE_PROJECT,
    ("docs/releasing.md", "cosign verify-blob"): Reason.NEEDS_COSIGN,
    ("docs/releasing.md", "podman build"): Reason.NEEDS_BASE_IMAGE,
    ("docs/migrate.md", "systemctl stop kubelet"): Reason.NEEDS_NODE,
    ("docs/troubleshoot.md", "kubectl exec"): Reason.NEEDS_NODE,
    ("docs/troubleshoot.md", "kubectl logs virt-launcher-database-xxxxx"): Reason.NEEDS_NODE,
    ("docs/troubleshoot.md", "kubectl logs virt-launcher-database-yyyyy"): Reason.NEEDS_NODE,
    ("docs/troubleshoot.md", "kubectl -n kvplace-system logs"): Reason.NEEDS_NODE,
    ("docs/troubleshoot.md", "kubectl -n kvplace-agent logs"): Reason.NEEDS_NODE,
}
"""By page and the beginning of one of the block's lines."""
