"""The VMs that manifests describe, as admission would read them: for commands that work without a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvplace.admission.stated_request import devices_elsewhere, expanded, stated_request
from kvplace.cli.output import say
from kvplace.core.annotations import written_without_effect
from kvplace.core.errors import BadBody, KvplaceError
from kvplace.core.request import Request
from kvplace.core.strict_json import Json, near_word, shown
from kvplace.core.well_known_names import CPU_SET, OPTING_IN

_KINDS = {"VirtualMachine": "spec.template.metadata", "VirtualMachineInstance": "metadata", "Pod": "metadata"}
"""Where the annotations are, by kind."""


@dataclass(frozen=True, slots=True)
class StatedVm:
    """A VM, VMI or pod of a manifest, and its request."""

    kind: str
    name: str
    """With its namespace before it where the manifest gives one."""
    request: Request
    spec: Mapping[str, Any]
    """The spec of its VMI or pod, with its demands on a node."""
    where: str
    """Its place, for errors."""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def stated_vms(manifests: Sequence[tuple[str, Json]]) -> tuple[StatedVm, ...]:
    """Read the VMs, VMIs and pods among objects with their places, in their order.

    One that requests no cores is left out and reported on stderr. Raises BadBody for what admission would
    refuse, and where no VM is left.
    """
    beside = [content for _, content in manifests]
    found: list[StatedVm] = []
    for where, content in manifests:
        kind = content.get("kind")
        if not isinstance(kind, str) or kind not in _KINDS:
            continue
        try:
            vm = stated_vm(expanded(content, beside) if kind == "VirtualMachine" else content, where)
        except KvplaceError as error:
            raise BadBody(f"{where}: {error}") from None
        named = f"{kind} {_name_of(content)}"
        notes = tuple(written_without_effect(content))
        for note in notes:
            say(f"{named}: {note}")
        if vm is None:
            typo = _typo_in(content)
            if typo or not notes:
                say(f"{named} requests no cores: add {CPU_SET} to its {_KINDS[kind]}.annotations{typo}")
            continue
        for note in devices_elsewhere(content):
            say(f"{named}: {note}")
        if any(other.name == vm.name for other in found):
            raise BadBody(f"{where}: another VM is called {shown(vm.name)}, too; give each a name of its own")
        found.append(vm)
    if not found:
        first = manifests[0][0] if manifests else "the file"
        kinds = sorted({str(content.get("kind")) for _, content in manifests} - _KINDS.keys())
        others = f"; found {', '.join(map(shown, kinds))}" if kinds else ""
        raise BadBody(
            f"{first}: no VirtualMachine, VirtualMachineInstance or Pod that requests cores{others}"
        )
    return tuple(found)


def stated_vm(document: Mapping[str, Any], where: str = "") -> StatedVm | None:
    """Read one VM, VMI or pod, expanded by its instancetype; None where it requests no cores.

    Raises KvplaceError for what admission would refuse.
    """
    stated = stated_request(document)
    if stated is None:
        return None
    kind, spec = document["kind"], document["spec"]
    spec = spec["template"]["spec"] if kind == "VirtualMachine" else spec
    return StatedVm(kind, _name_of(document), stated.request, spec, where)


def _typo_in(content: Mapping[str, Any]) -> str:
    """Name an annotation that is likely a typo of a key that requests cores."""
    holder = content["spec"]["template"] if content["kind"] == "VirtualMachine" else content
    for key in (holder.get("metadata") or {}).get("annotations") or ():
        if near := near_word(key, OPTING_IN):
            return f"; its annotation {shown(key)} is likely a typo of {near!r}"
    return ""


def _name_of(content: Mapping[str, Any]) -> str:
    metadata = content.get("metadata")
    metadata = metadata if isinstance(metadata, Mapping) else {}
    name = str(metadata.get("name") or metadata.get("generateName") or "unnamed")
    return f"{metadata['namespace']}/{name}" if metadata.get("namespace") else name
