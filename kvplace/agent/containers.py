"""The containers of this node, as the container runtime or the cgroup tree shows them."""

from __future__ import annotations

from dataclasses import dataclass

from kvplace.core.scalars import NO_CPUS, ContainerId, CpuMask, PodUid
from kvplace.kube.objects import COMPUTE

"""The container of a virt-launcher pod that runs QEMU."""


@dataclass(frozen=True, slots=True)
class Container:
    """One container that is created or running."""

    id: ContainerId
    name: str
    """Empty where only its cgroup is known and its pod is not."""
    pod_uid: PodUid
    namespace: str
    pod: str
    in_vm_pod: bool
    """Whether its pod is a virt-launcher pod."""
    placement: str = ""
    """The pod's annotation kvplace.io/placement when its sandbox was created; it may be newer by now."""
    pid: int = 0
    """Its first process on the host; 0 until it is started, or where it is not known."""
    cpus: CpuMask = NO_CPUS
    """The cpuset that it has now; empty where it has none of its own, or where that is not known."""
    incoming: bool = False
    """Whether a live migration starts its QEMU with the CPU numbers of another node, which must not fail."""

    @property
    def runs_claim(self) -> bool:
        """Whether the CPUs of the pod's claim are for this container.

        In the pod of a VM that is the container with QEMU; in a plain pod every container.
        """
        return self.name == COMPUTE or not self.in_vm_pod
