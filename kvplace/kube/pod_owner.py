"""Which VM a pod belongs to: one answer for everything that reads pods.

The request of a pod says it: admission has checked it, and the API server lets nobody change it. Whoever may
edit a pod writes its owner references, so these only add the UID, and count by themselves where no request
says anything.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvplace.kube.api_errors import NOT_JSON

VMI = "VirtualMachineInstance"
_KUBEVIRT = "kubevirt.io/"
"""How the API versions of KubeVirt begin; anybody can define a kind of the same name in another group."""


class OwnerReference(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """An entry of `metadata.ownerReferences`."""

    api_version: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool | None = None

    @property
    def is_vmi(self) -> bool:
        """Whether a VMI is said to control the object; whoever creates or edits the object can write that."""
        return self.kind == VMI and self.api_version.startswith(_KUBEVIRT) and self.controller is True


class _StatedVm(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """The VM in a request, `namespace/name`; None where the request says nothing about that."""

    vmi: str | None = None


def vmi_of(request: str, owners: Iterable[OwnerReference]) -> OwnerReference:
    """Return the VMI of a pod by its request and owners; without a name for a plain pod.

    Its UID is empty where no owner is of that name. A pod whose request cannot be read counts as plain.
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
