"""Admission of VirtualMachines and VirtualMachineInstances: checks their options and adds the hook sidecar.

* A new VMI with options gets its size as an annotation, `kvplace.io/vm-size`, and the label
  `kvplace.io/opted-in`. KubeVirt copies both to the VMI's pods, so admission of a pod need not read the VMI.
  The label makes the API server send every later change of the options, the size or the label here, so the
  annotation stays correct. A VMI without options is not changed, and one with policy `none` gets no sidecar.
* A VM meets the checks that its VMI would meet later, so `kubectl apply` reports a mistake, not an event. The
  VM is never changed.
* Edited options of a VMI are checked like new options, and the VMI is marked for the controller: the label
  `kvplace.io/edited` makes `serve` watch it, so that VMIs that no user edits cost nothing. A changed size
  (CPUs or disks were plugged in) is written down again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kvplace.admission.edits import Admitted, EditedObject, Operation, drop_managed_fields, edited
from kvplace.admission.objects import (
    AdmissionSettings,
    AdmittedMetadata,
    Cpu,
    Quantity,
    Vm,
    Vmi,
    VmiSpec,
    admitted_name,
    typed,
)
from kvplace.admission.sidecar import HOOK_SIDECARS, with_hook_sidecar
from kvplace.admission.size import Size, has_devices, size_of_vm, write_size
from kvplace.core.annotations import check_agreement, read_options, without_effect
from kvplace.core.errors import KvplaceError, Misconfigured
from kvplace.core.quantity import parse_quantity
from kvplace.core.request import EmulatorThreads, GuestNuma, PinningOptions, Policy, Request
from kvplace.core.well_known_names import (
    ASKING,
    CPU_POLICY,
    DEVICE_NUMA,
    EDITED_LABEL,
    EMULATOR_THREADS,
    FRONT_END_LABEL,
    GUEST_NUMA,
    OPTED_IN_LABEL,
    RESULTS,
    VM_SIZE,
    FrontEnd,
)

_WITHOUT_GUEST_CELLS = ("s390x",)
"""Architectures without guest NUMA cells in QEMU."""

_LIMIT_OF_A_NEW_VCPU = Fraction(1, 10)
"""KubeVirt's default CPU request of a vCPU (cpuAllocationRatio 10); it raises a CPU limit by as much."""

_REMOVED = f"the running VM keeps its CPUs; set {CPU_POLICY}: none to have it run unpinned"


def admit_vmi(
    raw: Mapping[str, Any],
    *,
    namespace: str,
    settings: AdmissionSettings,
    largest_node: int | None = None,
) -> Admitted:
    """Check a new VMI's options and add the hook sidecar; raises Misconfigured for options it cannot have.

    `largest_node` is the number of allocatable CPUs of the largest known machine.
    """
    vmi = typed(raw, Vmi)
    annotations = vmi.metadata.annotations or {}
    what = f"{admitted_name(Vmi, vmi.metadata, namespace)}: spec"
    checked = check_vm(annotations, vmi.spec, what, largest_node)
    if checked is None:
        return Admitted(raw, without_effect(annotations))
    patch: list[Operation] = []
    after = edited(raw, patch)
    stored = after.object("metadata").object("annotations")
    # KubeVirt copies every annotation to the pods of this VM and to its migration targets.
    for key in RESULTS:
        stored.drop(key)
    front_end: FrontEnd | None = None
    if checked.options.policy is not Policy.NONE:
        front_end = _mark_front_end(stored, annotations, settings)
    labels = after.object("metadata").object("labels")
    if front_end is FrontEnd.PLUGIN:
        labels.put(FRONT_END_LABEL, FrontEnd.PLUGIN.value)
    else:
        labels.drop(FRONT_END_LABEL)
    _state_size(after, checked.size)
    drop_managed_fields(after.object("metadata"))
    return Admitted(after.values, checked.warnings, patch)


def _mark_front_end(
    stored: EditedObject, annotations: Mapping[str, str], settings: AdmissionSettings
) -> FrontEnd:
    """Add the entry of the hook sidecar where it is the front end; one that is there already stays."""
    entries = with_hook_sidecar(annotations.get(HOOK_SIDECARS), settings.sidecar_image)
    if entries is None:
        return FrontEnd.ANNOTATION
    if settings.front_end is FrontEnd.ANNOTATION:
        stored.put(HOOK_SIDECARS, entries)
    return settings.front_end


def _state_size(vmi: EditedObject, size: Size | None) -> None:
    """Write label and size on a VMI; without the size, admission of its pods reads the VMI itself."""
    metadata = vmi.object("metadata")
    metadata.object("labels").put(OPTED_IN_LABEL, "true")
    if size is not None:
        metadata.object("annotations").put(VM_SIZE, write_size(size))
    else:
        metadata.object("annotations").drop(VM_SIZE)


@dataclass(frozen=True, slots=True)
class CheckedVm:
    """The options of a VM, read once, with its size and warnings for its author."""

    options: PinningOptions
    size: Size | None
    """None where the policy is `none` and the size cannot be read."""
    warnings: tuple[str, ...] = ()


def check_vm(
    annotations: Mapping[str, str], spec: VmiSpec, what: str, largest_node: int | None = None
) -> CheckedVm | None:
    """Check the options of a VM against its spec; None when it has no options.

    Raises Misconfigured; its sentence begins with `what`, which ends with the path of the VMI's spec.
    """
    options = read_options(annotations)
    if options is None:
        return None
    if options.policy is Policy.NONE:
        return CheckedVm(options, _readable_size(spec, what))
    check_agreement(options, annotations)
    conflict = conflict_with_kubevirt(annotations, options, spec, what)
    if conflict is not None:
        raise Misconfigured(conflict)
    domain = spec.domain
    size = size_of_vm(domain, what)
    warnings = []
    if largest_node is not None and size.vcpus > largest_node:
        warnings.append(
            f"{size.vcpus} vCPUs are more than the allocatable CPUs of any known machine "
            f"(largest: {largest_node})"
        )
    if options.emulator_threads is EmulatorThreads.ISOLATE and options.policy is Policy.NUMA:
        warnings.append(f"{EMULATOR_THREADS}: isolate has no effect with {CPU_POLICY}: numa")
    if options.guest_numa is GuestNuma.MIRROR and domain.cpu is not None and _can_grow(domain.cpu):
        warnings.append(
            f"{GUEST_NUMA}: mirror: vCPUs plugged in later, up to {what}.domain.cpu.maxSockets, get no cores "
            "of their own on the host and are assigned to the guest's NUMA cells in turn"
        )
    if DEVICE_NUMA in annotations and not has_devices(domain):
        warnings.append(
            f"annotation {DEVICE_NUMA} has no effect: {what}.domain.devices has no GPU, no host device and "
            "no SR-IOV interface"
        )
    limit = domain.resources.limited.get("cpu") if domain.resources else None
    least = Fraction(Request(size.vcpus, options).least_millicores, 1000)
    if limit is not None and _exceeds(least, limit):
        raised = f"is raised to {float(least):g} in the pod, which must request as much for its CPUs"
        warnings.append(f"the CPU limit {limit} {raised}")
    return CheckedVm(options, size, tuple(warnings))


def _readable_size(spec: VmiSpec, what: str) -> Size | None:
    try:
        return size_of_vm(spec.domain, what)
    except KvplaceError:
        return None


def conflict_with_kubevirt(
    annotations: Mapping[str, str], options: PinningOptions, spec: VmiSpec, what: str
) -> str | None:
    """State which field and annotation exclude each other; None when none do."""
    cpu = spec.domain.cpu
    mirror = f"annotation {GUEST_NUMA}: {annotations.get(GUEST_NUMA)!r}"
    if options.guest_numa is GuestNuma.MIRROR:
        if cpu is not None and cpu.numa is not None and cpu.numa.guest_mapping_passthrough is not None:
            return (
                f"{what}.domain.cpu.numa.guestMappingPassthrough and {mirror} exclude each other, because "
                "both define the guest's NUMA cells; remove one of the two"
            )
        if spec.architecture in _WITHOUT_GUEST_CELLS:
            return (
                f"{what}.architecture: {spec.architecture!r} and {mirror} exclude each other, because guests "
                "of this architecture have no NUMA cells; remove the annotation"
            )
    if cpu is None or not cpu.dedicated_cpu_placement:
        return None
    key = next(key for key in ASKING if key in annotations)
    return (
        f"{what}.domain.cpu.dedicatedCpuPlacement and annotation {key}: {annotations[key]!r} exclude each "
        "other, because the kubelet and KubeVirt would overwrite kvplace's pinning; remove one of the two"
    )


def _can_grow(cpu: Cpu) -> bool:
    return (cpu.max_sockets or 0) > (cpu.sockets or 1)


def _exceeds(least: Fraction, limit: Quantity) -> bool:
    try:
        return least > parse_quantity(limit)
    except ValueError:
        return False


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
    annotations, spec, what = _template_of(vm, namespace)
    warnings = _misplaced(vm.metadata)
    try:
        checked = check_vm(annotations, spec, what, largest_node)
        if checked is not None:
            grown = () if old is None else _throttled_when_grown(checked, spec, typed(old, Vm), what)
            warnings += (*grown, *checked.warnings)
        return Admitted(raw, (*warnings, *without_effect(annotations)))
    except Misconfigured as error:
        if old is None or _refusal(old, namespace) != str(error):
            raise
        return Admitted(raw, (*warnings, str(error)))


def _throttled_when_grown(checked: CheckedVm, spec: VmiSpec, before: Vm, what: str) -> tuple[str, ...]:
    """Warn when more vCPUs would run under a CPU limit that KubeVirt raises by a tenth of a CPU for each.

    KubeVirt grows the limit of the running VMI by a vCPU's request (VMICPUsPatch in virt-controller). A VM
    that owns its cores is not affected: admission of its pod raises the limit.
    """
    limit = spec.domain.resources.limited.get("cpu") if spec.domain.resources else None
    former = _readable_size(before.spec.template.spec, what)
    if checked.options.policy in (Policy.NONE, Policy.EXCLUSIVE) or checked.size is None or former is None:
        return ()
    vcpus = checked.size.vcpus
    grown = vcpus - former.vcpus
    try:
        raised = parse_quantity(limit or 0) + grown * _LIMIT_OF_A_NEW_VCPU
    except ValueError:
        return ()
    if limit is None or grown <= 0 or raised >= vcpus:
        return ()
    return (
        (
            f"{what}.domain.resources.limits.cpu: KubeVirt raises the limit {limit} of the running VM to "
            f"{float(raised):g}, so its {vcpus} vCPUs share {float(raised):g} CPUs until it restarts; set "
            f"the limit to {vcpus} and restart the VM, or remove the limit"
        ),
    )


def _template_of(vm: Vm, namespace: str) -> tuple[Mapping[str, str], VmiSpec, str]:
    """Return the annotations and the spec of a VM's VMIs, and the path of the spec for errors."""
    template = vm.spec.template
    annotations = (template.metadata.annotations if template.metadata else None) or {}
    return annotations, template.spec, f"{admitted_name(Vm, vm.metadata, namespace)}: spec.template.spec"


def _refusal(raw: Mapping[str, Any], namespace: str) -> str | None:
    try:
        check_vm(*_template_of(typed(raw, Vm), namespace))
    except Misconfigured as error:
        return str(error)
    return None


def _misplaced(metadata: AdmittedMetadata) -> tuple[str, ...]:
    """Warn about options on the VirtualMachine itself, which reach neither its VMIs nor its pods."""
    return tuple(
        f"annotation {key} has no effect here; move it to spec.template.metadata.annotations of the VM"
        for key in ASKING
        if key in (metadata.annotations or {})
    )


def admit_vmi_edit(
    raw: Mapping[str, Any], old: Mapping[str, Any], *, namespace: str, largest_node: int | None = None
) -> Admitted:
    """Check the edited options of a VMI and mark it; raises Misconfigured for options it cannot have.

    An update that leaves the options as they are is never refused.
    """
    vmi, before = typed(raw, Vmi), typed(old, Vmi)
    annotations = vmi.metadata.annotations or {}
    what = f"{admitted_name(Vmi, vmi.metadata, namespace)}: spec"
    patch: list[Operation] = []
    after = edited(raw, patch)
    warnings: tuple[str, ...] = ()
    if _asked(annotations) == _asked(before.metadata.annotations or {}):
        size = _readable_size(vmi.spec, what)
    elif (checked := check_vm(annotations, vmi.spec, what, largest_node)) is None:
        warnings, size = (_REMOVED,), _readable_size(vmi.spec, what)
    else:
        after.object("metadata").object("labels").put(EDITED_LABEL, "true")
        warnings, size = checked.warnings, checked.size
    _state_size(after, size)
    return Admitted(after.values, warnings, patch)


def _asked(annotations: Mapping[str, str]) -> dict[str, str]:
    return {
        key: value
        for key, value in annotations.items()
        if key in ASKING or (key.startswith("kvplace.io/") and key != VM_SIZE)
    }
