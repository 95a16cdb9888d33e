"""What happens to a VirtualMachine when it is created or changed: the checks that its VMI would meet later.

So a mistake is answered at `kubectl apply`, not in an event that nobody reads. Nothing is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvplace.admission.objects import Metadata, Vm, title, view
from kvplace.admission.verdict import Admitted
from kvplace.admission.vmi import check_vm
from kvplace.core.annotations import ASKING
from kvplace.core.errors import Misconfigured


def review_vm(
    vm: Mapping[str, Any],
    *,
    namespace: str,
    old: Mapping[str, Any] | None = None,
    largest_node: int | None = None,
) -> Admitted:
    """Check the template of a VM; raises Misconfigured when its VMIs would be refused.

    `old` is the VM before an update. What was wrong before may stay wrong, with a warning: the VM may be
    older than kvplace, and its owner must still be able to stop, edit and delete it.
    """
    seen = view(vm, Vm)
    if seen.metadata.deletion_timestamp is not None:
        return Admitted(vm)
    warnings = _misplaced(seen.metadata)
    try:
        return Admitted(vm, (*warnings, *_check(seen, namespace, largest_node)))
    except Misconfigured as error:
        if old is None or _refusal(old, namespace) != str(error):
            raise
        return Admitted(vm, (*warnings, str(error)))


def _check(vm: Vm, namespace: str, largest_node: int | None) -> tuple[str, ...]:
    template = vm.spec.template
    annotations = (template.metadata.annotations if template.metadata else None) or {}
    what = f"{title(Vm, vm.metadata, namespace)}: spec.template.spec"
    checked = check_vm(annotations, template.spec, what, largest_node)
    return checked.warnings if checked is not None else ()


def _refusal(vm: Mapping[str, Any], namespace: str) -> str | None:
    try:
        _check(view(vm, Vm), namespace, None)
    except Misconfigured as error:
        return str(error)
    return None


def _misplaced(metadata: Metadata) -> tuple[str, ...]:
    """Warn about wishes on the VirtualMachine itself, which reach neither its VMIs nor its pods."""
    return tuple(
        f"annotation {key} has no effect here; put it into spec.template.metadata.annotations of the VM"
        for key in ASKING
        if key in (metadata.annotations or {})
    )
