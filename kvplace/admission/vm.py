"""Admission of a VirtualMachine: the checks that its VMI would meet later.

So `kubectl apply` reports a mistake, not an event later. The object is never changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvplace.admission.objects import Metadata, Vm, title, typed
from kvplace.admission.verdict import Admitted
from kvplace.admission.vmi import check_vm
from kvplace.core.annotations import ASKING, without_effect
from kvplace.core.errors import Misconfigured


def review_vm(
    raw: Mapping[str, Any],
    *,
    namespace: str,
    old: Mapping[str, Any] | None = None,
    largest_node: int | None = None,
) -> Admitted:
    """Check the template of a VM; raises Misconfigured when its VMIs would be refused.

    `old` is the VM before an update. A mistake that was there before only gets a warning: the VM may be older
    than kvplace, and its owner must be able to stop, edit and delete it.
    """
    vm = typed(raw, Vm)
    if vm.metadata.deletion_timestamp is not None:
        return Admitted(raw)
    warnings = _misplaced(vm.metadata)
    try:
        return Admitted(raw, (*warnings, *_check(vm, namespace, largest_node)))
    except Misconfigured as error:
        if old is None or _refusal(old, namespace) != str(error):
            raise
        return Admitted(raw, (*warnings, str(error)))


def _check(vm: Vm, namespace: str, largest_node: int | None) -> tuple[str, ...]:
    template = vm.spec.template
    annotations = (template.metadata.annotations if template.metadata else None) or {}
    what = f"{title(Vm, vm.metadata, namespace)}: spec.template.spec"
    return (*(check_vm(annotations, template.spec, what, largest_node) or ()), *without_effect(annotations))


def _refusal(raw: Mapping[str, Any], namespace: str) -> str | None:
    try:
        _check(typed(raw, Vm), namespace, None)
    except Misconfigured as error:
        return str(error)
    return None


def _misplaced(metadata: Metadata) -> tuple[str, ...]:
    """Warn about options on the VirtualMachine itself, which reach neither its VMIs nor its pods."""
    return tuple(
        f"annotation {key} has no effect here; move it to spec.template.metadata.annotations of the VM"
        for key in ASKING
        if key in (metadata.annotations or {})
    )
