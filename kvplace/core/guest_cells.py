"""The NUMA cells of a guest with `guest-numa: mirror`.

Guest NUMA cells lie on the host's NUMA nodes, guest cores on host cores where that can be reported truly, and
cells are as far apart as their nodes. Cells that QEMU cannot express (without memory, with an odd number of
bytes) are corrected here; the rewriting of the domain only writes the cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvplace.core.cpuset import MAX_CPU, bits_of, cpus_of, format_cpu_list, mask_of
from kvplace.core.json_fields import MAX_BYTES, Fields
from kvplace.core.scalars import NO_BYTES, Bytes, CpuId, NumaId
from kvplace.core.strict_json import Json, shown

if TYPE_CHECKING:
    from kvplace.core.topology import Topology

CELL_GRANULE = 1 << 20
"""libvirt rounds every cell up to whole MiB, so finer cells would make the guest larger."""

LOCAL_DISTANCE, LEAST_DISTANCE, MOST_DISTANCE = 10, 11, 254
"""To itself, and between cells: 10 is refused there by libvirt, 255 means unreachable to the guest."""


@dataclass(frozen=True, slots=True)
class GuestCell:
    """One NUMA cell of a guest and the host NUMA node under it."""

    id: int
    node: NumaId
    vcpus: tuple[int, ...]
    """Ascending; empty when the node gives memory alone."""
    memory: Bytes
    """Bytes; 0 when unknown, and then the cells share the guest's memory evenly."""
    distances: tuple[int, ...]
    """To every cell, by its id."""
    threads: int = 1
    """vCPUs of each guest core, the same in all cells of a guest: 1 where host siblings do not line up."""


def mirrored(
    topology: Topology, vcpus: Sequence[CpuId], memory: Mapping[NumaId, Bytes]
) -> tuple[GuestCell, ...]:
    """Make the guest's cells, in the order of their first vCPU, memory-only ones last.

    `vcpus` has the CPU of each vCPU (without any there are no cells), `memory` the bytes by NUMA node. The
    vCPUs of a node that gives no memory join the nearest node that does: Linux allocates their memory there,
    and QEMU has no cell without memory.
    """
    if not vcpus:
        return ()
    amounts = _memory_of_nodes(memory)
    home = {cpu: node.id for node in topology.numa_nodes for cpu in cpus_of(node.cpus)}
    vcpus_at: dict[NumaId, list[int]] = {}
    for vcpu, cpu in enumerate(vcpus):
        node = home[cpu]
        if amounts and node not in amounts:
            node = min(amounts, key=lambda other: (topology.distance(home[cpu], other), other))
        vcpus_at.setdefault(node, []).append(vcpu)
    for node in amounts:
        vcpus_at.setdefault(node, [])
    threads = _threads(topology, vcpus, vcpus_at)
    return tuple(
        GuestCell(
            id=number,
            node=node,
            vcpus=tuple(members),
            memory=amounts.get(node, NO_BYTES),
            distances=tuple(_distance(topology, node, other) for other in vcpus_at),
            threads=threads,
        )
        for number, (node, members) in enumerate(vcpus_at.items())
    )


def apportion(total: int, weights: Sequence[int], granule: int) -> list[int]:
    """Split a total by weights into multiples of the granule; the last share above zero gets the remainder.

    Weights that are such multiples themselves and make up the total come back unchanged. At least one
    weight must be positive.
    """
    units, finer = divmod(total, granule)
    whole = sum(weights)
    shares = [units * weight // whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: (-(units * weights[i] % whole), i))
    for index in by_remainder[: units - sum(shares)]:
        shares[index] += 1
    amounts = [share * granule for share in shares]
    last = max(index for index, weight in enumerate(weights) if shares[index] or (not units and weight))
    amounts[last] += finer
    return amounts


def _memory_of_nodes(memory: Mapping[NumaId, Bytes]) -> dict[NumaId, Bytes]:
    """The bytes of each node that gives any, in whole MiB."""
    if not any(memory.values()):
        return {}
    amounts = apportion(sum(memory.values()), list(memory.values()), CELL_GRANULE)
    return {node: Bytes(amount) for node, amount in zip(memory, amounts, strict=True) if amount}


def _threads(topology: Topology, vcpus: Sequence[CpuId], vcpus_at: Mapping[NumaId, Sequence[int]]) -> int:
    """The threads of each guest core: several only if consecutive vCPUs are the siblings of one host core.

    QEMU numbers vCPUs thread by thread, then core by core; another order would show false siblings to
    the guest.
    """
    cores = [topology.core_of[cpu] for cpu in vcpus]
    threads = cores.count(cores[0])
    if len(vcpus) % threads:
        return 1
    cell_of = {vcpu: node for node, members in vcpus_at.items() for vcpu in members}
    blocks = [range(start, start + threads) for start in range(0, len(vcpus), threads)]
    lined_up = all(len({(cores[vcpu], cell_of[vcpu]) for vcpu in block}) == 1 for block in blocks)
    return threads if lined_up and len({cores[block[0]] for block in blocks}) == len(blocks) else 1


def _distance(topology: Topology, here: NumaId, there: NumaId) -> int:
    """The host's distance in this direction, else in the other, limited to values that guests accept."""
    if here == there:
        return LOCAL_DISTANCE
    forth = topology.node_by_id[here].distances.get(there, 0)
    return min(max(forth or topology.distance(here, there), LEAST_DISTANCE), MOST_DISTANCE)


def write_guest_cells(cells: Sequence[GuestCell]) -> Json:
    """Write cells, by their id, and the threads that they share, as fields of a placement."""
    if not cells:
        return {}
    written = [
        {
            "node": cell.node,
            "vcpus": format_cpu_list(mask_of(cell.vcpus)),
            "memory": cell.memory,
            "distances": list(cell.distances),
        }
        for cell in cells
    ]
    return {"guestCells": written, "guestThreads": cells[0].threads}


def read_guest_cells(placement: Fields, *, vcpus: int) -> tuple[GuestCell, ...]:
    """Read the output of `write_guest_cells` for a guest of so many vCPUs; ValueError names the fault."""
    if not placement.raw.get("guestCells"):
        return ()
    threads = placement.whole("guestThreads", most=max(vcpus, 1), least=1, default=1)
    if vcpus % threads:
        raise ValueError(f"guestThreads is {threads}, which does not divide {vcpus} vCPUs into cores")
    entries = list(placement.each("guestCells"))
    cells = tuple(_read_cell(number, cell, len(entries), threads) for number, cell in enumerate(entries))
    if sorted(vcpu for cell in cells for vcpu in cell.vcpus) != list(range(vcpus)):
        raise ValueError(f"guestCells do not hold each of the {vcpus} vCPUs once")
    if len({cell.node for cell in cells}) != len(cells):
        raise ValueError("guestCells has one NUMA node twice")
    if len({bool(cell.memory) for cell in cells}) != 1:
        raise ValueError("guestCells give memory to some cells only; give it to all, or to none")
    return cells


def _read_cell(number: int, cell: Fields, count: int, threads: int) -> GuestCell:
    distances = cell.list("distances")
    if len(distances) != count:
        raise cell.bad("distances", f"a list of {count} distances")
    for other, value in enumerate(distances):
        least, most = (LOCAL_DISTANCE,) * 2 if other == number else (LEAST_DISTANCE, MOST_DISTANCE)
        if type(value) is not int or not least <= value <= most:
            raise ValueError(
                f"{cell.at('distances')}[{other}] is {shown(value)}; it must be from {least} to {most}"
            )
    return GuestCell(
        id=number,
        node=NumaId(cell.whole("node", MAX_CPU)),
        vcpus=tuple(bits_of(cell.cpus("vcpus"))),
        memory=Bytes(cell.whole("memory", MAX_BYTES, default=0)),
        distances=tuple(distances),
        threads=threads,
    )
