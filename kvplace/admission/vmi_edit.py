"""Admission of edits of a running VMI's options: checked like new ones, and marked for the controller.

The label kvplace.io/edited makes `serve` watch the VMI, so that VMIs that nobody edits cost nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from kvplace.admission.objects import Vmi, title, typed
from kvplace.admission.sidecar import fields_of
from kvplace.admission.verdict import Admitted
from kvplace.admission.vmi import check_vm
from kvplace.core.annotations import ASKING, CPU_POLICY, read_options
from kvplace.core.errors import BadAnnotation
from kvplace.core.marks import EDITED_LABEL

_AT_NEXT_START = "the VM was started without options of kvplace; these take effect at its next start"
_REMOVED = f"the running VM keeps its CPUs; set {CPU_POLICY}: none to have it run unpinned"


def admit_vmi_edit(
    raw: Mapping[str, Any], old: Mapping[str, Any], *, namespace: str, largest_node: int | None = None
) -> Admitted:
    """Check the edited options of a VMI and mark it; raises Misconfigured for options it cannot have.

    An update that leaves the options as they are passes unchanged, whatever they are.
    """
    vmi, before = typed(raw, Vmi), typed(old, Vmi)
    annotations = vmi.metadata.annotations or {}
    stored = before.metadata.annotations or {}
    if all(annotations.get(key) == stored.get(key) for key in {*ASKING, *annotations, *stored} if _asks(key)):
        return Admitted(raw)
    what = f"{title(Vmi, vmi.metadata, namespace)}: spec"
    warnings = check_vm(annotations, vmi.spec, what, largest_node) or ()
    if not (_had_options(stored) or (before.metadata.labels or {}).get(EDITED_LABEL)):
        return Admitted(raw, (*warnings, _AT_NEXT_START))
    if read_options(annotations) is None:
        return Admitted(raw, (_REMOVED,))
    after = copy.deepcopy(dict(raw))
    fields_of(fields_of(after, "metadata"), "labels")[EDITED_LABEL] = "true"
    return Admitted(after, warnings)


def _asks(key: str) -> bool:
    return key in ASKING or key.startswith("kvplace.io/")


def _had_options(annotations: Mapping[str, str]) -> bool:
    try:
        return read_options(annotations) is not None
    except BadAnnotation:
        return True
