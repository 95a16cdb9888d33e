"""The API server's record of who has written which field of an object (`metadata.managedFields`).

It is nearly half of a virt-launcher pod. It is stored with the pod, sent to every watcher, and computed again
with each update from the whole object. Only server-side apply needs it, and no user applies the pods that
virt-controller creates, nor its VMIs. An object without it is not recorded any more, until a user applies
it: then what is there counts as written by `before-first-apply`.
"""

from __future__ import annotations

from kvplace.admission.edits import EditedObject

_APPLIED_BY_KUBECTL = "kubectl.kubernetes.io/last-applied-configuration"


def drop_managed_fields(metadata: EditedObject) -> None:
    """Remove the record from a new object, unless a user has applied that object."""
    entries = metadata.get("managedFields")
    if not isinstance(entries, list) or _APPLIED_BY_KUBECTL in (metadata.get("annotations") or {}):
        return
    if all(isinstance(entry, dict) and entry.get("operation") == "Update" for entry in entries):
        metadata.drop("managedFields")
