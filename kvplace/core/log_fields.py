"""The fields of a log line that state which pod it is about: `log.info(..., extra=about_pod(...))`.

One way for all components, so that the lines about a pod can be joined by its UID.
"""

from __future__ import annotations

from kvplace.core.scalars import PodUid


def about_pod(
    uid: PodUid, namespace: str = "", name: str = "", *, vmi: str = "", node: str = "", attempt: int = 0
) -> dict[str, object]:
    """Name a pod, its VMI and its node, as far as they are known, and kube-scheduler's attempt at it."""
    fields: dict[str, object] = {"uid": uid}
    if name:
        fields["pod"] = f"{namespace}/{name}"
    if vmi:
        fields["vm"] = f"{namespace}/{vmi}" if namespace else vmi
    if node:
        fields["node"] = node
    if attempt:
        fields["attempt"] = attempt
    return fields
