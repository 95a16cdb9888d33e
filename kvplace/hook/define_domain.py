"""The answer to OnDefineDomain: the domain pinned according to this pod's placement, or an error.

When the domain cannot be pinned, its owner decides: `on-failure: wait` makes it an error, which virt-handler
shows on the VMI before it tries again; `on-failure: float` returns the domain unchanged, with a warning in
the log. No answer is ever empty, because KubeVirt takes that for a broken document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from kvplace.core.cpuset import format_cpu_list
from kvplace.core.errors import BadDomainXml, Corrupt, KvplaceError, Misconfigured
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.protobuf import MAX_MESSAGE_BYTES
from kvplace.core.quantity import counted
from kvplace.core.request import OnFailure
from kvplace.hook.bounds import (
    MemoryTrial,
    allowed_memory_nodes,
    check_placed_cpus,
    node_of_cpus,
    settle_memory,
    try_to_bind,
    unprotected,
)
from kvplace.hook.local_devices import compare_devices
from kvplace.hook.pod import on_failure_of_pod, placement_of_pod
from kvplace.hook.process import PodEnvironment, log

_FIELD_BYTES = 16
"""Bytes that a message adds to the document."""

KEEPS_BUSES = (1, 8)
"""First version of KubeVirt that keeps PCIe expander buses of a hook with their NUMA nodes."""
_IMAGE_VERSION = re.compile(r":v?([0-9]{1,3})\.([0-9]{1,3})\.[^/]*$", re.ASCII)

MIGRATION_TARGET = "migration target: KubeVirt discards this answer; libvirt asks again when the VM arrives"


def define_domain(xml: bytes, vmi: bytes, env: PodEnvironment, trial: MemoryTrial = try_to_bind) -> bytes:
    """Pin the domain; raises KvplaceError when it cannot be pinned and must wait.

    `trial` changes the memory policy of this process for a moment (see `bounds`).
    """
    return _defined(xml, env, about_vmi(vmi, env), trial, no_buses=_drops_buses(vmi))


def define_arrival(xml: bytes, env: PodEnvironment, trial: MemoryTrial = try_to_bind) -> bytes:
    """Pin a domain that migrates here, which has the pins of the machine that it comes from.

    Where a VM starts unpinned it is unpinned here. The guest's cells stay: a migration cannot change the
    guest's view. Raises KvplaceError when it cannot be pinned and must not come; it then stays on its source.
    """
    return _defined(xml, env, {"node": env.node, "note": "migration"}, trial, arrives=True)


def _defined(
    xml: bytes,
    env: PodEnvironment,
    about: Mapping[str, str],
    trial: MemoryTrial,
    *,
    no_buses: str = "",
    arrives: bool = False,
) -> bytes:
    begins = "the VM arrives unpinned" if arrives else "the VM starts unpinned"
    waits = "the VM stays where it is: " if arrives else "the VM waits: "
    may_float = bool(xml) and on_failure_of_pod(env) is OnFailure.FLOAT
    try:
        bound = placement_of_pod(env)
        if bound.placement.floats and xml:
            why = "its pod has no cores, as its options allow"
            log("warning", f"{begins}: {why}", about)
            return _unpinned(xml) if arrives else xml
        placement = _possible(bound, env, about, trial)
        if arrives:
            placement = replace(placement, guest_cells=())
        answer = _rewritten(xml, replace(bound, placement=placement), env, about, no_buses)
    except KvplaceError as error:
        if may_float:
            log("warning", f"{begins}, because on-failure is float: {error}", about)
            return _unpinned(xml) if arrives else xml
        log("error", f"{waits}{error}", about)
        raise
    except Exception as error:
        failure = _unexpected(error, about)
        if may_float:
            return _unpinned(xml) if arrives else xml
        raise failure from error
    log("info", _pinned(placement), about)
    return answer


def _unexpected(error: Exception, about: Mapping[str, str]) -> KvplaceError:
    if isinstance(error, ModuleNotFoundError):
        sentence = (
            f"the Python of the hook lacks the package {error.name}; use the image of kvplace's hook, or "
            "install kvplace for this Python"
        )
        log("error", sentence, about)
        return Misconfigured(sentence)
    log("error", f"the hook failed with an unexpected error: {error!r}", about)
    return Corrupt(f"kvplace's hook failed: {error!r}; please report it with the domain XML")


def _unpinned(xml: bytes) -> bytes:
    from kvplace.domainxml import unpin

    return unpin(xml)


def _possible(
    bound: PodPlacement, env: PodEnvironment, about: Mapping[str, str], trial: MemoryTrial
) -> Placement:
    """Check a placement against this machine; memory that cannot be bound is left out with a warning."""
    check_placed_cpus(bound, env)
    if (risk := unprotected(bound, env)) is not None:
        log("warning", f"the VM starts because its on-failure is float: {risk}", about)
    nodes = allowed_memory_nodes(env)
    placement, obstacle = settle_memory(bound.placement, nodes, on_failure_of_pod(env), trial)
    if obstacle is not None:
        log("warning", f"memory is not bound: {obstacle}", about)
    return placement


def about_vmi(vmi: bytes, env: PodEnvironment) -> dict[str, str]:
    """Return the fields of log lines about this VM; fewer when the VMI cannot be read."""
    about = {"vm": "", "node": env.node, "uid": ""}
    try:
        document = json.loads(vmi)
        metadata = document["metadata"]
        about["vm"] = f"{metadata.get('namespace', '')}/{metadata.get('name', '')}"
        about["uid"] = str(metadata.get("uid", ""))
        if is_migration_target(document):
            about["note"] = MIGRATION_TARGET
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        about["note"] = "the VMI cannot be read"
    return about


def is_migration_target(vmi: Mapping[str, Mapping[str, Mapping[str, object]]]) -> bool:
    """Whether KubeVirt asks for the domain of a migration target; raises for a VMI of another shape."""
    state = (vmi.get("status") or {}).get("migrationState") or {}
    return bool(state.get("targetPod")) and not state.get("completed")


def _drops_buses(vmi: bytes) -> str:
    """State why KubeVirt does not keep expander buses between its calls; empty where it does, or may."""
    try:
        image = str(json.loads(vmi)["status"]["launcherContainerImageVersion"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
    version = _IMAGE_VERSION.search(image)
    if version is None or (int(version[1]), int(version[2])) >= KEEPS_BUSES:
        return ""
    return f"KubeVirt {version[1]}.{version[2]} does not keep their buses; 1.8 does"


def _rewritten(
    xml: bytes, bound: PodPlacement, env: PodEnvironment, about: Mapping[str, str], no_buses: str
) -> bytes:
    """Check the devices of a domain and rewrite it; `no_buses`: why it gets no expander buses."""
    from kvplace.domainxml import devices_of, rewrite

    def report(level: str, sentence: str) -> None:
        log(level, sentence, about)

    nodes = compare_devices(devices_of(xml), bound, on_failure_of_pod(env), env, report)
    if nodes and no_buses and bound.placement.guest_cells:
        report("warning", f"the guest does not see the NUMA nodes of its devices: {no_buses}")
        nodes = {}
    answer = rewrite(xml, bound.placement, node_of_cpus(env), partial(report, "warning"), nodes)
    if len(answer) > MAX_MESSAGE_BYTES - _FIELD_BYTES:
        raise BadDomainXml(f"the pinned domain has {len(answer)} bytes, more than virt-launcher accepts")
    return answer


def _pinned(placement: Placement) -> str:
    what = f"{counted(len(placement.vcpus), 'vCPU')} to" if placement.vcpus else "all vCPUs within"
    cells = (
        f"; the guest sees {counted(len(placement.guest_cells), 'NUMA cell')}"
        if placement.guest_cells
        else ""
    )
    return (
        f"pinned {what} CPUs {format_cpu_list(placement.cpus)}, emulator to "
        f"{format_cpu_list(placement.emulator_cpus) or 'any'}, memory {placement.memory_mode.value} "
        f"on NUMA nodes {','.join(map(str, placement.numa_nodes)) or 'unknown'}{cells}"
    )
