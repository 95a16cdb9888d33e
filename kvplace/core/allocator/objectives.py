"""The objectives of a placement in their order: each place decides only where all before it are equal."""

from __future__ import annotations

from typing import NamedTuple


class NodeRank(NamedTuple):
    """The objectives that the NUMA nodes of a VM decide; smaller is better."""

    sockets: int
    numa_nodes: int
    far_devices: int
    """NUMA nodes with devices of the VM where it has no CPU."""
    largest_distance: int
    summed_distance: int
    """Of all pairs of its NUMA nodes."""


class CoreRank(NamedTuple):
    """The objectives that the cores decide in NUMA nodes of equal rank; smaller is better."""

    l3_groups: int
    kinds: int
    """Kinds of cores, summed over the shares where the scope spreads."""
    cores: int
    uses: int
    """How often other VMs use the CPUs that a sharing VM names."""
    fragmentation: int
    """What the choice takes from later VMs; the only place that a simple rule decides."""
