"""The kubelet's decisions about CPUs on this node: its configuration file and its CPU manager's state.

Both are files of the host. `/configz` states the same, on the kubelet's port and through the API server's
node proxy. But the right to that proxy is the right to run commands in every pod of every node, and the
kubelet's own certificate can often not be checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.errors import BadBody
from kvplace.core.node_devices import TopologyPolicy
from kvplace.core.scalars import NO_CPUS, CpuMask
from kvplace.documents.reading import read_document
from kvplace.linux.cpu_manager_state import read_cpu_manager_state

STATIC = "static"
"""The kubelet's own policy of giving CPUs to containers."""


@dataclass(frozen=True, slots=True)
class KubeletSettings:
    """The settings of a kubelet that matter for CPUs, with its own defaults."""

    reserved_cpus: CpuMask = NO_CPUS
    """reservedSystemCPUs."""
    topology: TopologyPolicy = field(default_factory=TopologyPolicy)
    """topologyManagerPolicy and topologyManagerScope."""


@dataclass(frozen=True, slots=True)
class KubeletCpus:
    """CPUs that the kubelet's CPU manager holds on this node."""

    observes_only: bool = False
    """Whether it runs its static policy, so that no other process may set cpusets here."""
    held: CpuMask = NO_CPUS
    """CPUs that it has given to containers."""
    problem: str = ""
    """Why its state cannot be read, and what counts instead."""


def read_kubelet_settings(text: str, what: str) -> KubeletSettings:
    """Read a kubelet's configuration file; raises BadBody that names it as `what`."""
    document = read_document(text, what)
    try:
        reserved = parse_cpu_list(_word(document, "reservedSystemCPUs", ""), what="reservedSystemCPUs")
    except ValueError as error:
        raise BadBody(f"{what}: {error}") from None
    return KubeletSettings(
        reserved_cpus=reserved,
        topology=TopologyPolicy(
            _word(document, "topologyManagerPolicy", "none"),
            _word(document, "topologyManagerScope", "container"),
        ),
    )


def read_kubelet_cpus(text: str, what: str, allocatable: CpuMask) -> KubeletCpus:
    """Read the state of the CPU manager; never raises: a state that cannot be read is a problem to report."""
    try:
        state = read_cpu_manager_state(text, what=what)
    except BadBody as error:
        # The kubelet would refuse it as well. Which CPUs are its own cannot be known, so none is given out.
        return KubeletCpus(
            observes_only=STATIC in text, held=allocatable, problem=f"{error}; no CPU is given out"
        )
    return KubeletCpus(observes_only=state.policy == STATIC, held=state.held)


def _word(document: Mapping[str, Any], key: str, default: str) -> str:
    """Read a text or number; null and the empty text are the default, as for the kubelet."""
    found = document.get(key)
    return default if found is None or found == "" else str(found)
