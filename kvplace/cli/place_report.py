"""The placement of a VM of a manifest on one machine, in the words of its annotations."""

from __future__ import annotations

import json
from collections.abc import Iterator

from kvplace.cli.explain_lines import asked
from kvplace.cli.place_session import Decision
from kvplace.cli.stated_vms import StatedVm
from kvplace.core.cpu_map import cpu_map_of
from kvplace.core.cpuset import format_cpu_list, mask_of
from kvplace.core.moves.suggestions import move_text
from kvplace.core.placement import Placement, Refusal
from kvplace.core.quantity import about_bytes, counted
from kvplace.core.request import Policy, Request
from kvplace.core.topology import Topology
from kvplace.core.well_known_names import (
    CPU_MAP,
    CPU_POLICY,
    CPU_SET,
    DEVICE_NUMA,
    EMULATOR_THREADS,
    GUEST_NUMA,
    NUMA_MEMORY,
    SMT,
)

_KEY_WIDTH = 30
_VALUE_WIDTH = 13
_CHANGES = 4
"""Changes that are shown for a VM that does not fit, the smallest first, unless all are wanted."""


def report_lines(
    vm: StatedVm,
    machine: str,
    topology: Topology,
    decision: Decision,
    changes: int | None = _CHANGES,
) -> Iterator[str]:
    """Write one line on the answer, then one for each annotation with its value and its effect."""
    found, request, has_qemu = decision.found, vm.request, vm.kind != "Pod"
    if isinstance(found, Refusal):
        yield f"{vm} does not fit on {machine}: {found.message}"
        yield f"  requested: {asked(request, has_qemu=has_qemu)}"
        for suggestion in decision.suggestions.found[:changes]:
            yield f"  {suggestion.sentence}"
        if not decision.suggestions.found:
            yield "  no single change makes it fit"
        return
    size = counted(request.vcpus, "vCPU") + (f", {about_bytes(request.memory)}" if request.memory else "")
    yield f"{vm} fits on {machine}: {size}"
    for move in decision.moves:
        yield f"  first move {move_text(move)}"
    options = request.options
    for key, value, effect in (
        (CPU_SET, options.scope.value, _where(found)),
        (CPU_POLICY, options.policy.value, _ownership(found)),
        (SMT, options.smt.value, _cores(topology, found)),
        (EMULATOR_THREADS, options.emulator_threads.value, _emulator(found) if has_qemu else ""),
        (NUMA_MEMORY, options.numa_memory.value, _memory(found)),
        (GUEST_NUMA, options.guest_numa.value, _cells(found)),
        (DEVICE_NUMA, options.device_numa.value, _devices(request)),
    ):
        if effect:
            yield f"  {key + ':':<{_KEY_WIDTH}}{value:<{_VALUE_WIDTH}}{effect}"
    cpu_map = json.dumps(cpu_map_of(topology, found.cpus_in_order))
    yield f"  {CPU_MAP + ':':<{_KEY_WIDTH}}{cpu_map}"


def _devices(request: Request) -> str:
    return ", ".join(f"{count} {resource}" for resource, count in sorted(request.devices.items()))


def _where(placement: Placement) -> str:
    parts = (
        ("socket", placement.packages),
        ("NUMA node", placement.numa_nodes),
        ("L3", placement.l3_groups),
    )
    return ", ".join(f"{noun} {','.join(map(str, ids))}" for noun, ids in parts if ids)


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
