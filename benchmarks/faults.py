"""How long kvplace takes to go on after a fault.

Every fault of `python -m tests.faults`, on a real etcd, kube-apiserver and kube-scheduler with one `serve`.
`serve` reaches the API server through a proxy that fails on demand; kube-scheduler reaches `serve`, and the
API server its webhooks, through a TCP balancer. Pods that ask for two exclusive CPUs each are created while
kube-scheduler is stopped, then all are scheduled at once and the fault comes. Seconds are counted from the
end of the fault: for a process that is killed and started again at once, from its death (for the API server
and etcd, from the moment at which the API server is ready again); `all cores free` from the deletion of the
pods, or a fault after that. After each fault the API server is asked whether ledgers and bound pods agree CPU
by CPU, whether each pod is bound or says why not, and, after the deletion of all pods, whether every ledger
is empty. Each fault is played once.
"""

from __future__ import annotations

import sys

from tests.faults.__main__ import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
