"""The node cache follows nodes, topologies and ledgers, and forgets what is gone."""

from __future__ import annotations

import pytest

from kvplace.core.cpuset import cpus_of, mask_of, parse_cpu_list
from kvplace.core.errors import Corrupt
from kvplace.core.free_resources import MemoryInUse
from kvplace.core.ledger import Claim, Ledger, LedgerChange, claim_of
from kvplace.core.node_topology import Enforcement
from kvplace.core.placement import Placement
from kvplace.core.request import Policy
from kvplace.core.scalars import NO_CPUS, Bytes, CpuMask, NodeName, NumaId, PodUid
from kvplace.kube.object_records import LedgerRecord, NodeRecord, TopologyRecord
from kvplace.kube.watches import Apply, Delete, Init, InitDone
from kvplace.nodes.node_cache import NodeCache, running_node_cache
from kvplace.nodes.node_machine import NodeMachine, NodeSnapshot, Unusable
from tests.kube.faulty_cluster import FaultyCluster
from tests.kube.restored_cluster import RestoredCluster
from tests.nodes.machines import EIGHT

NODE = NodeRecord(NodeName("n"), "uid")
HELD = parse_cpu_list("2-3")
"""CPUs that the kubelet's own static policy holds."""


@pytest.fixture
def cache() -> NodeCache:
    """A cache that has seen one node of eight CPUs, two of which the kubelet holds."""
    made = NodeCache(FaultyCluster())
    made.nodes.apply(Apply(NODE))
    made.topologies.apply(Apply(TopologyRecord(NodeName("n"), EIGHT, kubelet_cpus=CpuMask(HELD))))
    return made


def claim(uid: str, cpus: int) -> Claim:
    return Claim(
        PodUid(uid),
        "default",
        uid,
        "",
        Policy.EXCLUSIVE,
        CpuMask(cpus),
        CpuMask(cpus),
        {},
        {},
        "",
    )


def ledger(cpus: int, version: str) -> LedgerRecord:
    owner = claim("db", cpus)
    owners = dict.fromkeys(cpus_of(CpuMask(cpus)), owner.uid)
    return LedgerRecord(NodeName("n"), Ledger(owners, {PodUid("db"): owner}), version, uid="ledger")


def free_cpus(cache: NodeCache) -> int:
    snapshot = cache.snapshot(NodeName("n"))
    assert isinstance(snapshot, NodeSnapshot)
    return snapshot.free.cpus


def test_cpus_of_the_kubelet_the_ledger_and_holds_are_not_free(cache: NodeCache) -> None:
    assert free_cpus(cache) == mask_of([0, 1, 4, 5, 6, 7])
    see_ledger(cache, ledger(0b1, "1"))
    assert free_cpus(cache) == mask_of([1, 4, 5, 6, 7])
    held = cache.snapshot(NodeName("n"), [claim("web", 0b10)])
    assert isinstance(held, NodeSnapshot)
    assert held.free.cpus == mask_of([4, 5, 6, 7])
    cache.topologies.apply(Apply(TopologyRecord(NodeName("n"), EIGHT)))
    assert free_cpus(cache) == mask_of([1, 2, 3, 4, 5, 6, 7])


@pytest.mark.parametrize("enforcement", list(Enforcement))
def test_preemption_counts_the_same_resources_as_free(cache: NodeCache, enforcement: Enforcement) -> None:
    in_use = MemoryInUse({NumaId(0): Bytes(1 << 30)})
    described = TopologyRecord(
        NodeName("n"), EIGHT, kubelet_cpus=CpuMask(HELD), enforcement=enforcement, in_use=in_use
    )
    cache.topologies.apply(Apply(described))
    pool = claim_of(PodUid("pool"), Placement(Policy.NUMA, (), mask_of([4, 5, 6, 7]), NO_CPUS))
    see_ledger(cache, LedgerRecord(NodeName("n"), Ledger().after(LedgerChange(claims=(pool,))), "1"))
    holds = [claim("web", 0b10)]
    machine, snapshot = cache.machine(NodeName("n")), cache.snapshot(NodeName("n"), holds)
    assert isinstance(machine, NodeMachine)
    assert isinstance(snapshot, NodeSnapshot)
    assert cache.occupied(machine, cache.ledger(NodeName("n")), holds).free_without(()) == snapshot.free
    shrinks = enforcement is not Enforcement.NONE
    assert snapshot.free.cpus == mask_of([0, 4, 5, 6] if shrinks else [0])


def test_the_largest_node_is_the_one_that_gives_out_most_cpus(cache: NodeCache) -> None:
    cache.nodes.apply(Apply(NodeRecord(NodeName("undescribed"), "uid-2")))
    assert cache.largest_node == 6
    cache.nodes.apply(Apply(NodeRecord(NodeName("larger"), "uid-3")))
    cache.topologies.apply(Apply(TopologyRecord(NodeName("larger"), EIGHT)))
    assert cache.largest_node == 8
    cache.nodes.apply(Delete(NodeRecord(NodeName("larger"), "uid-3")))
    assert cache.largest_node == 6
    cache.nodes.apply(Delete(NODE))
    assert cache.largest_node is None


def test_listeners_are_called_for_a_machine_or_ledger_that_changed_and_for_nothing_else(
    cache: NodeCache,
) -> None:
    changed: list[str] = []
    cache.subscribe(changed.append)
    machine = cache.machine(NodeName("n"))
    cache.topologies.apply(
        Apply(TopologyRecord(NodeName("n"), EIGHT, kubelet_cpus=CpuMask(HELD), resource_version="2"))
    )
    cache.nodes.apply(Apply(NodeRecord(NodeName("n"), "uid", resource_version="2")))
    assert cache.machine(NodeName("n")) is machine
    assert changed == []
    cache.topologies.apply(Apply(TopologyRecord(NodeName("n"), EIGHT, kubelet_cpus=CpuMask(0b1))))
    assert cache.machine(NodeName("n")) == NodeMachine(EIGHT.giving_out(CpuMask(0b11111110)))
    cache.nodes.apply(Apply(NodeRecord(NodeName("n"), "uid", cpu_map='{"socket0": ["5"]}')))
    assert cache.machine(NodeName("n")) == NodeMachine(EIGHT.giving_out(CpuMask(1 << 5)))
    see_ledger(cache, ledger(0b1, "1"))
    assert changed == ["n", "n", "n"]


def test_a_node_whose_ledger_cannot_be_read_is_unusable(cache: NodeCache) -> None:
    see_ledger(cache, LedgerRecord(NodeName("n"), Ledger(), "1", problem="owners must be an object"))
    assert isinstance(cache.machine(NodeName("n")), NodeMachine)
    assert cache.snapshot(NodeName("n")) == Unusable("its ledger cannot be read: owners must be an object")


def test_nodes_that_are_gone_are_forgotten(cache: NodeCache) -> None:
    assert isinstance(cache.machine(NodeName("n")), NodeMachine)
    cache.nodes.apply(Delete(NODE))
    for name in ("n", "never-there"):
        assert cache.snapshot(NodeName(name)) == Unusable("the node is not known to the API server")
    assert cache._machines == {}


def test_it_has_synced_once_every_store_has() -> None:
    cache = NodeCache(FaultyCluster())
    for store in cache.stores:
        assert not cache.has_synced
        store.apply(Init())
        store.apply(InitDone())
    assert cache.has_synced


async def test_it_ends_when_the_api_server_was_restored_since_it_remembers_its_own_writes() -> None:
    with pytest.raises(ExceptionGroup) as ended:
        async with running_node_cache(RestoredCluster()):
            pass
    assert ended.group_contains(Corrupt, match="gone back")


def see_ledger(cache: NodeCache, record: LedgerRecord) -> None:
    cache.ledger_store.apply(Apply(record))
