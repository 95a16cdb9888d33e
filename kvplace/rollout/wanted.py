"""The VMs of a rollout: its document, expanded to names and manifests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kvplace.core.errors import BadBody, Misconfigured
from kvplace.core.strict_json import Json, json_object
from kvplace.core.vm_stage import VmStage
from kvplace.documents.model import numbered, read_model
from kvplace.documents.rollout import MOST_VMS, RolloutDocument, TemplatedVms, name_problem
from kvplace.rollout.templates import Template, read_template, template_file

_MOST_BYTES = 900_000
"""A ConfigMap holds 1 MiB."""


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

    @cached_property
    def by_name(self) -> Mapping[str, WantedVm]:
        return {vm.name: vm for vm in self.vms}

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
