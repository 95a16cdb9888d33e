"""Time that kvplace needs to recover from a fault.

Every fault of `python -m tests.faults`, on a real etcd, kube-apiserver and kube-scheduler with one `serve`.
`serve` reaches the API server through a proxy that fails on demand. kube-scheduler reaches `serve`, and the
API server reaches its webhooks, through a TCP balancer. Pods with a request for two exclusive CPUs each are
created while kube-scheduler is stopped. Then all are scheduled at once, and the fault happens.

Seconds count from the end of the fault. For a process that is killed and started again at once this is its
death; for the API server and etcd it is the moment when the API server is ready again. *all cores free*
counts from the deletion of the pods, or from the end of a fault after that. After each fault the benchmark
reads from the API server whether ledgers and bound pods agree CPU by CPU, and whether each pod is bound or
has a reason. After the deletion of all pods it reads whether every ledger is empty. Each fault is played
once.
"""

from __future__ import annotations

import sys

from tests.faults.__main__ import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
