"""The call that only `kvplace defragment` makes, beside those of `serve`: with the rights of its user."""

from __future__ import annotations

from kvplace.kube import pod_calls
from kvplace.kube.api_cluster import ApiCluster
from kvplace.kube.object_records import PodRecord
from kvplace.kube.session import Session

_WRITTEN_BY = {"fieldManager": "kvplace-defragment"}


class MovingCluster(ApiCluster):
    """A cluster with VMs that a user moves."""

    def __init__(self, session: Session) -> None:
        super().__init__(session, component="defragment")
        self._moving_session = session

    async def annotate_vm(self, pod: PodRecord, key: str, value: str | None) -> None:
        """Write an annotation of the VMI of a pod, or of a plain pod; None removes it."""
        call = pod_calls.annotate_vm_call(pod, key, value, _WRITTEN_BY)
        await self._moving_session.request(call)
