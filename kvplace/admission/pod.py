"""Admission of a pod: its options and its size become one normalised request, stored on it.

The pod of a VM takes its size from its VMI, a plain pod from its CPU limits. Admission of the VMI has written
that size on it, and virt-controller has copied it to the pod (see `vmi`); on any other pod it means nothing,
and the VMI is read. Results on a new pod are removed: KubeVirt copies them to migration targets, and any
client can write them. A pod with options gets:

    kvplace.io/request      the request; the extender reads nothing else
    kvplace.io/placed       label that `serve` watches pods by
    kvplace.io/vm: 0        marker resource: kube-scheduler then calls the extender
    schedulerName           kvplace's scheduler, unless the pod names one
    CPU request             of all containers together the CPUs that the pod will own, so that kube-scheduler
                            counts these and no more (see `size`). The cost of `kvplace.io/smt` require and
                            isolate depends on the node and is not counted
    hook sidecar            a restartable init container, with the pod's results, a probe, small resources

A pod with policy `none` gets the first two only: no scheduler asks for it, and it can get cores later.

Some pods cannot be placed with any options: their node is already chosen, KubeVirt pins them itself, or
they have no hook sidecar because their VMI is older than kvplace. There `kvplace.io/on-failure`
decides: `wait` refuses the pod with the reason (KubeVirt shows it and tries again), `float` lets it run
unpinned with a warning. A live-migration target needs no sidecar (KubeVirt discards the answers of
hooks there) and is placed like any other pod.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from kvplace.admission.edits import Admitted, EditedObject, Operation, drop_managed_fields, edited
from kvplace.admission.objects import AdmissionSettings, Pod, Vmi, admitted_name, typed
from kvplace.admission.sidecar import (
    COMMAND,
    PLUGIN_SOCKETS,
    add_sidecar_fields,
    compute_index,
    has_plugin_label,
    needs_container,
    sidecars_of,
)
from kvplace.admission.size import (
    Size,
    devices_of_containers,
    read_size,
    request_cpus,
    request_marker,
    size_of_pod,
    size_of_vm,
)
from kvplace.admission.vmi import conflict_with_kubevirt
from kvplace.core.annotations import check_agreement, read_options, without_effect
from kvplace.core.errors import Conflict, KvplaceError, Misconfigured
from kvplace.core.request import OnFailure, PinningOptions, Policy, Request
from kvplace.core.request_json import PodRequest, write_request
from kvplace.core.well_known_names import (
    ASKING,
    EMULATOR_THREADS,
    GUEST_NUMA,
    ON_FAILURE,
    OPTED_IN_LABEL,
    PLACE_AGAIN,
    PLACED_LABEL,
    PLACEMENT,
    REQUEST,
    RESULTS,
    VM_SIZE,
)
from kvplace.kube.object_parts import OwnerReference

FORGEABLE = (PLACEMENT, REQUEST)
"""Results that are removed from pods without options, too. Their `cpu-map` stays: another scheduler may use
it."""
_NOT_KEPT = (*RESULTS, PLACE_AGAIN, VM_SIZE)
"""Annotations that are removed from a pod with a request; the request contains the size."""

_DEFAULT_SCHEDULER = "default-scheduler"
MAX_CONTAINERS = 1024
"""Most containers of a pod, init and ephemeral containers included.

No kubelet can run many more: spec and status of one take some 650 bytes of the pod at least, and etcd stores
at most 1.5 MiB of an object (`--max-request-bytes`), which is reached with about 2,400.
"""


@dataclass(frozen=True, slots=True)
class NewPod:
    """A new pod, read once for both questions: which VMI it needs, and how it is admitted."""

    raw: Mapping[str, Any]
    pod: Pod
    options: PinningOptions | None
    """None: it has none, or they do not apply."""
    stated: Size | None
    """The size that admission of its VMI has written on it."""

    @classmethod
    def read(cls, raw: Mapping[str, Any], *, settings: AdmissionSettings, author: str = "") -> Self:
        """Read a pod that `author`, a user, creates.

        Raises BadBody, BadAnnotation, or Misconfigured for one of too many containers.
        """
        pod = typed(raw, Pod)
        options = _options(pod)
        if options is not None or (_is_launcher(pod) and sidecars_of(pod)):
            _check_containers(pod)
        return cls(raw, pod, options, _stated_size(pod, settings, author))

    @property
    def needed_vmi(self) -> str | None:
        """The VMI, in the pod's namespace, with the size for its request; None when it needs none.

        Raises Misconfigured for a virt-launcher pod without a VMI.
        """
        if self.options is None or not _is_launcher(self.pod) or self.stated is not None:
            return None
        return _owner(self.pod, admitted_name(Pod, self.pod.metadata, "")).name


def admit_pod(
    raw: Mapping[str, Any],
    *,
    namespace: str,
    settings: AdmissionSettings,
    author: str = "",
    vmi: Mapping[str, Any] | None = None,
) -> Admitted:
    """Prepare a new pod for placing, as `admit_new_pod` does."""
    new = NewPod.read(raw, settings=settings, author=author)
    return admit_new_pod(new, namespace=namespace, settings=settings, vmi=vmi)


def admit_new_pod(
    new: NewPod, *, namespace: str, settings: AdmissionSettings, vmi: Mapping[str, Any] | None = None
) -> Admitted:
    """Prepare a new pod for placing; `vmi` is the VMI that it needs, None when there is none.

    Idempotent. Raises Misconfigured when the options cannot be met, and Conflict when the pod's VMI is gone
    or another one.
    """
    pod, options = new.pod, new.options
    annotations = pod.metadata.annotations or {}
    what = admitted_name(Pod, pod.metadata, namespace)
    if options is None:
        # The author of a virt-launcher pod is KubeVirt, which has no use for warnings.
        alone = () if _is_launcher(pod) else without_effect(annotations)
        return _without(new, what, settings, FORGEABLE, alone)
    if options.policy is Policy.NONE:
        return _admit_unpinned(new, namespace, vmi, what, settings)
    check_agreement(options, annotations)
    if not pod.spec.containers:
        raise Misconfigured(f"{what} requests CPUs but has no container; add one")
    vm, read = _vm_of(new, namespace, vmi, what)
    obstacle = _obstacle(pod, options, vm, read, what)
    if obstacle is not None:
        if options.on_failure is OnFailure.WAIT:
            raise Misconfigured(obstacle)
        warning = f"the pod runs unpinned, because {ON_FAILURE} is float: {obstacle}"
        return _without(new, what, settings, _NOT_KEPT, (warning,))
    asked = request_of_pod(pod, options, _size(new, read, what), what, vm)
    patch: list[Operation] = []
    after = edited(new.raw, patch)
    _write(after, asked)
    spec = after.object("spec")
    _complete_sidecars(pod, after, what, settings)
    warnings = [
        *_set_scheduler(spec, pod, settings),
        *request_cpus(after, asked.request, what, is_vm=bool(vm)),
    ]
    if not vm:
        warnings += [
            f"annotation {key} has no effect on a pod without a VM"
            for key in (EMULATOR_THREADS, GUEST_NUMA)
            if key in annotations
        ]
    request_marker(spec)
    return Admitted(after.values, tuple(warnings), patch)


def _admit_unpinned(
    new: NewPod, namespace: str, vmi: Mapping[str, Any] | None, what: str, settings: AdmissionSettings
) -> Admitted:
    """Store the request of a pod with policy `none`, so that it can get cores while it runs; nothing else.

    A pod of unknown size stays as it is: it only cannot change its policy while it runs.
    Neither can one that names its node, which no scheduler has let it have.
    """
    pod, options = new.pod, new.options
    assert options is not None
    if pod.spec.node_name:
        return _without(new, what, settings, FORGEABLE)
    try:
        vm, read = _vm_of(new, namespace, vmi, what)
        asked = request_of_pod(pod, options, _size(new, read, what), what, vm)
    except KvplaceError:
        return _without(new, what, settings, FORGEABLE)
    patch: list[Operation] = []
    after = edited(new.raw, patch)
    _write(after, asked, (*FORGEABLE, VM_SIZE))
    _complete_sidecars(pod, after, what, settings)
    return Admitted(after.values, patch=patch)


def _vm_of(new: NewPod, namespace: str, vmi: Mapping[str, Any] | None, what: str) -> tuple[str, Vmi | None]:
    """Return `namespace/name` of a pod's VM, empty for a plain pod, and the VMI where it has the size.

    Raises Conflict when the VMI is gone or another one.
    """
    if not _is_launcher(new.pod):
        return "", None
    owner = _owner(new.pod, what)
    name = f"{namespace}/{owner.name}"
    return name, None if new.stated is not None else _controlling_vmi(owner, vmi, name, what)


def _size(new: NewPod, vmi: Vmi | None, what: str) -> Size:
    if vmi is not None:
        return size_of_vm(vmi.spec.domain, _spec_of(vmi))
    return new.stated or size_of_pod(new.pod.spec.containers, what)


def _stated_size(pod: Pod, settings: AdmissionSettings, author: str) -> Size | None:
    """Read the size that admission of the VMI has written; None where another client may have written it."""
    labels, annotations = pod.metadata.labels or {}, pod.metadata.annotations or {}
    if (
        not _is_launcher(pod)
        or author != settings.kubevirt_controller
        or labels.get(OPTED_IN_LABEL) != "true"
    ):
        return None
    return read_size(annotations.get(VM_SIZE, ""))


def _options(pod: Pod) -> PinningOptions | None:
    """Read the options of a pod; None when it has none or they do not apply."""
    annotations = pod.metadata.annotations or {}
    if annotations.get("kubevirt.io/ephemeral-provisioning") == "true":
        return None
    if _is_launcher(pod):
        # Admission of the VMI has refused unknown keys. A newer release may have allowed one since, which
        # must not stop a live migration.
        annotations = {key: annotations[key] for key in ASKING if key in annotations}
    return read_options(annotations)


def _check_containers(pod: Pod) -> None:
    what, spec = admitted_name(Pod, pod.metadata, ""), pod.spec
    containers = len(spec.containers) + len(spec.init_containers or ()) + len(spec.ephemeral_containers or ())
    if containers > MAX_CONTAINERS:
        raise Misconfigured(
            f"{what} has {containers} containers; a pod with a request may have {MAX_CONTAINERS}"
        )
    hooks = len(sidecars_of(pod))
    if hooks > 1:
        raise Misconfigured(f"{what} has {hooks} containers with the command {COMMAND[0]}; keep one")


def _is_launcher(pod: Pod) -> bool:
    return (pod.metadata.labels or {}).get("kubevirt.io") == "virt-launcher"


def _owner(pod: Pod, what: str) -> OwnerReference:
    for owner in pod.metadata.owner_references or []:
        if owner.is_vmi and owner.name:
            return owner
    raise Misconfigured(
        f"{what} has the label kubevirt.io: virt-launcher, but no VirtualMachineInstance controls it; "
        "remove the label, or let KubeVirt create the pod"
    )


def _controlling_vmi(owner: OwnerReference, vmi: Mapping[str, Any] | None, name: str, what: str) -> Vmi:
    if vmi is None:
        raise Conflict(f"{what}: VirtualMachineInstance {name}, which controls it, is gone; delete the pod")
    found = typed(vmi, Vmi)
    if owner.uid and found.metadata.uid and owner.uid != found.metadata.uid:
        raise Conflict(
            f"{what}: VirtualMachineInstance {name} was created again and gets its own pod; delete this one"
        )
    return found


def _spec_of(vmi: Vmi) -> str:
    return f"{admitted_name(Vmi, vmi.metadata, '')}: spec"


def _obstacle(pod: Pod, options: PinningOptions, vm: str, vmi: Vmi | None, what: str) -> str | None:
    """State why a pod cannot be placed although its options are valid; None when it can."""
    if pod.spec.node_name:
        return (
            f"{what}: spec.nodeName is {pod.spec.node_name}, so no scheduler places the pod; "
            "use spec.nodeSelector instead"
        )
    if not vm:
        return None
    if vmi is not None:
        annotations = pod.metadata.annotations or {}
        conflict = conflict_with_kubevirt(annotations, options, vmi.spec, _spec_of(vmi))
        if conflict is not None:
            return conflict
    is_target = "kubevirt.io/migrationJobUID" in (pod.metadata.labels or {})
    if sidecars_of(pod) or needs_container(pod) or is_target:
        return None
    if has_plugin_label(pod):
        return (
            f"{what} has no volume {PLUGIN_SOCKETS}, because KubeVirt's feature gate Plugins is off; switch "
            f"it on, or serve with --sidecar=annotation, and restart the VM"
        )
    return (
        f"{what} has no container with the command kvplace-hook, because its VMI is older than kvplace "
        f"or than its annotations; restart the VM, or annotate it with {ON_FAILURE}: float"
    )


def request_of_pod(pod: Pod, options: PinningOptions, size: Size, what: str, vm: str = "") -> PodRequest:
    """Combine the options, size and devices of a pod; raises Misconfigured that begins with `what`.

    `vm` is `namespace/name` of its VM, empty for a plain pod.
    """
    containers = pod.spec.containers
    if vm:
        containers = [containers[compute_index(containers)]]
    else:
        options = options.of_plain_pod()
    devices = devices_of_containers(containers, what)
    request = Request(size.vcpus, options, size.memory, size.huge_pages, size.io_threads, devices)
    return PodRequest.of(request, pod.metadata.annotations or {}, vmi=vm)


def _without(
    new: NewPod,
    what: str,
    settings: AdmissionSettings,
    keys: tuple[str, ...],
    warnings: tuple[str, ...] = (),
) -> Admitted:
    """Admit a pod that is not placed: without these annotations, and otherwise as it is."""
    pod, patch = new.pod, list[Operation]()
    after = edited(new.raw, patch)
    if any(key in (pod.metadata.annotations or {}) for key in keys):
        stored = after.object("metadata").object("annotations")
        for key in keys:
            stored.drop(key)
    _complete_sidecars(pod, after, what, settings)
    return Admitted(after.values, warnings, patch)


def _complete_sidecars(pod: Pod, after: EditedObject, what: str, settings: AdmissionSettings) -> None:
    """Complete the hooks in the pod of a VM, also of one that is not placed any more."""
    if _is_launcher(pod) and (sidecars_of(pod) or needs_container(pod)):
        add_sidecar_fields(pod, after.object("spec"), what, settings.sidecar_image)


def _write(after: EditedObject, request: PodRequest, removed: tuple[str, ...] = _NOT_KEPT) -> None:
    metadata = after.object("metadata")
    annotations = metadata.object("annotations")
    for key in removed:
        if key != REQUEST:
            annotations.drop(key)
    annotations.put(REQUEST, write_request(request))
    metadata.object("labels").put(PLACED_LABEL, "true")
    drop_managed_fields(metadata)


def _set_scheduler(spec: EditedObject, pod: Pod, settings: AdmissionSettings) -> tuple[str, ...]:
    given = pod.spec.scheduler_name
    if not given or given == _DEFAULT_SCHEDULER:
        # An operator who added our extender to the main scheduler has set its name here.
        spec.put("schedulerName", settings.scheduler_name)
    elif given not in (settings.scheduler_name, *settings.other_schedulers):
        warning = (
            f"scheduler {given} is not known to call kvplace's extender; if it does not, the pod stays "
            "Pending: remove schedulerName, or name the scheduler in --other-scheduler of kvplace serve"
        )
        return (warning,)
    return ()
