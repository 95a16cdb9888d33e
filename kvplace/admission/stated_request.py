"""The request that a VM, VMI or pod states, as admission would store it: for commands before admission."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvplace.admission.objects import Metadata, Pod, Vm, Vmi, VmiSpec, title, typed
from kvplace.admission.pod_size import size_of_pod
from kvplace.admission.vm_size import size_of_vm
from kvplace.admission.vmi import check_vm
from kvplace.core.annotations import (
    read_options,
)
from kvplace.core.contradictions import check_agreement
from kvplace.core.errors import BadBody, Misconfigured
from kvplace.core.request import Policy, Request
from kvplace.core.request_document import PodRequest
from kvplace.core.strict_json import shown


def stated_request(document: Mapping[str, Any], *, namespace: str = "") -> PodRequest | None:
    """Read what an object asks for; None where it asks for no cores (no annotations, or policy `none`).

    Raises BadAnnotation, BadBody or Misconfigured where admission would refuse the object, and BadBody for
    another kind of object.
    """
    match document.get("kind"):
        case "VirtualMachine":
            vm = typed(document, Vm)
            template = vm.spec.template
            annotations = (template.metadata.annotations if template.metadata else None) or {}
            what = f"{title(Vm, vm.metadata, namespace)}: spec.template.spec"
            if (document.get("spec") or {}).get("instancetype") and read_options(annotations) is not None:
                raise Misconfigured(
                    f"{what}: the size of this VM comes from its instancetype; give what "
                    "`virtctl expand` prints for it, or ask about its VMI once it is started"
                )
            return _of_vm(annotations, template.spec, what, _name(vm.metadata, namespace))
        case "VirtualMachineInstance":
            vmi = typed(document, Vmi)
            what = f"{title(Vmi, vmi.metadata, namespace)}: spec"
            return _of_vm(vmi.metadata.annotations or {}, vmi.spec, what, _name(vmi.metadata, namespace))
        case "Pod":
            return _of_pod(typed(document, Pod), namespace)
        case kind:
            raise BadBody(f"kind is {shown(kind)}; it must be VirtualMachine, VirtualMachineInstance or Pod")


def _name(metadata: Metadata, namespace: str) -> str:
    return f"{namespace or metadata.namespace or 'default'}/{metadata.name or ''}"


def _of_vm(annotations: Mapping[str, str], spec: VmiSpec, what: str, name: str) -> PodRequest | None:
    options = read_options(annotations)
    if options is None or check_vm(annotations, spec, what, None) is None:
        return None
    size = size_of_vm(spec.domain, what)
    request = Request(size.vcpus, options, size.memory, size.huge_pages, size.io_threads)
    return PodRequest.of(request, annotations, vmi=name)


def _of_pod(pod: Pod, namespace: str) -> PodRequest | None:
    annotations = pod.metadata.annotations or {}
    options = read_options(annotations)
    if options is None or options.policy is Policy.NONE:
        return None
    check_agreement(options, annotations)
    size = size_of_pod(pod.spec.containers, title(Pod, pod.metadata, namespace))
    request = Request(size.cpus, options.of_plain_pod(), size.memory, size.huge_pages)
    return PodRequest.of(request, annotations)
