"""The VMs of manifests: their requests as admission reads them, and reports of placements on one machine.

For commands that work without a cluster. A report has the words of the annotations.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvplace.admission.stated_request import devices_elsewhere, expanded, stated_request
from kvplace.cli.explain_lines import asked
from kvplace.cli.output import say
from kvplace.cli.place_session import PlaceDecision, domain_phrases
from kvplace.core.annotations import written_without_effect
from kvplace.core.cpu_map import cpu_map_of
from kvplace.core.cpuset import format_cpu_list, mask_of
from kvplace.core.errors import BadBody, KvplaceError
from kvplace.core.moves.suggestions import move_text
from kvplace.core.placement import Placement, Refusal
from kvplace.core.quantity import about_bytes, counted
from kvplace.core.request import Policy, Request
from kvplace.core.strict_json import Json, near_word, shown
from kvplace.core.topology import Topology
from kvplace.core.well_known_names import (
    CPU_MAP,
    CPU_POLICY,
    CPU_SET,
    DEVICE_NUMA,
    EMULATOR_THREADS,
    GUEST_NUMA,
    NUMA_MEMORY,
    OPTING_IN,
    SMT,
)
from kvplace.machines.machine import Machine

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

    An object that requests no cores is left out and reported on stderr. Raises BadBody for an object that
    admission would refuse, and where no VM is left.
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

    Raises KvplaceError where admission would refuse it.
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


_KEY_WIDTH = 30
_VALUE_WIDTH = 13
_CHANGES = 4
"""Changes that are shown for a VM that does not fit, the smallest first, unless all are wanted."""


def decision_lines(
    vm: StatedVm, machine: Machine, decision: PlaceDecision, changes: int | None = _CHANGES
) -> Iterator[str]:
    """Write one line on the answer, then one for each annotation with its value and its effect."""
    found, request, has_qemu = decision.found, vm.request, vm.kind != "Pod"
    if isinstance(found, Refusal):
        yield f"{vm} does not fit on {machine.name}: {found.message}"
        yield f"  requested: {asked(request, has_qemu=has_qemu)}"
        for suggestion in decision.suggestions.found[:changes]:
            yield f"  {suggestion.sentence}"
        if not decision.suggestions.found:
            yield "  no single change makes it fit"
        return
    size = counted(request.vcpus, "vCPU") + (f", {about_bytes(request.memory)}" if request.memory else "")
    yield f"{vm} fits on {machine.name}: {size}"
    for move in decision.moves:
        yield f"  first move {move_text(move)}"
    options = request.options
    for key, value, effect in (
        (CPU_SET, options.scope.value, ", ".join(domain_phrases(found))),
        (CPU_POLICY, options.policy.value, _ownership(found)),
        (SMT, options.smt.value, _cores(machine.topology, found)),
        (EMULATOR_THREADS, options.emulator_threads.value, _emulator(found) if has_qemu else ""),
        (NUMA_MEMORY, options.numa_memory.value, _memory(found)),
        (GUEST_NUMA, options.guest_numa.value, _cells(found)),
        (DEVICE_NUMA, options.device_numa.value, _devices(request)),
    ):
        if effect:
            yield f"  {key + ':':<{_KEY_WIDTH}}{value:<{_VALUE_WIDTH}}{effect}"
    cpu_map = json.dumps(cpu_map_of(machine.topology, found.cpus_in_order))
    yield f"  {CPU_MAP + ':':<{_KEY_WIDTH}}{cpu_map}"


def _devices(request: Request) -> str:
    return ", ".join(f"{count} {resource}" for resource, count in sorted(request.devices.items()))


def _ownership(placement: Placement) -> str:
    if not placement.owned:
        return f"CPUs {format_cpu_list(placement.cpus)}, which other VMs may use, too"
    return f"{counted(placement.owned.bit_count(), 'CPU')} of its own: {format_cpu_list(placement.owned)}"


def _cores(topology: Topology, placement: Placement) -> str:
    if placement.policy is Policy.NUMA:
        return ""
    cores = [core for core in topology.cores if core & placement.cpus]
    split = [core for core in cores if core & ~(placement.owned or placement.cpus)]
    if not any(core.bit_count() > 1 for core in cores):
        return f"{counted(len(cores), 'core')} of one thread"
    if not split:
        return counted(len(cores), "whole core")
    return f"{counted(len(cores), 'core')}; other VMs may use a thread of {len(split)} of them"


def _emulator(placement: Placement) -> str:
    if not placement.emulator_cpus:
        return ""
    own = " of their own" if placement.emulator_cpus & placement.owned & ~mask_of(placement.vcpus) else ""
    return f"QEMU's own threads on CPUs {format_cpu_list(placement.emulator_cpus)}{own}"


def _memory(placement: Placement) -> str:
    return ", ".join(
        f"{about_bytes(count)} on NUMA node {node}" for node, count in placement.memory.items() if count
    )


def _cells(placement: Placement) -> str:
    return counted(len(placement.guest_cells), "NUMA cell") if placement.guest_cells else ""
