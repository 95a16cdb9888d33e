"""Which revision of each pod's placement this node has carried out: one record for each pod.

To the loop that repairs drift a new revision is one more reason why threads are not where they should be.
While it is not confirmed the pod's containers may use its old and its new cores; both are its own. A revision
that cannot be carried out is given up: the previous placement is in effect again, and `serve` writes it as
the next revision. After a restart of the agent the ledger knows the previous one, or that the relocation is
over.

A pod may be deleted by force while its QEMU runs. Its record then stays until its containers have ended,
too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from kvplace.agent.node_plan import PodRevisions
from kvplace.core.ledger import Ledger
from kvplace.core.placement import PodPlacement
from kvplace.core.scalars import PodUid

log = logging.getLogger(__name__)


class Revisions:
    """The records; calls a listener after each change that a plan depends on."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._pods: dict[PodUid, PodRevisions] = {}
        self._deleted: set[PodUid] = set()
        """Pods with a placement that are not in the API server any more."""

    def now(self) -> Mapping[PodUid, PodRevisions]:
        """Return the records of this moment by UID."""
        return dict(self._pods)

    def of(self, uid: PodUid) -> PodRevisions | None:
        """Return the record of a pod; None where it has no placement, or has ended."""
        return self._pods.get(uid)

    def seen(self, uid: PodUid, newest: PodPlacement | None) -> None:
        """Take over the placement of a pod in the API server; None where it has none, or has ended."""
        self._deleted.discard(uid)
        before = self._pods.get(uid)
        if newest is None:
            self._forget([uid])
        elif before is None:
            self._put(uid, PodRevisions(newest))
        elif newest != before.newest:
            self._put(uid, replace(before, newest=newest, failure=""))

    def deleted(self, uid: PodUid) -> None:
        """Note that a pod is not in the API server any more."""
        if uid in self._pods:
            self._deleted.add(uid)
            self._changed()

    def forget_deleted(self, here: Iterable[PodUid]) -> None:
        """Forget deleted pods, except pods with containers that are still `here`."""
        if self._deleted:
            self._forget(self._deleted.difference(here))

    def succeeded(self, uid: PodUid, placement: PodPlacement) -> None:
        """Note that every thread of a pod was seen where a placement states: its cpusets narrow to it."""
        before = self._pods.get(uid)
        if before is not None:
            revision = before.confirmed if before.failure else placement.revision
            self._put(uid, replace(before, followed=placement, confirmed=revision))

    def failed(self, uid: PodUid, revision: int, why: str, ledger: Ledger) -> None:
        """Give a revision of a pod up, unless there is a newer one or nothing to go back to.

        Where the one before is the same placement, its cpusets leave the CPUs of before all the same: threads
        that the VM sets anew again and again keep no more than its own CPUs.
        """
        before = self._pods.get(uid)
        previous = None if before is None else before.previous(ledger)
        if before is None or previous is None:
            return
        if revision != before.newest.revision or revision <= before.confirmed:
            return
        if previous.placement == before.newest.placement:
            self._put(uid, replace(before, confirmed=revision))
            return
        log.warning("revision %d is undone: %s", revision, why, extra={"uid": uid})
        self._put(uid, replace(before, failure=why))

    def _put(self, uid: PodUid, record: PodRevisions) -> None:
        if self._pods.get(uid) != record:
            self._pods[uid] = record
            self._changed()

    def _forget(self, uids: Iterable[PodUid]) -> None:
        gone = [uid for uid in uids if uid in self._pods or uid in self._deleted]
        for uid in gone:
            self._deleted.discard(uid)
            self._pods.pop(uid, None)
        if gone:
            self._changed()
