"""The VMs of a rollout: its document and templates, expanded to names and manifests.

A template is a VirtualMachine or VirtualMachineInstance as people write it. Its labels, annotations and spec
are used. Its name, its status and fields of the API server are left out, so an object from a cluster can
serve as a template, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvplace.admission.objects import Vm, Vmi, typed
from kvplace.admission.stated_request import stated_request
from kvplace.core.annotations import meant_keys, read_options
from kvplace.core.errors import BadBody, KvplaceError, Misconfigured
from kvplace.core.quantity import parse_bytes
from kvplace.core.request import OnFailure, Policy, Request
from kvplace.core.scalars import NO_BYTES, Bytes
from kvplace.core.strict_json import Json, json_object, shown
from kvplace.core.vm_stages import VmStage
from kvplace.core.well_known_names import ASKING, ROLLOUT_LABEL
from kvplace.documents.model import numbered, read_model
from kvplace.documents.reading import read_manifests, source_name
from kvplace.documents.rollout import MOST_VMS, RolloutDocument, TemplatedVms, name_problem
from kvplace.kube.node_filters import PodDemands, demands_of

API_VERSION = "kubevirt.io/v1"
KINDS = ("VirtualMachine", "VirtualMachineInstance")
_WRITTEN_BY_KUBECTL = "kubectl.kubernetes.io/"
_STAYS_OFF = ("Halted", "Manual", "WaitAsReceiver")

_MOST_BYTES = 900_000
"""A ConfigMap holds 1 MiB."""


@dataclass(frozen=True)
class Template:
    """One template, and the request of its VMs."""

    content: Mapping[str, Any]
    kind: str
    request: Request | None
    """None where the VMs did not opt in, or their size is not known before they are made."""
    goal: VmStage
    """The last stage that its VMs reach."""
    demands: PodDemands
    """The demands of its VMs on a node, beside cores."""
    stays_off: bool = False
    """Whether its VMs are only stored, and another client starts them."""
    pod_memory: Bytes = NO_BYTES
    """The least memory that the pod of each VM requests, as far as it is known, without QEMU's overhead."""
    meant: Mapping[str, str] = field(default_factory=dict)
    """Annotations that are likely typos of kvplace's, each with the right key."""

    def manifest(self, name: str, namespace: str, rollout: str) -> Json:
        """Write the VM of that name; the rollout's label is on it, its VMI and its pod."""
        label = {ROLLOUT_LABEL: rollout}
        spec = self.content["spec"]
        if self.kind == "VirtualMachine":
            inner = spec["template"]
            metadata = inner.get("metadata") or {}
            labels = {**(metadata.get("labels") or {}), **label}
            spec = {**spec, "template": {**inner, "metadata": {**metadata, "labels": labels}}}
        metadata = {"name": name, "namespace": namespace, "labels": {**self._kept("labels"), **label}}
        if annotations := self._kept("annotations"):
            metadata["annotations"] = annotations
        return {"apiVersion": API_VERSION, "kind": self.kind, "metadata": metadata, "spec": spec}

    def _kept(self, part: str) -> dict[str, str]:
        given = (self.content.get("metadata") or {}).get(part) or {}
        return {key: value for key, value in given.items() if not key.startswith(_WRITTEN_BY_KUBECTL)}


def read_template(content: Mapping[str, Any], what: str, until: VmStage = VmStage.PINNED) -> Template:
    """Check a template; raises Misconfigured, which begins with `what`."""
    kind = content.get("kind")
    if kind not in KINDS:
        given = "missing" if kind is None else shown(kind)
        raise BadBody(f"{what}: kind is {given}; it must be {' or '.join(KINDS)}")
    if content.get("apiVersion") != API_VERSION:
        raise BadBody(f"{what}: apiVersion is {shown(content.get('apiVersion'))}; it must be {API_VERSION}")
    _check_shape(content, kind, what)
    try:
        return _template(content, kind, until)
    except KvplaceError as error:
        raise Misconfigured(f"{what}: {error}") from None


def template_file(path: str, folder: Path) -> tuple[str, Json]:
    """Read the only template of a file that a document in `folder` names."""
    source = path if path == "-" else str(folder / path)
    found = read_manifests(source)
    if len(found) != 1:
        raise BadBody(f"{source_name(source)} holds {len(found)} templates; name a file with one of them")
    return found[0]


def _template(content: Mapping[str, Any], kind: str, until: VmStage) -> Template:
    content = {key: value for key, value in content.items() if value is not None}
    spec = content["spec"]
    of_vmi = content if kind == "VirtualMachineInstance" else spec["template"]
    read: Vm | Vmi = typed(content, Vm) if kind == "VirtualMachine" else typed(content, Vmi)
    annotations = (of_vmi.get("metadata") or {}).get("annotations") or {}
    options = read_options(annotations)
    if kind == "VirtualMachine":
        for key in ASKING:
            if key in (read.metadata.annotations or {}) and key not in annotations:
                raise Misconfigured(
                    f"annotation {key} has no effect on the VM itself; move it to "
                    "spec.template.metadata.annotations"
                )
    stated = None if spec.get("instancetype") else stated_request(content)
    asks = options is not None and options.policy is not Policy.NONE
    goals = [until]
    stays_off = kind == "VirtualMachine" and (
        spec.get("runStrategy") in _STAYS_OFF or spec.get("running") is False
    )
    if stays_off:
        goals.append(VmStage.CREATED)
    if not asks or options is None or options.on_failure is OnFailure.FLOAT:
        goals.append(VmStage.RUNNING)
    goal = min(goals, key=lambda stage: stage.rank)
    at = "spec" if of_vmi is content else "spec.template.spec"
    demands = demands_of(of_vmi["spec"], at, is_vm=True)
    request = None if stated is None else stated.request
    domain = of_vmi["spec"].get("domain") or {}
    memory = NO_BYTES if request is None else _pod_memory(request, domain, f"{at}.domain")
    return Template(content, kind, request, goal, demands, stays_off, memory, meant_keys(annotations))


def _pod_memory(request: Request, domain: Mapping[str, Any], at: str) -> Bytes:
    """Read the pod's request of `memory`: huge pages are another resource, and requests count first."""
    if request.huge_pages:
        return NO_BYTES
    requested = ((domain.get("resources") or {}).get("requests") or {}).get("memory")
    if requested is None:
        return request.memory
    try:
        return parse_bytes(requested)
    except ValueError as error:
        raise Misconfigured(f"{at}.resources.requests.memory: {error}") from None


def _check_shape(content: Mapping[str, Any], kind: str, what: str) -> None:
    """Raise BadBody where a mapping is missing; admission would take an empty one in its place."""
    _mapping(content, "spec", what)
    if kind == "VirtualMachine":
        _mapping(content["spec"], "template", f"{what}: spec")
        _mapping(content["spec"]["template"], "spec", f"{what}: spec.template")


def _mapping(content: Mapping[str, Any], key: str, what: str) -> None:
    if key not in content:
        raise BadBody(f"{what}: {key} is missing")
    if not isinstance(content[key], dict):
        raise BadBody(f"{what}: {key} is {shown(content[key])}; it must be a mapping")


@dataclass(frozen=True)
class WantedVm:
    """One VM of a rollout."""

    name: str
    template: Template

    @property
    def goal(self) -> VmStage:
        return self.template.goal


@dataclass(frozen=True)
class Rollout:
    """Everything that is to be made, in this order."""

    document: RolloutDocument
    """With its templates in it."""
    namespace: str
    vms: tuple[WantedVm, ...]

    @property
    def name(self) -> str:
        return self.document.name

    def manifest(self, vm: WantedVm) -> Json:
        """Write the object that is applied for a VM."""
        return vm.template.manifest(vm.name, self.namespace, self.name)

    @property
    def text(self) -> str:
        """The document as it is kept in the cluster."""
        return self.document.model_dump_json(by_alias=True, exclude_unset=True)


def read_rollout(content: object, namespace: str, *, folder: Path = Path(), what: str = "rollout") -> Rollout:
    """Read a rollout document, with the templates that it names below `folder`; raises Misconfigured.

    `namespace` counts where the document names none.
    """
    return rollout_of(read_model(RolloutDocument, content, what), namespace, folder=folder, what=what)


def stored_rollout(text: str, namespace: str, name: str) -> Rollout:
    """Read a rollout as the cluster keeps it; raises Misconfigured when another client has changed it."""
    what = f"the document of rollout {name} in ConfigMap kvplace-rollout-{name}"
    return read_rollout(json_object(text, what=what), namespace, what=what)


def rollout_of(
    document: RolloutDocument, namespace: str, *, folder: Path = Path(), what: str = "rollout"
) -> Rollout:
    """Expand a document; raises Misconfigured."""
    entries: list[TemplatedVms] = []
    vms: dict[str, WantedVm] = {}
    namespace = document.namespace or namespace
    for number, entry in enumerate(document.vms):
        where, content = f"{what}: vms[{number}].template", entry.template
        if isinstance(content, str):
            where, content = template_file(content, folder)
        template = read_template(content, where, document.until)
        _check_namespace(content, namespace, where)
        entries.append(entry.model_copy(update={"template": content}))
        for name in _names(document, entry):
            problem = name_problem(name)
            if problem is not None:
                raise BadBody(f"{what}: vms[{number}]: {problem}")
            if name in vms:
                raise BadBody(f"{what}: vms[{number}]: duplicate VM {name!r}; give it another name")
            vms[name] = WantedVm(name, template)
    if len(vms) > MOST_VMS:
        raise BadBody(f"{what} has {len(vms)} VMs; one rollout makes at most {MOST_VMS}")
    whole = document.model_copy(update={"vms": tuple(entries), "namespace": namespace})
    rollout = Rollout(whole, namespace, tuple(vms.values()))
    size = len(rollout.text.encode())
    if size > _MOST_BYTES:
        raise BadBody(f"{what} takes {size} bytes with its templates; divide it in two")
    return rollout


def _names(document: RolloutDocument, entry: TemplatedVms) -> Iterator[str]:
    if entry.names is not None:
        yield from entry.names
    else:
        yield from numbered(entry.name or document.name, entry.count)


def _check_namespace(content: Mapping[str, object], namespace: str, where: str) -> None:
    metadata = content.get("metadata")
    named = metadata.get("namespace") if isinstance(metadata, dict) else None
    if named and named != namespace:
        raise Misconfigured(
            f"{where}: the template is of namespace {named}, and the VMs are to be made in {namespace}; "
            f"give -n {named}, or remove metadata.namespace"
        )
