"""A host's files, small enough to change in a test."""

from __future__ import annotations

from pathlib import Path

from kvplace.agent.this_machine import AgentSettings
from kvplace.core.scalars import CpuMask, NodeName
from kvplace.service.connections import Address

NODE = NodeName("worker-1")
CPUS = 8
CONFIG = "var/lib/kubelet/config.yaml"
STATE = "var/lib/kubelet/cpu_manager_state"
STATIC_STATE = {
    "policyName": "static",
    "defaultCpuSet": "0-1,4-5",
    "entries": {"pod": {"main": "2-3,6-7"}},
    "checksum": 0,
}


class Host:
    """Two sockets, each a NUMA node with two cores: CPU n and n + 4 are threads of one core."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.online(set(range(CPUS)))

    def online(self, cpus: set[int]) -> None:
        """Show these CPUs as online, and no topology of the others, as the kernel does."""
        self.write("sys/devices/system/cpu/online", ",".join(map(str, sorted(cpus))))
        self.write("sys/devices/system/cpu/possible", f"0-{CPUS - 1}")
        for cpu in range(CPUS):
            folder = f"sys/devices/system/cpu/cpu{cpu}"
            if cpu not in cpus:
                self.remove(f"{folder}/topology")
                continue
            socket = cpu % 4 // 2
            threads = {cpu % 4, cpu % 4 + 4} & cpus
            package = {other for other in cpus if other % 4 // 2 == socket}
            self.write(f"{folder}/topology/thread_siblings_list", _listed(threads))
            self.write(f"{folder}/topology/core_siblings_list", _listed(package))
            self.write(f"{folder}/topology/physical_package_id", str(socket))
            self.write(f"{folder}/cache/index3/level", "3")
            self.write(f"{folder}/cache/index3/shared_cpu_list", _listed(package))
        for node in (0, 1):
            folder = f"sys/devices/system/node/node{node}"
            self.write(f"{folder}/cpulist", _listed({cpu for cpu in cpus if cpu % 4 // 2 == node}))
            self.write(f"{folder}/distance", "10 21" if node == 0 else "21 10")
            sizes = f"Node {node} MemTotal:       16777216 kB\nNode {node} MemFree:        15728640 kB\n"
            self.write(f"{folder}/meminfo", sizes)
        self.write("sys/devices/system/node/online", "0-1")

    def huge_pages(self, node: int, count: int, kib: int = 1 << 20) -> None:
        """Set the number of huge pages of a NUMA node."""
        folder = f"sys/devices/system/node/node{node}/hugepages/hugepages-{kib}kB"
        self.write(f"{folder}/nr_hugepages", str(count))

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def remove(self, folder: str) -> None:
        for file in (self.root / folder).glob("*"):
            file.unlink()
        if (self.root / folder).exists():
            (self.root / folder).rmdir()

    def settings(self, reserved: CpuMask | None = None) -> AgentSettings:
        return AgentSettings(
            node=NODE,
            health_address=Address("127.0.0.1", 0),
            host=self.root,
            reserved=reserved,
            check_machine_every_s=0.02,
        )


def _listed(cpus: set[int]) -> str:
    return ",".join(map(str, sorted(cpus)))
