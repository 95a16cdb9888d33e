"""A cluster to check: servers of several kinds, VMs of several teams, and what goes wrong now and then.

The allocator places its VMs, and all facts about a VM follow from its placement.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from kvplace.core.cpuset import format_cpu_list, lowest, mask_of, union
from kvplace.core.request import EmulatorThreads, PinningOptions, Policy, Scope, Smt
from kvplace.core.scalars import CpuMask
from kvplace.machines.server_types import read_machine
from tests.web.staged_cluster import StagedCluster, Vm

NODES = {"2x-epyc-9354-nps2": 12, "2x-xeon-8480plus": 6, "epyc-7502p": 8}
"""How many servers of each type there are."""
FILLED = (0.55, 0.95, 0.8, 0.35, 1.0, 0.7)
"""How full the nodes are, one after the other."""


@dataclass(frozen=True)
class Team:
    """The users that run VMs, and their requests."""

    namespace: str
    name: str
    sizes: tuple[int, ...]
    options: PinningOptions


TEAMS = (
    Team("trading", "feed", (4, 8), PinningOptions(Scope.ONE_L3, smt=Smt.REQUIRE)),
    Team("trading", "engine", (8, 16), PinningOptions(Scope.ONE_NUMA)),
    Team("games", "arena", (8,), PinningOptions(Scope.ONE_L3)),
    Team("shop", "orders-db", (16,), PinningOptions(Scope.ONE_SOCKET)),
    Team("shop", "web", (2, 4), PinningOptions(Scope.ONE_NUMA, Policy.SHARE)),
    Team("ci", "runner", (4, 6), PinningOptions(Scope.ANY)),
    Team("nfv", "upf", (8, 12), PinningOptions(Scope.ONE_NUMA, emulator_threads=EmulatorThreads.ISOLATE)),
)


async def sample() -> tuple[StagedCluster, Vm]:
    """Make the cluster; returns also the VM that does not run where it was placed."""
    chance = random.Random(20)
    stage = StagedCluster()
    number = 0
    numbers = itertools.count(1)
    for machine, count in NODES.items():
        for _ in range(count):
            number += 1
            node = f"worker-{number:02}"
            stage.add_node(node, read_machine(machine))
            await _live(stage, node, FILLED[number % len(FILLED)], chance, numbers)
    stage.cluster.create_node("worker-new")
    await stage.lose_agent("worker-05")
    await stage.lose_agent("worker-17")
    for name in ("warehouse-db", "warehouse-etl"):
        stage.cluster.create_pod(
            f"virt-launcher-{name}", namespace="shop", uid=f"uid-{name}", vmi=name, request="{}"
        )
    return stage, await _drift(stage, "worker-03")


async def _live(
    stage: StagedCluster, node: str, share: float, chance: random.Random, numbers: Iterator[int]
) -> None:
    """Fill a node, and end some VMs again, as happens in a long life."""
    wanted = share * stage.machine(node).allocatable.bit_count()
    used = 0
    started = []
    while used < wanted:
        team = chance.choice(TEAMS)
        vcpus = chance.choice(team.sizes)
        name = f"{team.name}-{next(numbers)}"
        vm = await stage.run_vm(node, vcpus, name=name, namespace=team.namespace, options=team.options)
        used += vcpus
        if vm is not None:
            started.append(vm)
    for vm in chance.sample(started, len(started) // 5):
        await stage.end_vm(vm)


async def _drift(stage: StagedCluster, node: str) -> Vm:
    """Let the first vCPU of a VM run on a free CPU beside its own."""
    vm = next(one for one in stage.vms.values() if one.node == node and one.name.startswith("engine"))
    taken = union(one.claim.cpus for one in stage.vms.values() if one.node == node)
    away = lowest(CpuMask(stage.machine(node).allocatable & ~taken), 1)
    own = vm.placement.placement.vcpus[0]
    sentence = f"vCPU 0 may run on CPU {format_cpu_list(away)} instead of {own}"
    await stage.report(node, {vm.uid: CpuMask(vm.claim.cpus & ~mask_of((own,)) | away)}, sentence=sentence)
    return vm
