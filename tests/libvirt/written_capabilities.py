"""Writes a machine as libvirt's capabilities would show it."""

from __future__ import annotations

from kvplace.core.cpuset import cpus_of, format_cpu_list
from kvplace.core.topology import Topology


def capabilities_of(machine: Topology) -> str:
    """Write a machine out, with pages of 4 KiB as every x86 machine has."""
    cells = []
    core_ids = {core: number for number, core in enumerate(machine.cores)}
    for node in machine.numa_nodes:
        pages = "".join(
            f'<pages unit="KiB" size="{size // 1024}">{count}</pages>'
            for size, count in ((4096, 7), *node.huge_pages.items())
        )
        distances = "".join(f'<sibling id="{n}" value="{value}"/>' for n, value in node.distances.items())
        cpus = "".join(
            f'<cpu id="{cpu}" socket_id="{machine.package_of[cpu]}" die_id="0"'
            f' core_id="{core_ids[machine.core_of[cpu]]}"'
            f' siblings="{format_cpu_list(machine.core_of[cpu])}"/>'
            for cpu in cpus_of(node.cpus)
        )
        cells.append(
            f'<cell id="{node.id}"><memory unit="KiB">{node.memory // 1024}</memory>{pages}'
            f"<distances>{distances}</distances><cpus>{cpus}</cpus></cell>"
        )
    banks = "".join(
        f'<bank id="{number}" level="{level}" type="both" cpus="{format_cpu_list(cpus)}"/>'
        for level, groups in ((2, machine.cores), (3, machine.l3_groups))
        for number, cpus in enumerate(groups)
    )
    return (
        f"<capabilities><host><topology><cells>{''.join(cells)}</cells></topology>"
        f"<cache>{banks}</cache></host></capabilities>"
    )
