"""Admission of changes of a VMI with the label kvplace.io/asks.

Edited options are checked like new ones, and the VMI is marked for the controller: the label
kvplace.io/edited makes `serve` watch it, so that VMIs that no user edits cost nothing. A changed size (CPUs
or disks were plugged in) is written down again, see `vmi`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvplace.admission.edits import EditedObject, Operation, edited
from kvplace.admission.objects import Vmi, title, typed
from kvplace.admission.verdict import Admitted
from kvplace.admission.vmi import check_vm, state_size
from kvplace.core.annotations import ASKING, CPU_POLICY, VM_SIZE, read_options
from kvplace.core.marks import EDITED_LABEL

_REMOVED = f"the running VM keeps its CPUs; set {CPU_POLICY}: none to have it run unpinned"


def admit_vmi_edit(
    raw: Mapping[str, Any], old: Mapping[str, Any], *, namespace: str, largest_node: int | None = None
) -> Admitted:
    """Check the edited options of a VMI and mark it; raises Misconfigured for options it cannot have.

    An update that leaves the options as they are is never refused, whatever they are.
    """
    vmi, before = typed(raw, Vmi), typed(old, Vmi)
    annotations = vmi.metadata.annotations or {}
    what = f"{title(Vmi, vmi.metadata, namespace)}: spec"
    patch: list[Operation] = []
    after = edited(raw, patch)
    warnings: tuple[str, ...] = ()
    if _asked(annotations) != _asked(before.metadata.annotations or {}):
        warnings = _mark_edit(after, vmi, what, largest_node)
    state_size(after, vmi.spec, what)
    return Admitted(after.values, warnings, patch)


def _mark_edit(after: EditedObject, vmi: Vmi, what: str, largest_node: int | None) -> tuple[str, ...]:
    annotations = vmi.metadata.annotations or {}
    warnings = check_vm(annotations, vmi.spec, what, largest_node) or ()
    if read_options(annotations) is None:
        return (_REMOVED,)
    after.object("metadata").object("labels").put(EDITED_LABEL, "true")
    return warnings


def _asked(annotations: Mapping[str, str]) -> dict[str, str]:
    return {
        key: value
        for key, value in annotations.items()
        if key in ASKING or (key.startswith("kvplace.io/") and key != VM_SIZE)
    }
