"""Writes a machine as the sysfs files that its kernel would show, in memory."""

from __future__ import annotations

from kvplace.core.cpuset import cpus_of, format_cpu_list
from kvplace.core.topology import Topology


class WrittenTree:
    """Files in a dictionary, to be changed at will."""

    name = "written machine"

    def __init__(self, files: dict[str, str]) -> None:
        self.files = files

    def read(self, path: str) -> str | None:
        return self.files.get(path)

    def entries(self, path: str) -> list[str]:
        below = (name[len(path) + 1 :] for name in self.files if name.startswith(path + "/"))
        return sorted({name.partition("/")[0] for name in below})


def sysfs_of(machine: Topology, *, masks: bool = False) -> WrittenTree:
    """Write a machine out; with `masks` as an old kernel does, without lists and with the older names."""
    files: dict[str, str] = {}

    def put_set(folder: str, new: str, old: str, cpus: int, list_suffix: str) -> None:
        if masks:
            files[f"{folder}/{old}"] = hexadecimal(cpus, machine.cpus.bit_length()) + "\n"
        else:
            files[f"{folder}/{new}{list_suffix}"] = format_cpu_list(cpus) + "\n"

    cpu_root, node_root = "sys/devices/system/cpu", "sys/devices/system/node"
    if not masks:
        files[f"{cpu_root}/online"] = format_cpu_list(machine.cpus) + "\n"
    files[f"{cpu_root}/isolated"] = format_cpu_list(machine.isolated) + "\n"
    for cpu in cpus_of(machine.cpus):
        folder = f"{cpu_root}/cpu{cpu}"
        package = next(package for package in machine.packages if package.cpus >> cpu & 1)
        files[f"{folder}/topology/physical_package_id"] = f"{package.id}\n"
        put_set(f"{folder}/topology", "core_cpus", "thread_siblings", machine.core_of[cpu], "_list")
        put_set(f"{folder}/topology", "package_cpus", "core_siblings", package.cpus, "_list")
        files[f"{folder}/cache/index0/level"] = "1\n"
        put_set(f"{folder}/cache/index0", "shared_cpu", "shared_cpu_map", machine.core_of[cpu], "_list")
        files[f"{folder}/cache/index3/level"] = "3\n"
        l3 = next(group for group in machine.l3_groups if group >> cpu & 1)
        put_set(f"{folder}/cache/index3", "shared_cpu", "shared_cpu_map", l3, "_list")
    for node in machine.numa_nodes:
        folder = f"{node_root}/node{node.id}"
        put_set(folder, "cpu", "cpumap", node.cpus, "list")
        files[f"{folder}/meminfo"] = f"Node {node.id} MemTotal:       {node.memory // 1024} kB\n"
        row = " ".join(str(machine.distance(node.id, other.id)) for other in machine.numa_nodes)
        files[f"{folder}/distance"] = row + "\n"
        for size, count in node.huge_pages.items():
            files[f"{folder}/hugepages/hugepages-{size // 1024}kB/nr_hugepages"] = f"{count}\n"
    return WrittenTree(files)


def hexadecimal(cpus: int, bits: int) -> str:
    """Write a mask as the kernel does: words of 32 bits, the highest first."""
    words = [f"{cpus >> shift & 0xFFFFFFFF:08x}" for shift in range(0, max(bits, 1), 32)]
    return ",".join(reversed(words))
