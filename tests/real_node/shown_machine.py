"""A machine of two NUMA nodes in the place of what sysfs shows in a sandbox: to the kubelet and to the agent.

The first has CPU 0 and CPU 2, the second CPU 1. This machine may have no CPU 2, so no container may get it.
The kubelet, which would write it into control groups, does not see it: it reads the links in the folders of
the NUMA nodes. Containers have a sysfs of their own, which shows this machine.
"""

from __future__ import annotations

from collections.abc import Mapping

from harness.real_node.sandbox import Sandbox

CPUS = {0: (0, 2), 1: (1,)}
"""The CPUs of each NUMA node."""
_SHOWN = "/run/shown-machine"
_SYSTEM = "/sys/devices/system"
_PCI = "/sys/bus/pci/devices"
_MEMORY_KB = 4 << 20


def show_two_numa_nodes(sandbox: Sandbox, devices: Mapping[str, int] | None = None) -> None:
    """Show it in the sandbox; `devices` are NUMA nodes by PCI address, and there are no other PCI devices."""
    for node, cpus in CPUS.items():
        folder = f"{_SHOWN}/node/node{node}"
        size = f"Node {node} MemTotal:  {_MEMORY_KB} kB\nNode {node} MemFree:  {_MEMORY_KB} kB\n"
        sandbox.write(f"{folder}/cpulist", f"{_list(cpus)}\n")
        sandbox.write(f"{folder}/distance", "10 21\n" if node == 0 else "21 10\n")
        sandbox.write(f"{folder}/meminfo", size)
        sandbox.run("mkdir", "-p", f"{folder}/hugepages")
        # Not CPU 2.
        sandbox.run("ln", "-s", f"{_SYSTEM}/cpu/cpu{node}", f"{folder}/cpu{node}")
        for cpu in cpus:
            _write_cpu(sandbox, cpu, node)
    for name in ("online", "possible", "has_cpu", "has_memory"):
        sandbox.write(f"{_SHOWN}/node/{name}", "0-1\n")
    for name in ("online", "possible", "present"):
        sandbox.write(f"{_SHOWN}/cpu/{name}", "0-2\n")
    for kind in ("node", "cpu"):
        sandbox.run("mount", "--bind", f"{_SHOWN}/{kind}", f"{_SYSTEM}/{kind}")
    if devices:
        for address, node in devices.items():
            sandbox.write(f"{_SHOWN}/pci/{address}/numa_node", f"{node}\n")
        sandbox.run("mount", "--bind", f"{_SHOWN}/pci", _PCI)


def _write_cpu(sandbox: Sandbox, cpu: int, node: int) -> None:
    """Describe a CPU: a core of its own, in the socket of its NUMA node."""
    described = {
        "core_id": str(cpu),
        "physical_package_id": str(node),
        "thread_siblings_list": str(cpu),
        "core_cpus_list": str(cpu),
        "core_siblings_list": _list(CPUS[node]),
        "package_cpus_list": _list(CPUS[node]),
    }
    for name, text in described.items():
        sandbox.write(f"{_SHOWN}/cpu/cpu{cpu}/topology/{name}", f"{text}\n")


def _list(cpus: tuple[int, ...]) -> str:
    return ",".join(map(str, cpus))
