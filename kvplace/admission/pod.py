"""What happens to a pod at creation: what it asks for becomes one normalised request on it.

The pod of a VM takes its size from its VMI, a plain pod from its CPU limits. Results that a pod brings
along are removed: KubeVirt copies them to migration targets, and anybody can write them. What a pod that
asks gets:

    kvplace.io/request      all that the extender reads
    kvplace.io/placed       label, by which `serve` watches
    kvplace.io/vm: 1        marker resource, by which kube-scheduler calls the extender for this pod
    schedulerName           ours, where the pod names none
    CPU request             not below the CPUs that it will own, so that kube-scheduler counts true; within
                            the container's limit. With `kvplace.io/smt` require and isolate the cores cost
                            more, which only the node can tell
    hook sidecar            the pod's results as files, probes, small resources

Some pods cannot be placed whatever they ask: their node is chosen already, KubeVirt pins them itself, or
they lack the hook sidecar because their VMI is older than kvplace. For those `kvplace.io/on-failure`
decides: `wait` refuses the pod with the reason (KubeVirt shows it and tries again), `float` lets it run
unpinned with a warning. A live-migration target needs no sidecar (KubeVirt discards what hooks answer
there, the agent pins) and is placed like any other pod.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvplace.admission.objects import Pod, Vmi, title, view
from kvplace.admission.pod_resources import mark, raise_cpu_requests
from kvplace.admission.pod_size import PodSize, size_of_pod
from kvplace.admission.settings import AdmissionSettings
from kvplace.admission.sidecar import fields_of, sidecars_of, wire
from kvplace.admission.verdict import Admitted
from kvplace.admission.vm_size import VmSize, size_of_vm
from kvplace.admission.vmi import conflict_with_kubevirt
from kvplace.core.annotations import (
    ASKING,
    EMULATOR_THREADS,
    GUEST_NUMA,
    ON_FAILURE,
    REQUEST,
    RESULTS,
    read_options,
    wants_crane_result,
    wants_explanation,
)
from kvplace.core.contradictions import check_agreement
from kvplace.core.errors import Conflict, Misconfigured
from kvplace.core.marks import PLACED_LABEL
from kvplace.core.placement import PLACEMENT
from kvplace.core.request import EmulatorThreads, GuestNuma, OnFailure, PinningOptions, Policy, Request
from kvplace.core.request_document import PodRequest, write_request
from kvplace.kube.objects import OwnerReference

FORGEABLE = (PLACEMENT, REQUEST)
"""Results that a pod which asks for nothing must not carry either. Its `cpu-map` is left alone: another
scheduler may work with it."""

_DEFAULT_SCHEDULER = "default-scheduler"


def needed_vmi(pod: Mapping[str, Any]) -> str | None:
    """Name the VMI, in the pod's namespace, whose size the pod's request needs; None when it needs none.

    Raises Misconfigured for a pod that asks but cannot be answered.
    """
    seen = view(pod, Pod)
    if _options(seen) is None or not _is_launcher(seen):
        return None
    return _owner(seen, title(Pod, seen.metadata, "")).name


def admit_pod(
    pod: Mapping[str, Any],
    *,
    namespace: str,
    settings: AdmissionSettings,
    vmi: Mapping[str, Any] | None = None,
) -> Admitted:
    """Make a new pod ready to be placed; `vmi` is what `needed_vmi` named, None when there is none such.

    Done twice it changes nothing more. Raises Misconfigured when the pod asks for what cannot be had, and
    Conflict when its VMI is gone or another one.
    """
    seen = view(pod, Pod)
    options = _options(seen)
    if options is None:
        return Admitted(_without(pod, seen, FORGEABLE))
    what = title(Pod, seen.metadata, namespace)
    check_agreement(options, seen.metadata.annotations or {})
    if not seen.spec.containers:
        raise Misconfigured(f"{what} asks for CPUs but has no container; add one")
    owner = _owner(seen, what) if _is_launcher(seen) else None
    of_vm = _controlling_vmi(owner, vmi, f"{namespace}/{owner.name}", what) if owner is not None else None
    obstacle = _obstacle(seen, options, of_vm, what)
    if obstacle is not None:
        if options.on_failure is OnFailure.WAIT:
            raise Misconfigured(obstacle)
        warning = f"runs unpinned, as {ON_FAILURE} is float: {obstacle}"
        return Admitted(_without(pod, seen, RESULTS), (warning,))
    size = (
        size_of_vm(of_vm.spec.domain, _spec_of(of_vm))
        if of_vm is not None
        else size_of_pod(seen.spec.containers, what)
    )
    after = copy.deepcopy(dict(pod))
    vmi_name = f"{namespace}/{owner.name}" if owner else ""
    _write(after, _request(seen.metadata.annotations or {}, options, size, vmi_name))
    warnings = [
        *_name_scheduler(after["spec"], seen, settings),
        *raise_cpu_requests(after["spec"], seen, options, size, what),
    ]
    if isinstance(size, PodSize):
        warnings += [
            f"annotation {key} has no effect on a pod without a VM"
            for key in (EMULATOR_THREADS, GUEST_NUMA)
            if key in (seen.metadata.annotations or {})
        ]
    mark(after["spec"])
    if sidecars_of(seen):
        wire(seen, after["spec"], what)
    return Admitted(after, tuple(warnings))


def _options(pod: Pod) -> PinningOptions | None:
    """Read what a pod asks for; None when it is none of ours."""
    annotations = pod.metadata.annotations or {}
    if annotations.get("kubevirt.io/ephemeral-provisioning") == "true":
        return None
    if _is_launcher(pod):
        # Its VMI was checked for keys that we do not know. A newer release may have written one since,
        # and that must not stop a live migration.
        annotations = {key: annotations[key] for key in ASKING if key in annotations}
    options = read_options(annotations)
    return None if options is None or options.policy is Policy.NONE else options


def _is_launcher(pod: Pod) -> bool:
    return (pod.metadata.labels or {}).get("kubevirt.io") == "virt-launcher"


def _owner(pod: Pod, what: str) -> OwnerReference:
    for owner in pod.metadata.owner_references or []:
        if owner.kind == "VirtualMachineInstance" and owner.controller and owner.name:
            return owner
    raise Misconfigured(
        f"{what} has the label kubevirt.io: virt-launcher, but no VirtualMachineInstance controls it; "
        "remove the label, or let KubeVirt make the pod"
    )


def _controlling_vmi(owner: OwnerReference, vmi: Mapping[str, Any] | None, name: str, what: str) -> Vmi:
    if vmi is None:
        raise Conflict(f"{what}: VirtualMachineInstance {name}, which controls it, is gone; delete the pod")
    seen = view(vmi, Vmi)
    if owner.uid and seen.metadata.uid and owner.uid != seen.metadata.uid:
        raise Conflict(
            f"{what}: VirtualMachineInstance {name} was made anew since and gets its own pod; delete this one"
        )
    return seen


def _spec_of(vmi: Vmi) -> str:
    return f"{title(Vmi, vmi.metadata, '')}: spec"


def _obstacle(pod: Pod, options: PinningOptions, vmi: Vmi | None, what: str) -> str | None:
    """Say why a pod cannot be placed although its options are valid; None when it can."""
    if pod.spec.node_name:
        return (
            f"{what}: spec.nodeName is {pod.spec.node_name}, so no scheduler is asked where its cores are; "
            "use spec.nodeSelector instead"
        )
    if vmi is None:
        return None
    conflict = conflict_with_kubevirt(pod.metadata.annotations or {}, options, vmi.spec, _spec_of(vmi))
    if conflict is not None:
        return conflict
    if not sidecars_of(pod) and "kubevirt.io/migrationJobUID" not in (pod.metadata.labels or {}):
        return (
            f"{what} has no container with the command kvplace-hook, as its VMI is older than kvplace or "
            f"asked too late; restart the VM, or annotate it with {ON_FAILURE}: float"
        )
    return None


def _request(
    annotations: Mapping[str, str], options: PinningOptions, size: VmSize | PodSize, vmi: str
) -> PodRequest:
    if isinstance(size, VmSize):
        vcpus, io_threads = size.vcpus, size.io_threads
    else:
        # Without an emulator no CPU has to be kept for one, and without a guest there is none to show cells.
        vcpus, io_threads = size.cpus, 0
        options = replace(options, emulator_threads=EmulatorThreads.SHARED, guest_numa=GuestNuma.OFF)
    return PodRequest(
        Request(vcpus, options, memory=size.memory, huge_pages=size.huge_pages, io_threads=io_threads),
        vmi=vmi,
        explain=wants_explanation(annotations),
        crane_result=wants_crane_result(annotations),
    )


def _without(pod: Mapping[str, Any], seen: Pod, keys: tuple[str, ...]) -> Mapping[str, Any]:
    """Return the pod without these annotations; the pod itself when it has none of them."""
    annotations = seen.metadata.annotations or {}
    if not any(key in annotations for key in keys):
        return pod
    kept = {key: value for key, value in annotations.items() if key not in keys}
    return {**pod, "metadata": {**pod["metadata"], "annotations": kept}}


def _write(after: dict[str, Any], request: PodRequest) -> None:
    metadata = fields_of(after, "metadata")
    annotations = fields_of(metadata, "annotations")
    for key in RESULTS:
        annotations.pop(key, None)
    annotations[REQUEST] = write_request(request)
    fields_of(metadata, "labels")[PLACED_LABEL] = "true"


def _name_scheduler(spec: dict[str, Any], pod: Pod, settings: AdmissionSettings) -> tuple[str, ...]:
    given = pod.spec.scheduler_name
    if not given or given == _DEFAULT_SCHEDULER:
        # Where the operator put our extender into the main scheduler, ours is the default one.
        spec["schedulerName"] = settings.scheduler_name
    elif given not in (settings.scheduler_name, *settings.other_schedulers):
        warning = (
            f"scheduler {given} is not known to ask kvplace, and if it does not the pod stays Pending; "
            "leave schedulerName out, or have the operator add it to kvplace's schedulers"
        )
        return (warning,)
    return ()
