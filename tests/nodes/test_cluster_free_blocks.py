"""The free blocks of the whole cluster: kept in step with every node, and never long at a time."""

from __future__ import annotations

from random import Random

import pytest

from kvplace.core import search_budget
from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.free_resources import BLOCK_LEVELS, free_blocks_of
from kvplace.core.ledger import Claim, Ledger
from kvplace.core.request import Policy
from kvplace.core.scalars import CpuMask, NodeName, PodUid
from kvplace.kube.object_records import LedgerRecord, NodeRecord, TopologyRecord
from kvplace.kube.watches import Apply, Delete
from kvplace.nodes import node_cache
from kvplace.nodes.node_cache import ClusterFreeBlocks, NodeCache
from tests.event_loop_turns import with_turns
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import EIGHT, TWO

MACHINES = [EIGHT, TWO]


def add_node(cache: NodeCache, number: int) -> NodeName:
    name = NodeName(f"n{number}")
    cache.nodes.apply(Apply(NodeRecord(name, f"uid-{number}")))
    cache.topologies.apply(Apply(TopologyRecord(name, MACHINES[number % 2])))
    return name


def give_out(cache: NodeCache, node: NodeName, cpus: CpuMask, version: int) -> None:
    """Let a pod own CPUs of a node, or none."""
    uid = PodUid("db")
    claim = Claim(uid, "a", "b", "", Policy.EXCLUSIVE, cpus, cpus, {}, {}, "")
    ledger = Ledger(dict.fromkeys(cpus_of(cpus), uid), {uid: claim}) if cpus else Ledger()
    cache.ledgers._keep(LedgerRecord(node, ledger, str(version), uid=f"ledger-{node}"))


async def test_after_any_changes_the_totals_are_those_of_a_fresh_count() -> None:
    random, cache = Random(7), NodeCache(FaultyCluster())
    free_blocks = ClusterFreeBlocks(cache)
    for step in range(400):
        number = random.randrange(12)
        name = NodeName(f"n{number}")
        match random.choice(["add", "give", "give", "give", "delete", "look"]):
            case "add":
                add_node(cache, number)
            case "give":
                give_out(cache, name, CpuMask(random.getrandbits(8)), step + 1)
            case "delete" if name in cache.nodes.records:
                cache.nodes.apply(Delete(cache.nodes.records[name]))
            case _:
                await free_blocks.refresh()
                expect_fresh_count(cache, free_blocks)
    await free_blocks.refresh()
    expect_fresh_count(cache, free_blocks)


def expect_fresh_count(cache: NodeCache, free_blocks: ClusterFreeBlocks) -> None:
    totals = free_blocks.totals
    fresh = []
    for node in cache.nodes.records:
        topology = MACHINES[int(node[1:]) % 2]
        free = topology.allocatable & ~mask_of(cache.ledger(node).owners)
        fresh.append(free_blocks_of(topology, free))
    assert totals.nodes == len(fresh)
    assert totals.free == sum(one.free for one in fresh)
    assert totals.allocatable == sum(one.allocatable for one in fresh)
    for domain in BLOCK_LEVELS:
        sizes = [one.largest[domain].cpus for one in fresh]
        possible = sum(one.largest[domain].possible for one in fresh)
        assert totals.largest_cpus(domain) == max(sizes, default=0)
        assert totals.largest_cores(domain) == max((one.largest[domain].cores for one in fresh), default=0)
        assert totals.nodes_with(domain, 4) == len([size for size in sizes if size >= 4])
        assert totals.fragmentation(domain) == pytest.approx(1 - sum(sizes) / possible if possible else 0)


async def test_only_nodes_that_changed_are_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = NodeCache(FaultyCluster())
    free_blocks = ClusterFreeBlocks(cache)
    for number in range(100):
        add_node(cache, number)
    await free_blocks.refresh()
    looked: list[int] = []

    def counted(*args: object) -> object:
        looked.append(1)
        return free_blocks_of(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(node_cache, "free_blocks_of", counted)
    give_out(cache, NodeName("n3"), CpuMask(0b1111), 1)
    await free_blocks.refresh()
    assert len(looked) == 1


async def test_others_have_their_turn_while_many_nodes_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_budget, "STEPS_OF_A_TURN", 1)
    cache = NodeCache(FaultyCluster())
    free_blocks = ClusterFreeBlocks(cache)
    for number in range(50):
        add_node(cache, number)
    _, turns = await with_turns(free_blocks.refresh())
    assert turns >= 49


async def test_a_node_that_came_and_went_unseen_is_not_kept() -> None:
    cache = NodeCache(FaultyCluster())
    free_blocks = ClusterFreeBlocks(cache)
    name = add_node(cache, 1)
    cache.nodes.apply(Delete(cache.nodes.records[name]))
    assert not free_blocks._changed
