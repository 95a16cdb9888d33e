"""The subjects of stories, besides claims, binds, releases and relocations, which all of them have."""

from __future__ import annotations

from enum import Enum


class Kind(Enum):
    """The kind of a story."""

    PLAIN = "plain"
    ROOM = "make-room"
    """Most VMs may move, and now and then one needs a NUMA node that is half full."""
    NODES = "move-between-nodes"
    """The same, and where moves inside a node do not help, a VM migrates to another one."""
    DEVICES = "devices"
    """Most VMs have devices of the host, which the kubelet gives them after the bind."""
    PREEMPTION = "preempt"
    """VMs of higher priority have others evicted, which are created again at once."""
    DRA = "dra"
    """dra-driver-cpu sets the cpusets, and `serve` writes the cores of pods into their ResourceClaims."""
