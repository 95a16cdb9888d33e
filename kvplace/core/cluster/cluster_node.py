"""A node of a cluster with the VMs that run on it: what a plan and a simulation start from."""

from __future__ import annotations

from dataclasses import dataclass

from kvplace.core.free_resources import Free, free_of
from kvplace.core.ledger import Ledger, claim_of
from kvplace.core.node_devices import NodeDevices
from kvplace.core.occupant import Occupant, devices_beside
from kvplace.core.scalars import NodeName, PodUid
from kvplace.core.topology import Topology


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """One node: its machine and its running VMs."""

    name: NodeName
    topology: Topology
    running: tuple[Occupant, ...] = ()
    pools_shrink: bool = False
    """Whether an agent can take CPUs out of the pools of `numa` VMs."""
    devices: NodeDevices | None = None
    """Free devices, together with devices of the running VMs; None where nothing is known of them."""

    @property
    def free(self) -> Free:
        """CPUs, memory and devices that the running VMs leave free."""
        claims = [claim_of(PodUid(vm.id), vm.placement) for vm in self.running]
        devices = devices_beside(self.devices, self.running)
        return free_of(self.topology, Ledger(), claims, pools_shrink=self.pools_shrink, devices=devices)
