"""How the CPUs of one machine are used, in numbers: what a list of nodes shows of each."""

from __future__ import annotations

from dataclasses import dataclass

from kvplace.core.free_blocks import Domain, free_blocks_of
from kvplace.core.ledger import Ledger
from kvplace.core.scalars import CpuMask
from kvplace.core.topology import Topology


@dataclass(frozen=True, slots=True)
class CpuUsage:
    """Counts of CPUs, and of the pods that have claims."""

    cpus: int
    """All CPUs of the machine."""
    owned: int
    """CPUs that one pod has for itself."""
    shared: int
    """CPUs without an owner that claims name."""
    free: int
    """CPUs that an exclusive pod could get."""
    largest_numa: int
    """Most of those inside one NUMA node."""
    pods: int

    def document(self) -> dict[str, int]:
        """Write it as JSON: `status.usage` of a NodeTopology."""
        return {
            "cpus": self.cpus,
            "owned": self.owned,
            "shared": self.shared,
            "free": self.free,
            "largestNuma": self.largest_numa,
            "pods": self.pods,
        }


def usage_of(topology: Topology, allocatable: CpuMask, ledger: Ledger, free: CpuMask) -> CpuUsage:
    """Count what a ledger uses of a machine and what it leaves free."""
    free_blocks = free_blocks_of(topology, allocatable, free)
    return CpuUsage(
        topology.cpus.bit_count(),
        ledger.owned.bit_count(),
        ledger.shared.bit_count(),
        free_blocks.free,
        free_blocks.largest[Domain.NUMA].cpus,
        len(ledger.claims),
    )
