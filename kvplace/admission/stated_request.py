"""The request that a VM, VMI or pod states, as admission would store it: for commands before admission.

KubeVirt writes size and annotations of an instancetype on the VMI before kvplace's admission sees it. A file
with the VM and its instancetype contains everything that decides the cores: `expanded` writes the
instancetype out, as `virtctl expand` does. Source in KubeVirt: pkg/instancetype/apply.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvplace.admission.objects import AdmittedMetadata, Pod, Vm, Vmi, VmiSpec, admitted_name, typed
from kvplace.admission.pod import request_of_pod
from kvplace.admission.size import (
    claimed_devices,
    devices_of_domain,
    size_of_pod,
    sriov_interfaces,
)
from kvplace.admission.vmi import check_vm
from kvplace.core.annotations import check_agreement, read_options
from kvplace.core.errors import BadBody, Misconfigured
from kvplace.core.quantity import counted
from kvplace.core.request import Policy, Request
from kvplace.core.request_json import PodRequest
from kvplace.core.strict_json import Json, shown

_CLUSTER_WIDE = "virtualmachineclusterinstancetype"
_KINDS = (_CLUSTER_WIDE, "virtualmachineinstancetype")
_CPU_FIELDS = {
    "guest": "sockets",
    "maxSockets": "maxSockets",
    "numa": "numa",
    "dedicatedCPUPlacement": "dedicatedCpuPlacement",
    "isolateEmulatorThread": "isolateEmulatorThread",
}
"""Field of `domain.cpu` by the field of an instancetype; the number of vCPUs decides, not their layout."""
_MEMORY_FIELDS = ("guest", "hugepages")
_DOMAIN_FIELDS = ("ioThreadsPolicy", "ioThreads")


def stated_request(document: Mapping[str, Any], *, namespace: str = "") -> PodRequest | None:
    """Read the request of an object; None where it requests no cores (no annotations, or policy `none`).

    Raises BadAnnotation, BadBody or Misconfigured where admission would refuse the object, and BadBody for
    another kind of object.
    """
    match document.get("kind"):
        case "VirtualMachine":
            vm = typed(document, Vm)
            template = vm.spec.template
            annotations = (template.metadata.annotations if template.metadata else None) or {}
            what = f"{admitted_name(Vm, vm.metadata, namespace)}: spec.template.spec"
            if (document.get("spec") or {}).get("instancetype") and read_options(annotations) is not None:
                raise Misconfigured(
                    f"{what}: the size of this VM comes from its instancetype; give the output of "
                    "`virtctl expand` for it, or explain its VMI once it is started"
                )
            return _of_vm(annotations, template.spec, what, _name(vm.metadata, namespace))
        case "VirtualMachineInstance":
            vmi = typed(document, Vmi)
            what = f"{admitted_name(Vmi, vmi.metadata, namespace)}: spec"
            return _of_vm(vmi.metadata.annotations or {}, vmi.spec, what, _name(vmi.metadata, namespace))
        case "Pod":
            return _of_pod(typed(document, Pod), namespace)
        case kind:
            raise BadBody(f"kind is {shown(kind)}; it must be VirtualMachine, VirtualMachineInstance or Pod")


def devices_elsewhere(document: Mapping[str, Any]) -> Iterator[str]:
    """State which devices of a VM or VMI are not in its stated request, because another object names them."""
    match document.get("kind"):
        case "VirtualMachine":
            domain = typed(document, Vm).spec.template.spec.domain
        case "VirtualMachineInstance":
            domain = typed(document, Vmi).spec.domain
        case _:
            return
    if count := sriov_interfaces(domain):
        named = "its NetworkAttachmentDefinition names" if count == 1 else "NetworkAttachmentDefinitions name"
        yield f"{counted(count, 'SR-IOV interface')} not counted as a device: {named} the resource"
    if count := claimed_devices(domain):
        yield f"{counted(count, 'device')} of a ResourceClaim not counted: the claim decides it at the bind"


def _name(metadata: AdmittedMetadata, namespace: str) -> str:
    return f"{namespace or metadata.namespace or 'default'}/{metadata.name or ''}"


def _of_vm(annotations: Mapping[str, str], spec: VmiSpec, what: str, name: str) -> PodRequest | None:
    checked = check_vm(annotations, spec, what)
    if checked is None or checked.options.policy is Policy.NONE:
        return None
    size, devices = checked.size, devices_of_domain(spec.domain, what)
    assert size is not None
    request = Request(size.vcpus, checked.options, size.memory, size.huge_pages, size.io_threads, devices)
    return PodRequest.of(request, annotations, vmi=name)


def _of_pod(pod: Pod, namespace: str) -> PodRequest | None:
    annotations = pod.metadata.annotations or {}
    options = read_options(annotations)
    if options is None or options.policy is Policy.NONE:
        return None
    check_agreement(options, annotations)
    what = admitted_name(Pod, pod.metadata, namespace)
    return request_of_pod(pod, options, size_of_pod(pod.spec.containers, what), what)


def expanded(vm: Mapping[str, Any], beside: Iterable[Mapping[str, Any]]) -> Json:
    """Write the instancetype of a VirtualMachine into its spec; a VM without one is returned as it is.

    `beside` are the objects to search for the instancetype. Raises Misconfigured where it is not
    among them, and where VM and instancetype both set a field: KubeVirt refuses such a VM.
    """
    spec = _mapping(vm, "spec")
    matcher = _mapping(spec, "instancetype")
    if not matcher:
        return dict(vm)
    what = f"VirtualMachine {_mapping(vm, 'metadata').get('name') or 'without a name'}"
    found = _mapping(_instancetype(matcher, beside, what), "spec")
    template = _mapping(spec, "template")
    of_vmi = _mapping(template, "spec")
    domain = _mapping(of_vmi, "domain")
    metadata = _mapping(template, "metadata")
    name = f"instancetype {shown(matcher.get('name'))}"
    cpu = {
        inner: found_cpu[key]
        for key, inner in _CPU_FIELDS.items()
        if key in (found_cpu := _mapping(found, "cpu"))
    }
    memory = {
        key: _mapping(found, "memory")[key] for key in _MEMORY_FIELDS if key in _mapping(found, "memory")
    }
    own = {key: found[key] for key in _DOMAIN_FIELDS if key in found}
    at = f"{what}: spec.template"
    domain = {
        **_joined(domain, own, f"{at}.spec.domain", name),
        "cpu": _joined(_without_layout(domain, at, name), cpu, f"{at}.spec.domain.cpu", name),
        "memory": _joined(_mapping(domain, "memory"), memory, f"{at}.spec.domain.memory", name),
    }
    annotations = _joined(
        _mapping(metadata, "annotations"), _mapping(found, "annotations"), f"{at}.metadata.annotations", name
    )
    return {
        **vm,
        "spec": {
            **{key: value for key, value in spec.items() if key != "instancetype"},
            "template": {
                **template,
                "metadata": {**metadata, "annotations": annotations},
                "spec": {**of_vmi, "domain": domain},
            },
        },
    }


def _instancetype(
    matcher: Mapping[str, Any], beside: Iterable[Mapping[str, Any]], what: str
) -> Mapping[str, Any]:
    name, kind = matcher.get("name"), str(matcher.get("kind") or _CLUSTER_WIDE).lower().removesuffix("s")
    if kind not in _KINDS:
        raise Misconfigured(
            f"{what}: spec.instancetype.kind is {shown(matcher['kind'])}; it must be "
            "VirtualMachineClusterInstancetype or VirtualMachineInstancetype"
        )
    for each in beside:
        if str(each.get("kind")).lower() == kind and _mapping(each, "metadata").get("name") == name:
            return each
    raise Misconfigured(
        f"{what}: its size comes from the instancetype {shown(name)}, which is not in the files; give its "
        "file with one more -f, or the output of `virtctl expand` for the VM"
    )


def _without_layout(domain: Mapping[str, Any], at: str, name: str) -> Json:
    cpu = dict(_mapping(domain, "cpu"))
    for field in ("sockets", "cores", "threads"):
        if cpu.get(field):
            raise _conflict(f"{at}.spec.domain.cpu.{field}", name)
    return cpu


def _joined(own: Mapping[str, Any], added: Mapping[str, Any], at: str, name: str) -> Json:
    for key, value in added.items():
        if own.get(key, value) != value:
            raise _conflict(f"{at}.{key}", name)
    return {**own, **added}


def _conflict(field: str, name: str) -> Misconfigured:
    return Misconfigured(
        f"{field} is set by the VM and by its {name}; KubeVirt refuses this: remove it from the VM"
    )


def _mapping(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a field that should be a mapping; reading the VM itself refuses any other value."""
    value = content.get(key)
    return value if isinstance(value, Mapping) else {}
