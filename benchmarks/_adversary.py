"""Questions to the allocator that take longest, sought by climbing from random ones to slower ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.free_resources import Free
from kvplace.core.request import Request
from kvplace.core.scalars import NO_BYTES, Bytes, CpuId, CpuMask
from kvplace.core.topology import Topology

GIB = Bytes(1 << 30)
_LARGEST = 16
"""GiB of free memory on a NUMA node at most: little, so that large VMs need several."""


@dataclass(frozen=True)
class Question:
    """The free CPUs of a machine, and a request."""

    free: Free
    request: Request


def random_question(machine: Topology, request: Request, chance: Random) -> Question:
    """CPUs free, used by others and in need of memory at random; the sizes too, the rest as asked."""
    share, used, most = chance.random(), chance.random(), chance.choice((1, 2, 8, 40))
    pieces = machine.cores if chance.random() < 0.5 else [1 << cpu for cpu in cpus_of(machine.cpus)]
    pool = mask_of(cpu for piece in pieces if chance.random() < share for cpu in cpus_of(CpuMask(piece)))
    uses = {cpu: chance.randint(1, most) for cpu in cpus_of(pool) if chance.random() < used}
    memory = [chance.randint(0, _LARGEST) * GIB for _ in machine.numa_nodes]
    sized = replace(
        request,
        vcpus=chance.randint(1, max(1, pool.bit_count())),
        memory=chance.randint(1, max(1, sum(memory) // GIB)) * GIB if request.memory else NO_BYTES,
    )
    return Question(_free(machine, pool, uses, memory), sized)


def changed(machine: Topology, question: Question, chance: Random) -> Question:
    """The same question with a few things a little different."""
    pool, uses = question.free.pool, dict(question.free.uses)
    memory = [count for _, count in question.free.memory]
    request = question.request
    for _ in range(chance.choice((1, 1, 2, 3, 6))):
        match chance.randrange(5):
            case 0:
                cpus = list(cpus_of(machine.cpus))
                pool ^= chance.choice(machine.cores) & mask_of(chance.sample(cpus, len(cpus) // 2))
            case 1:
                group, share = chance.choice(machine.l3_groups), chance.random()
                pool = pool & ~group | mask_of(cpu for cpu in cpus_of(group) if chance.random() < share)
            case 2:
                for cpu in chance.sample(list(cpus_of(machine.cpus)), 2):
                    uses[cpu] = chance.choice((0, 1, 2, 3, 9))
            case 3:
                memory[chance.randrange(len(memory))] = chance.randint(0, _LARGEST) * GIB
            case _:
                step = chance.choice((-8, -1, 1, 8))
                request = replace(request, vcpus=max(1, request.vcpus + step))
                if request.memory:
                    request = replace(request, memory=max(GIB, request.memory + chance.choice((-4, 1)) * GIB))
    return Question(_free(machine, pool, uses, memory), request)


def slowest(
    machine: Topology,
    request: Request,
    chance: Random,
    seconds: Callable[[Question], float],
    steps: int,
) -> tuple[Question, list[float]]:
    """The slowest question found in so many steps, a third of them random ones, and the seconds of those."""
    best = random_question(machine, request, chance)
    most = seconds(best)
    beginnings = [most]
    for step in range(1, steps):
        random = step < steps // 3
        other = random_question(machine, request, chance) if random else changed(machine, best, chance)
        took = seconds(other)
        if random:
            beginnings.append(took)
        if took > most:
            took = min(took, seconds(other), seconds(other))
        if took > most:
            best, most = other, took
    return best, beginnings


def _free(machine: Topology, pool: int, uses: dict[CpuId, int], memory: Sequence[int]) -> Free:
    named = {cpu: count for cpu, count in uses.items() if count and pool >> cpu & 1}
    return Free(
        cpus=pool & ~mask_of(named),
        pool=CpuMask(pool),
        uses=tuple(sorted(named.items())),
        memory=tuple((node.id, Bytes(count)) for node, count in zip(machine.numa_nodes, memory, strict=True)),
    )
