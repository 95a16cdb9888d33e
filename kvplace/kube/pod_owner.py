"""Which VM a pod belongs to: one answer for everything that reads pods.

The request of a pod names it: admission has checked it, and the API server lets no client change it. Whoever
may edit a pod writes its owner references, so these only add the UID, and count by themselves where no
request states anything.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvplace.kube.api_errors import NOT_JSON

VMI = "VirtualMachineInstance"
_KUBEVIRT = "kubevirt.io/"
"""How the API versions of KubeVirt begin; any client can define a kind of the same name in another group."""


class OwnerReference(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """An entry of `metadata.ownerReferences`."""

    api_version: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool | None = None

    @property
    def is_vmi(self) -> bool:
        """Whether a VMI controls the object by its metadata, which its creator and editors can write."""
        return self.kind == VMI and self.api_version.startswith(_KUBEVIRT) and self.controller is True


class _StatedVm(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """The VM in a request, `namespace/name`; None if the request names none."""

    vmi: str | None = None


def vmi_of(request: str, owners: Iterable[OwnerReference]) -> OwnerReference:
    """Return the VMI of a pod by its request and owners; without a name for a plain pod.

    Its UID is empty where no owner is of that name. A pod with an unreadable request counts as plain.
    """
    stated: str | None = None
    if request:
        try:
            stated = _STATED_VM.decode(request).vmi
        except NOT_JSON:
            return _NO_OWNER
    if stated is None:
        return next((owner for owner in owners if owner.is_vmi), _NO_OWNER)
    name = stated.rpartition("/")[2]
    same = (owner for owner in owners if owner.is_vmi and owner.name == name)
    return next(same, OwnerReference(name=name)) if name else _NO_OWNER


_NO_OWNER = OwnerReference()
_STATED_VM = msgspec.json.Decoder(_StatedVm)
